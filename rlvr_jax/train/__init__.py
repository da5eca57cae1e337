"""The training loop around the update, and everything that it needs on the host."""

__all__ = [
  "checkpointing",
  "cluster",
  "generation",
  "loop",
  "reporting",
  "setup",
  "start",
]
