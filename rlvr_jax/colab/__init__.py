"""Functions for the notebooks in colabs/, which contain no logic of their own."""

__all__ = [
  "display",
  "fade",
  "first_run",
  "geometry",
  "methods",
  "p3o",
  "rollouts",
  "runs",
  "staleness",
  "toy",
]
