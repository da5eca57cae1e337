"""The loop around the update, and its rooms."""

__all__ = [
  "checkpointing",
  "cluster",
  "generation",
  "loop",
  "reporting",
  "setup",
  "start",
]
