"""What the cells of the notebooks in colabs/ call; a notebook holds no logic of its own."""

__all__ = [
  "display",
  "fade",
  "first_run",
  "geometry",
  "methods",
  "p3o",
  "reproduction",
  "results",
  "rollouts",
  "runs",
  "staleness",
  "toy",
]
