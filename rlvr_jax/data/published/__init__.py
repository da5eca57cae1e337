"""Published data sets, read from their files by one tensorflow-datasets builder.

This file imports nothing, since every task imports `from_files` and thereby this file. An import of
tensorflow-datasets would take long.
"""

__all__ = [
  "builder",
  "dataset",
  "files",
  "from_files",
  "rows",
]
