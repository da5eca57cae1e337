"""Checkpoints, and the workdir, which only one process at a time may write."""

__all__ = [
  "checkpoint",
  "checkpoint_files",
  "claim",
  "workdir",
]
