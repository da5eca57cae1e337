"""The commands of the program: train, evaluate, export, check, sweep, costs, view."""

__all__ = [
  "check",
  "choose",
  "eval",
  "export",
  "sweep",
  "train",
  "view",
]
