"""A fleet: other programs sample a run's groups and exchange files through a folder or a bucket."""

__all__ = [
  "exchange",
  "program",
  "remote",
]
