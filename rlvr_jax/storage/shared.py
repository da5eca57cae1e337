"""Objects that several programs write on conditions, on a disk or in a bucket."""

from __future__ import annotations

import os
import pathlib
import re
import uuid
from typing import Protocol

from rlvr_jax.storage.bucket import Bucket, ChangedError
from rlvr_jax.storage.places import in_bucket

_FILE = re.compile(r"(.+)\.(\d{8,})")


class SharedFiles(Protocol):
  def names(self, prefix: str = "") -> list[str]: ...
  def read(self, name: str) -> tuple[bytes, int]: ...
  def put(self, name: str, data: bytes, *, generation: int | None = None) -> int: ...
  def delete(self, name: str, *, generation: int | None = None) -> None: ...


class _DiskFiles:
  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)

  def _generations(self) -> dict[str, int]:
    found: dict[str, int] = {}
    for root, _, files in os.walk(self._folder):
      for file in files:
        if match := _FILE.fullmatch(os.path.relpath(os.path.join(root, file), self._folder)):
          found[match[1]] = max(found.get(match[1], 0), int(match[2]))
    return found

  def names(self, prefix: str = "") -> list[str]:
    return sorted(name for name in self._generations() if name.startswith(prefix))

  def _current(self, name: str) -> int:
    path = self._folder / name
    found = [0]
    if path.parent.is_dir():
      for file in os.listdir(path.parent):
        match = _FILE.fullmatch(file)
        if match and match[1] == path.name:
          found.append(int(match[2]))
    return max(found)

  def read(self, name: str) -> tuple[bytes, int]:
    while generation := self._current(name):
      try:
        return (self._folder / f"{name}.{generation:08d}").read_bytes(), generation
      except FileNotFoundError:
        pass
    raise FileNotFoundError(name)

  def put(self, name: str, data: bytes, *, generation: int | None = None) -> int:
    current = self._current(name)
    if generation is not None and generation != current:
      raise ChangedError(name)
    path = self._folder / f"{name}.{current + 1:08d}"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    temporary.write_bytes(data)
    try:
      os.link(temporary, path)
    except FileExistsError:
      raise ChangedError(name) from None
    finally:
      temporary.unlink()
    if current:
      (self._folder / f"{name}.{current:08d}").unlink(missing_ok=True)
    return current + 1

  def delete(self, name: str, *, generation: int | None = None) -> None:
    current = self._current(name)
    if current and generation in (None, current):
      (self._folder / f"{name}.{current:08d}").unlink(missing_ok=True)


class _BucketFiles:
  def __init__(self, bucket: Bucket):
    self._bucket = bucket
    self.names, self.put, self.delete = bucket.names, bucket.put, bucket.delete

  def read(self, name: str) -> tuple[bytes, int]:
    return self._bucket.read_generation(name)


def open_shared(folder: pathlib.Path) -> SharedFiles:
  return _BucketFiles(Bucket(folder)) if in_bucket(folder) else _DiskFiles(folder)
