"""Objects that several programs write on conditions, on a disk or in a bucket.

An object has a generation, which every write raises. A write may ask for the generation that its
writer knows: of several such writers one succeeds. A bucket decides that itself. On a disk,
generation g of the object NAME is the file NAME.g, made by a hard link, which fails if the file
exists; the highest number counts. A writer that finds a higher number after it has linked its own
has lost: its generation had existed and been removed, or was replaced at once.

Objects are complete or absent. What a crash of the machine may damage, their checksums show:
writes do not wait for the disk. A file that it has left empty counts as absent.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Protocol

from rlvr_jax.storage.bucket import DEADLINE_S, Bucket, ChangedError
from rlvr_jax.storage.files import TEMPORARY, path_within, report_full_disk
from rlvr_jax.storage.places import in_bucket

_FILE = re.compile(r"(.+)\.(\d{8,})")


class SharedFiles(Protocol):
  """The objects of a folder; names may have one slash."""

  def names(self, prefix: str = "") -> list[str]:
    """Names of the objects that begin with `prefix`, which has the folder; sorted."""
    ...

  def generations(self, prefix: str = "") -> dict[str, int]:
    """Generations of the objects that begin with `prefix`, by name, sorted."""
    ...

  def read_generation(self, name: str) -> tuple[bytes, int]:
    """Content and generation of an object; raises FileNotFoundError if it does not exist."""
    ...

  def put(
    self,
    name: str,
    data: bytes,
    *,
    generation: int | None = None,
    deadline_s: float = DEADLINE_S,
  ) -> int:
    """Writes an object.

    Args:
      name: of the object.
      data: its bytes, at least one.
      generation: the generation that it must have; 0: it must not exist; None: any.
      deadline_s: seconds after which a request to a bucket is cancelled.
    Returns:
      The new generation.
    Raises:
      ChangedError: the object has another generation.
      UnreachableError: the bucket did not respond; the object may have been written nevertheless.
      DiskFullError: no space is left.
    """
    ...

  def delete(self, name: str, *, generation: int | None = None) -> None:
    """Removes an object; does nothing if it does not exist or has another generation."""
    ...


class SharedError(OSError):
  """A file system lacks what several programs need to write to one folder."""


class DiskFiles:
  """Objects of a folder on a disk; methods as `SharedFiles`."""

  def __init__(self, folder: pathlib.Path):
    """Creates the folder.

    Raises:
      SharedError: its file system has no hard links that fail if the file exists.
    """
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    probe, link = (path_within(folder, f"{uuid.uuid4().hex}{TEMPORARY}") for _ in range(2))
    try:
      probe.write_bytes(b"")
      os.link(probe, link)
      with contextlib.suppress(FileExistsError):
        os.link(probe, link)
        raise OSError("it replaced a file that existed")
    except OSError as error:
      raise SharedError(
        f"{folder} is on a file system without exclusive hard links ({error.strerror or error}),"
        " by which programs agree; use a local disk, NFS, or gs://BUCKET/FOLDER as --workdir"
      ) from error
    finally:
      probe.unlink(missing_ok=True)
      link.unlink(missing_ok=True)

  def names(self, prefix: str = "") -> list[str]:
    return [*self.generations(prefix)]

  def generations(self, prefix: str = "") -> dict[str, int]:
    directory, slash, _ = prefix.rpartition("/")
    newest: dict[str, int] = {}
    parent = path_within(self._folder, directory) if directory else self._folder
    for file, generation in self._list(parent):
      name = f"{directory}{slash}{file}"
      newest[name] = max(generation, newest.get(name, 0))
    exists = lambda name: self._size(name, newest[name]) > 0  # empty: removed, or lost by a crash
    found = sorted(name for name in newest if name.startswith(prefix) and exists(name))
    return {name: newest[name] for name in found}

  def read_generation(self, name: str) -> tuple[bytes, int]:
    while generation := self._newest(name):
      with contextlib.suppress(FileNotFoundError):  # replaced meanwhile
        if data := self._path(name, generation).read_bytes():
          return data, generation
        break
    raise FileNotFoundError(f"{self._folder}/{name} does not exist")

  def put(
    self,
    name: str,
    data: bytes,
    *,
    generation: int | None = None,
    deadline_s: float = math.inf,
  ) -> int:
    newest = self._newest(name)
    absent = not newest or not self._size(name, newest)
    if generation is not None and generation != (0 if absent else newest):
      raise self._changed(name)
    try:
      return self._link(name, data, newest + 1)
    except ChangedError:
      if generation is not None:
        raise
    return self.put(name, data)

  def delete(self, name: str, *, generation: int | None = None) -> None:
    if generation is None:  # nobody writes it on a condition any more
      for path in self._path(name, 0).parent.glob(f"{pathlib.Path(name).name}.*"):
        path.unlink(missing_ok=True)
    elif generation == self._newest(name) and self._size(name, generation):
      # An empty file, so that a writer that knows this generation loses.
      with contextlib.suppress(ChangedError):
        self._link(name, b"", generation + 1)

  def _link(self, name: str, data: bytes, generation: int) -> int:
    """Makes a generation of an object; raises ChangedError if it is not the newest then."""
    path = self._path(name, generation)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f"{uuid.uuid4().hex}{TEMPORARY}")
    try:
      with report_full_disk(path):
        temporary.write_bytes(data)
        os.link(temporary, path)
    except FileExistsError:
      raise self._changed(name) from None
    finally:
      temporary.unlink(missing_ok=True)
    present = self._files(name)
    if max(present, default=0) != generation:
      path.unlink(missing_ok=True)
      raise self._changed(name)
    for older in present:
      if older < generation:
        self._path(name, older).unlink(missing_ok=True)
    return generation

  def _newest(self, name: str) -> int:
    return max(self._files(name), default=0)

  def _files(self, name: str) -> list[int]:
    """The generations of an object that have a file."""
    path = path_within(self._folder, name)
    return [generation for other, generation in self._list(path.parent) if other == path.name]

  def _list(self, directory: pathlib.Path) -> Iterator[tuple[str, int]]:
    """(name, generation) of the files of a folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      for file in os.listdir(directory):
        if match := _FILE.fullmatch(file):
          yield match[1], int(match[2])

  def _path(self, name: str, generation: int) -> pathlib.Path:
    return path_within(self._folder, f"{name}.{generation:08d}")

  def _size(self, name: str, generation: int) -> int:
    try:
      return self._path(name, generation).stat().st_size
    except FileNotFoundError:  # it has a successor
      return 1

  def _changed(self, name: str) -> ChangedError:
    return ChangedError(f"{self._folder}/{name} was changed by another process")


def open_shared(folder: pathlib.Path, guard: Callable[[], float] = lambda: math.inf) -> SharedFiles:
  """The objects of a folder.

  Args:
    folder: from `parse_path`; created on a disk.
    guard: of the writes into a bucket, see `Bucket`.
  Raises:
    SharedError: the file system lacks what is needed.
  """
  return Bucket(folder, guard) if in_bucket(folder) else DiskFiles(folder)
