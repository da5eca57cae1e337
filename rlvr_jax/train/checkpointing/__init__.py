"""Checkpoints, and the workdir, which only one run at a time may write."""

__all__ = [
  "checkpoint",
  "checkpoint_files",
  "claim",
  "workdir",
]
