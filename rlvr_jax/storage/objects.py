"""Objects that several programs share, in a folder or a bucket: the first put of a name counts.

Each object is complete or absent. Nobody locks anything: a put of a name that exists changes
nothing and says so. `replace` is for objects with one writer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
import time
import uuid
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple, Protocol, TypeVar

from rlvr_jax.storage.bucket import Bucket, ChangedError, UnreachableError
from rlvr_jax.storage.files import (
  TEMPORARY,
  open_own,
  path_within,
  replace_file,
  report_full_disk,
  sync_folder,
)
from rlvr_jax.storage.places import in_bucket

REQUEST_S = 60.0  # deadline of a request to a bucket
UNREACHABLE_S = 600.0  # for which a bucket that does not respond is asked again
_AGAIN_S = 2.0
_STALE_TRIES = 3
_T = TypeVar("_T")


class Listed(NamedTuple):
  """An object in a listing."""

  size: int  # bytes
  change: Hashable  # another one whenever the object was written; compared, never ordered


class Objects(Protocol):
  """The objects of a folder; their names have one slash, as "draws/7"."""

  def put(self, name: str, data: bytes) -> bool:
    """Writes an object unless it exists; returns whether it was written."""
    ...

  def replace(self, name: str, data: bytes) -> None:
    """Writes an object, whether or not it exists; one program alone may write this name."""
    ...

  def get(self, name: str) -> bytes | None:
    """The bytes of an object; None if it does not exist."""
    ...

  def list(self) -> dict[str, Listed]:
    """All objects by name, sorted."""
    ...

  def remove(self, name: str) -> None:
    """Removes an object; does nothing if it does not exist."""
    ...


class FolderObjects:
  """Objects that are files of a folder; methods as of `Objects`. Written bytes are durable.

  A network file system may answer that a file which another program has just removed or replaced is
  stale: then its name is looked up anew.
  """

  def __init__(self, folder: pathlib.Path):
    """Creates the folder."""
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)

  def put(self, name: str, data: bytes) -> bool:
    path = self._path(name)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f"{uuid.uuid4().hex}{TEMPORARY}")
    try:
      with report_full_disk(path):
        _unless_stale(lambda: _write_durably(temporary, data))
        _unless_stale(lambda: os.link(temporary, path))  # fails if the name exists
        _unless_stale(lambda: sync_folder(path.parent))
    except FileExistsError:
      return temporary.stat().st_nlink > 1  # this link was made, and the answer to it lost
    except PermissionError as error:
      raise OSError(
        f"{path} cannot be made by a hard link ({error.strerror}), by which programs agree on who"
        " was first; use a local disk, NFS, or gs://BUCKET/FOLDER as --workdir"
      ) from error
    finally:
      temporary.unlink(missing_ok=True)
    return True

  def replace(self, name: str, data: bytes) -> None:
    _unless_stale(lambda: self._replace(name, data))

  def _replace(self, name: str, data: bytes) -> None:
    path = self._path(name)
    path.parent.mkdir(exist_ok=True)
    with replace_file(path) as file:
      file.write(data)

  def get(self, name: str) -> bytes | None:
    return _unless_stale(lambda: self._get(name))

  def _get(self, name: str) -> bytes | None:
    # No link is followed, and what is no file, such as a pipe, does not block.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    path = self._path(name)
    try:
      descriptor = os.open(path, flags)
    except OSError as error:
      if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
        return None
      raise
    with open(descriptor, "rb") as file:
      return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else None

  def list(self) -> dict[str, Listed]:
    return _unless_stale(lambda: dict(sorted(self._entries())))

  def _entries(self) -> Iterator[tuple[str, Listed]]:
    for folder in sorted(path for path in self._folder.iterdir() if path.is_dir()):
      for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
          found = entry.stat(follow_symlinks=False)
          if stat.S_ISREG(found.st_mode) and not entry.name.endswith(TEMPORARY):
            change = (found.st_mtime_ns, found.st_ino)
            yield f"{folder.name}/{entry.name}", Listed(found.st_size, change)

  def remove(self, name: str) -> None:
    _unless_stale(lambda: self._path(name).unlink(missing_ok=True))

  def _path(self, name: str) -> pathlib.Path:
    return path_within(self._folder, name)


def _write_durably(path: pathlib.Path, data: bytes) -> None:
  with open_own(path, "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _unless_stale(action: Callable[[], _T]) -> _T:
  """The result of an action on files, which is repeated while the file system calls them stale."""
  for _ in range(_STALE_TRIES - 1):
    try:
      return action()
    except OSError as error:
      if error.errno != errno.ESTALE:
        raise
  return action()


class BucketObjects:
  """Objects of a bucket; methods as of `Objects`. One that does not respond is asked again.

  They raise UnreachableError once it has not responded for `UNREACHABLE_S`.
  """

  def __init__(self, bucket: Bucket):
    self._bucket = bucket

  def put(self, name: str, data: bytes) -> bool:
    try:
      _ask_again(lambda: self._bucket.put(name, data, generation=0, deadline_s=REQUEST_S))
    except ChangedError:
      return False
    return True

  def replace(self, name: str, data: bytes) -> None:
    _ask_again(lambda: self._bucket.put(name, data, deadline_s=REQUEST_S))

  def get(self, name: str) -> bytes | None:
    try:
      return _ask_again(lambda: self._bucket.read(name))
    except FileNotFoundError:
      return None

  def list(self) -> dict[str, Listed]:
    found = _ask_again(self._bucket.describe)
    return {name: Listed(size, generation) for name, (size, generation) in sorted(found.items())}

  def remove(self, name: str) -> None:
    _ask_again(lambda: self._bucket.delete(name))


def _ask_again(request: Callable[[], _T]) -> _T:
  """The answer to a request, which is repeated while the bucket cannot be reached."""
  began = time.monotonic()
  while True:
    try:
      return request()
    except UnreachableError:
      if time.monotonic() - began > UNREACHABLE_S:
        raise
    time.sleep(_AGAIN_S)


def open_objects(folder: pathlib.Path, guard: Callable[[], float] | None = None) -> Objects:
  """The objects of a folder, which is created on a disk.

  Args:
    folder: from `parse_path`.
    guard: of the writes into a bucket, see `Bucket`; None: none.
  """
  if not in_bucket(folder):
    return FolderObjects(folder)
  return BucketObjects(Bucket(folder, guard) if guard else Bucket(folder))
