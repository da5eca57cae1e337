"""Files that survive a crash, a full disk or a lost machine, on a disk or in a bucket."""

__all__ = [
  "bucket",
  "files",
  "folders",
  "objects",
  "places",
]
