"""The commands of the program: train, evaluate, export, and report whether a run fits."""

__all__ = [
  "check",
  "costs",
  "eval",
  "export",
  "fits",
  "hlo",
  "sweep",
  "train",
]
