"""The update, the loop around it, and what a run is built of. `train.step` is the update alone."""

__all__ = [
  "build",
  "checkpoint",
  "learning_rate",
  "loop",
  "metrics",
  "optimizer",
  "sharding",
  "step",
]
