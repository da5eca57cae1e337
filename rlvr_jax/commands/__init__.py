"""The commands of the program, such as train, eval, export, check, sweep, costs and view."""

__all__ = [
  "ahead_of_time",
  "check",
  "choose",
  "eval",
  "export",
  "sample",
  "sweep",
  "train",
  "tune",
  "view",
]
