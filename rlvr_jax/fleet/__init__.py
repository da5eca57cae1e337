"""A fleet: other programs sample for a trainer, and all exchange files in a folder or a bucket."""

__all__ = [
  "exchange",
  "program",
  "remote",
]
