"""A run whose groups other programs sample: they meet in a folder or a bucket, without locks."""

__all__ = [
  "exchange",
  "program",
  "remote",
]
