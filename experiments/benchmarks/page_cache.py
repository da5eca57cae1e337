"""The system's page cache, out of which benchmarks of reading must not be served."""

from __future__ import annotations

import os
import pathlib


def drop_from_cache(folder: pathlib.Path) -> None:
  """Drops a folder's written files from the cache, so that the next read is from the disk."""
  os.sync()  # pages that are not on the disk yet would stay
  for path in folder.rglob("*"):
    if path.is_file():
      with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
