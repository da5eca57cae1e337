"""Published data sets, read from their files by one tensorflow-datasets builder.

This file imports nothing: every task imports `from_files`, and tensorflow-datasets loads slowly.
"""

__all__ = [
  "builder",
  "dataset",
  "files",
  "from_files",
  "rows",
]
