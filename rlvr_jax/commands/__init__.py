"""The commands of the program, such as train, eval, export, check, sweep, costs and view."""

__all__ = [
  "check",
  "choose",
  "eval",
  "export",
  "sweep",
  "train",
  "view",
]
