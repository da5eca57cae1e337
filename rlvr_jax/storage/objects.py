"""Objects of a folder, on a disk or in a bucket; each is complete or absent.

Several programs may share the objects without locks: the first put of a name counts, and a put of
an existing name changes nothing and returns False. `replace` is for objects with one writer.
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
  replace_path,
  report_full_disk,
  sync_folder,
)
from rlvr_jax.storage.places import in_bucket

REQUEST_S = 60.0  # deadline of a write into a bucket
UNREACHABLE_S = 600.0  # seconds for which requests to a bucket without a response are repeated
_AGAIN_S = 2.0
_STALE_TRIES = 3
_LEFT_S = 3600.0  # age from which a temporary file is one of a killed program
_T = TypeVar("_T")


class Listed(NamedTuple):
  """An object in a listing."""

  size: int  # bytes
  change: Hashable  # differs after each write of the object; only tested for equality


class Objects(Protocol):
  """The objects of a folder; their names have at most one slash, such as "draws/7"."""

  def put(self, name: str, data: bytes) -> bool:
    """Writes an object unless it exists; returns whether it was written."""
    ...

  def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
    """Writes an object, whether or not it exists; only one program may write this name.

    By default the object survives a crash of the machine.
    """
    ...

  def get(self, name: str, size: int | None = None) -> bytes | None:
    """The bytes of an object, or its first `size` bytes; None if the object does not exist."""
    ...

  def find(self, name: str) -> Listed | None:
    """The object's entry in the listing; None if it does not exist."""
    ...

  def list(self, prefix: str = "") -> dict[str, Listed]:
    """The objects whose names begin with `prefix`, by name, sorted."""
    ...

  def remove(self, name: str) -> None:
    """Removes an object; does nothing if it does not exist."""
    ...


class FolderObjects:
  """Objects that are files of a folder; implements `Objects`.

  If another program has just removed or replaced a file, a network file system may report that the
  file is stale: then its name is looked up again.
  """

  def __init__(self, folder: pathlib.Path):
    """Creates the folder; removes files in it that killed programs have left half written."""
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob(f"*{TEMPORARY}"), *folder.glob(f"*/*{TEMPORARY}")):
      with contextlib.suppress(OSError):  # another program removes it, too
        if time.time() - path.stat().st_mtime > _LEFT_S:
          path.unlink()

  def put(self, name: str, data: bytes) -> bool:
    path = self._path(name)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f"{uuid.uuid4().hex}{TEMPORARY}")
    try:
      with report_full_disk(path):
        _unless_stale(lambda: _write_durably(temporary, data))
        _unless_stale(lambda: _link(temporary, path))  # fails if the name exists
        _unless_stale(lambda: sync_folder(path.parent))
    except FileExistsError:
      return temporary.stat().st_nlink > 1  # this call has made the link, but the answer was lost
    finally:
      temporary.unlink(missing_ok=True)
    return True

  def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
    _unless_stale(lambda: self._replace(name, data, durable))

  def _replace(self, name: str, data: bytes, durable: bool) -> None:
    path = self._path(name)
    path.parent.mkdir(exist_ok=True)
    with replace_path(path, durable=durable) as temporary:
      temporary.write_bytes(data)
      if temporary.read_bytes() != data:
        raise OSError(
          errno.EIO, f"{path} differs from the written bytes when read back; check the disk"
        )

  def get(self, name: str, size: int | None = None) -> bytes | None:
    return _unless_stale(lambda: self._get(name, size))

  def _get(self, name: str, size: int | None) -> bytes | None:
    # No symbolic link is followed, and opening a pipe does not block.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    path = self._path(name)
    try:
      descriptor = os.open(path, flags)
    except OSError as error:
      if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
        return None
      raise
    with open(descriptor, "rb") as file:
      return file.read(size) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None

  def find(self, name: str) -> Listed | None:
    try:
      return _unless_stale(lambda: _describe(self._path(name).lstat()))
    except (FileNotFoundError, NotADirectoryError):
      return None

  def list(self, prefix: str = "") -> dict[str, Listed]:
    return _unless_stale(lambda: self._list(prefix))

  def _list(self, prefix: str) -> dict[str, Listed]:
    folder, is_within, _ = prefix.partition("/")
    paths = [self._path(folder)] if is_within else self._folder.iterdir()
    found = {} if is_within else dict(_entries(self._folder, ""))
    for path in paths:
      if path.is_dir():
        found |= _entries(path, f"{path.name}/")
    return {name: found[name] for name in sorted(found) if name.startswith(prefix)}

  def remove(self, name: str) -> None:
    _unless_stale(lambda: self._path(name).unlink(missing_ok=True))

  def _path(self, name: str) -> pathlib.Path:
    return path_within(self._folder, name)


def _write_durably(path: pathlib.Path, data: bytes) -> None:
  with open_own(path, "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _link(temporary: pathlib.Path, path: pathlib.Path) -> None:
  try:
    os.link(temporary, path)
  except OSError as error:
    if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
      raise
    raise OSError(
      f"{path} cannot be created by a hard link ({error.strerror}); hard links decide which of"
      " several programs was first to write a file: use a local disk, NFS, or gs://BUCKET/FOLDER as"
      " --workdir"
    ) from error


def _unless_stale(action: Callable[[], _T]) -> _T:
  """The result of an action on files; tries `_STALE_TRIES` times if the files count as stale."""
  for _ in range(_STALE_TRIES - 1):
    try:
      return action()
    except OSError as error:
      if error.errno != errno.ESTALE:
        raise
  return action()


def _entries(folder: pathlib.Path, prefix: str) -> Iterator[tuple[str, Listed]]:
  """Yields (`prefix` + name, entry) for each file of a folder, except temporary files."""
  for entry in os.scandir(folder):
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
      found = _describe(entry.stat(follow_symlinks=False))
      if found and not entry.name.endswith(TEMPORARY):
        yield f"{prefix}{entry.name}", found


def _describe(status: os.stat_result) -> Listed | None:
  """A file's entry in a listing; None if it is not a regular file."""
  if not stat.S_ISREG(status.st_mode):
    return None
  return Listed(status.st_size, (status.st_mtime_ns, status.st_ino))


class BucketObjects:
  """Objects of a bucket; implements `Objects`.

  Requests are repeated while the bucket does not respond; after `unreachable_s` seconds the methods
  raise UnreachableError.
  """

  def __init__(self, bucket: Bucket, unreachable_s: float):
    self._bucket = bucket
    self._unreachable_s = unreachable_s

  def put(self, name: str, data: bytes) -> bool:
    try:
      self._ask(lambda: self._bucket.put(name, data, generation=0, deadline_s=REQUEST_S))
    except ChangedError:
      return False
    return True

  def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
    del durable
    self._ask(lambda: self._bucket.put(name, data, deadline_s=REQUEST_S))

  def get(self, name: str, size: int | None = None) -> bytes | None:
    read = self._bucket.read
    try:
      return self._ask(lambda: read(name) if size is None else self._bucket.read_start(name, size))
    except FileNotFoundError:
      return None

  def find(self, name: str) -> Listed | None:
    found = self._ask(lambda: self._bucket.describe(name))
    return Listed(*found[name]) if name in found else None

  def list(self, prefix: str = "") -> dict[str, Listed]:
    found = self._ask(lambda: self._bucket.describe(prefix))
    return {name: Listed(*entry) for name, entry in sorted(found.items())}

  def remove(self, name: str) -> None:
    self._ask(lambda: self._bucket.delete(name))

  def _ask(self, request: Callable[[], _T]) -> _T:
    """The answer to a request, which is repeated while the bucket cannot be reached."""
    began = time.monotonic()
    while True:
      try:
        return request()
      except UnreachableError:
        if time.monotonic() - began >= self._unreachable_s:
          raise
      time.sleep(_AGAIN_S)


def open_objects(
  folder: pathlib.Path,
  guard: Callable[[], float] | None = None,
  *,
  unreachable_s: float = UNREACHABLE_S,
) -> Objects:
  """The objects of a folder; creates the folder if it is on a disk.

  Args:
    folder: the result of `parse_path`.
    guard: called before every write into a bucket, see `Bucket`; None for no guard.
    unreachable_s: seconds for which requests are repeated while the bucket does not respond.
  """
  if not in_bucket(folder):
    return FolderObjects(folder)
  bucket = Bucket(folder, guard) if guard else Bucket(folder)
  return BucketObjects(bucket, unreachable_s)
