"""The parameters that a run starts or resumes from."""

__all__ = [
  "parameters",
  "restore",
]
