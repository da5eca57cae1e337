"""Where a run's files stay: on a disk, or in a bucket of Google Cloud Storage, gs://BUCKET/FOLDER.

The only module that knows which of the two it is. A bucket has no locks, renames or appends, but an
object appears as a whole, and a condition on its generation decides between writers. So a run has
its files in a folder on this machine, its staging folder, and `Workdir.publish` puts them into the
bucket; files of lines, which only grow, as segments NAME/00000000, NAME/00000001, …
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import pathlib
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, NamedTuple, TextIO, cast

from rlvr_jax.bucket import AT_ONCE, SEGMENT, Bucket, segment_name
from rlvr_jax.files import TEMPORARY, replacing_path, reporting_full_disk, sync_folder

OWNER = ".owner"  # the object by which a process claims a bucket's folder
_STAGING = "rlvr_jax_staging_"  # begins the names of staging folders
ONLY_HERE = "groups"  # folders of this name are never published
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)")


def place(owner: str, path: str | os.PathLike[str]) -> pathlib.Path:
  """`path` to be read: a pathlib.Path, or in a bucket an `etils.epath.Path`, which is alike.

  Args:
    owner: the flag or field that sets it, for the message.
  Raises:
    ValueError: it is a URL of another kind, or gcsfs is not installed.
  """
  text = os.fspath(path)
  if not (url := _URL.match(text)):
    return pathlib.Path(text)
  if url[1] != "gs" or not re.match("[^/]+/+[^/]", url[2]):  # a path has lost a slash of gs://
    raise ValueError(
      f"{owner} = {text!r} must be a folder on a disk, on a file system that all hosts mount, or in"
      " a bucket of Google Cloud Storage: gs://BUCKET/FOLDER"
    )
  try:
    import gcsfs  # noqa: F401
    from etils import epath
  except ImportError as error:
    raise ValueError(
      f'{owner} = {text!r} needs gcsfs ({error}): pip install -e ".[gcs]", or choose a local folder'
    ) from error
  return cast(pathlib.Path, epath.Path(f"gs://{url[2].rstrip('/')}"))


def in_bucket(path: str | os.PathLike[str]) -> bool:
  """Whether `path`, of `place`, is in a bucket."""
  return os.fspath(path).startswith("gs://")


def absolute(path: pathlib.Path) -> pathlib.Path:
  """The path from the root of its disk, or of its bucket as it is."""
  return path if in_bucket(path) else path.absolute()


@contextlib.contextmanager
def opened_lines(path: pathlib.Path) -> Iterator[TextIO]:
  """A file of lines to read, of `place`; in a bucket its segments, joined.

  Raises:
    FileNotFoundError: it does not exist.
  """
  if not in_bucket(path):
    with open(path, encoding="utf-8", errors="replace") as file:
      yield file
    return
  segments = Bucket(path.parent).segments(path.name)
  if not segments:
    raise FileNotFoundError(f"{path} does not exist; give the --workdir of a run")
  data = b"".join(data for _, data in segments)
  yield io.StringIO(data.decode("utf-8", errors="replace"))


# --- single files ---------------------------------------------------------------------------------


class LocalFiles:
  """Files of a folder on a disk; each is complete or absent."""

  def __init__(self, folder: pathlib.Path):
    self._folder = folder

  def names(self) -> list[str]:
    """Names of what is in the folder, sorted."""
    return sorted(path.name for path in self._folder.iterdir())

  def exists(self, name: str) -> bool:
    return (self._folder / name).exists()

  def writing(self, name: str) -> contextlib.AbstractContextManager[pathlib.Path]:
    """A path to write to, which becomes the file at the end."""
    return replacing_path(self._folder / name)

  def reading(self, name: str) -> contextlib.AbstractContextManager[pathlib.Path]:
    """A path to read from."""
    return contextlib.nullcontext(self._folder / name)

  def delete(self, name: str) -> None:
    """Removes a file, if it is there."""
    (self._folder / name).unlink(missing_ok=True)

  def move(self, name: str, folder: str) -> pathlib.Path:
    """Moves a file into a folder in this one, as NAME.0, NAME.1, …, the first that is free."""
    target = self._folder / folder
    target.mkdir(exist_ok=True)
    names = (target / f"{name}.{k}" for k in itertools.count())
    moved = (self._folder / name).rename(next(path for path in names if not path.exists()))
    sync_folder(target)
    sync_folder(self._folder)
    return moved


class BucketFiles:
  """The same of a folder in a bucket, through temporary files of this machine."""

  def __init__(self, bucket: Bucket, staging: pathlib.Path | None = None):
    """`staging`: folder for the temporary files; None for that of the system."""
    self._bucket, self._staging = bucket, staging

  def names(self) -> list[str]:
    return sorted({name.partition("/")[0] for name in self._bucket.names()})

  def exists(self, name: str) -> bool:
    return self._bucket.exists(name)

  @contextlib.contextmanager
  def writing(self, name: str) -> Iterator[pathlib.Path]:
    """As of `LocalFiles`, with one put; it never replaces an object."""
    with tempfile.TemporaryDirectory(dir=self._staging) as folder:
      path = pathlib.Path(folder) / name
      yield path
      self._bucket.put(name, path.read_bytes(), generation=0)

  @contextlib.contextmanager
  def reading(self, name: str) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(dir=self._staging) as folder:
      path = pathlib.Path(folder) / name
      with reporting_full_disk(path):
        path.write_bytes(self._bucket.read(name))
      yield path

  def delete(self, name: str) -> None:
    self._bucket.delete(name)

  def move(self, name: str, folder: str) -> pathlib.Path:
    taken = set(self._bucket.names(f"{folder}/"))
    names = (f"{folder}/{name}.{k}" for k in itertools.count())
    target = next(name for name in names if name not in taken)
    self._bucket.put(target, self._bucket.read(name), generation=0)
    self._bucket.delete(name)
    return place("", f"{self._bucket.url}/{target}")


# --- workdirs -------------------------------------------------------------------------------------


# --- lines that others append ---------------------------------------------------------------------


class LocalTail:
  """Reads what is appended to a file of lines.

  Attributes:
    size: bytes read so far.
  """

  def __init__(self, path: pathlib.Path):
    self._path, self.size = path, 0

  def is_empty(self) -> bool:
    """Whether the file has no bytes."""
    return not self._path.stat().st_size

  def new(self) -> bytes:
    """The complete lines since the last call; the rest is being written, or torn."""
    with open(self._path, "rb") as file:
      file.seek(self.size)
      data = file.read()
    data = data[: data.rfind(b"\n") + 1]
    self.size += len(data)
    return data


class BucketTail:
  """The same of a file of lines in a bucket."""

  def __init__(self, bucket: Bucket, name: str):
    self._bucket, self._name, self._next = bucket, name, 0

  def is_empty(self) -> bool:
    return not self._bucket.names(f"{self._name}/")

  def new(self) -> bytes:
    segments = self._bucket.segments(self._name, first=self._next)
    self._next = max((number + 1 for number, _ in segments), default=self._next)
    return b"".join(data for _, data in segments)


# --- workdirs -------------------------------------------------------------------------------------


class _Published(NamedTuple):
  """A segment in the bucket."""

  number: int
  size: int
  checksum: int


class _Lines:
  """A local file of lines, and its segments in the bucket."""

  def __init__(self, bucket: Bucket, name: str, found: Sequence[tuple[int, bytes]] = ()):
    self._bucket, self._name = bucket, name
    self._segments = [_Published(number, len(x), zlib.crc32(x)) for number, x in found]
    self._inode = -1  # of the file when it was last compared with the segments

  def publish(self, path: pathlib.Path) -> None:
    """Puts the lines that are not in the bucket yet."""
    with open(path, "rb") as file:
      if self._inode != (inode := os.fstat(file.fileno()).st_ino):  # was replaced by a resumed run
        self._drop_changed(file)
        self._inode = inode
      file.seek(sum(segment.size for segment in self._segments))
      self._put(self._segments[-1].number + 1 if self._segments else 0, file.read())

  def _drop_changed(self, file: IO[bytes]) -> None:
    """Removes the segments that the file does not begin with.

    The last one first, and the first of them is replaced: a kill in between leaves too many lines,
    which the next resume drops, but not too few.
    """
    same = lambda segment: zlib.crc32(file.read(segment.size)) == segment.checksum
    kept = list(itertools.takewhile(same, self._segments))
    changed, self._segments = self._segments[len(kept) :], kept
    if not changed:
      return
    for segment in reversed(changed[1:]):
      self._bucket.delete(segment_name(self._name, segment.number))
    file.seek(sum(segment.size for segment in kept))
    self._put(changed[0].number, file.read(), even_empty=True)

  def _put(self, number: int, data: bytes, *, even_empty: bool = False) -> None:
    data = data[: data.rfind(b"\n") + 1]  # another thread may be writing the rest
    if data or even_empty:
      self._bucket.put(segment_name(self._name, number), data)
      self._segments.append(_Published(number, len(data), zlib.crc32(data)))


class Workdir:
  """The folder of a run: where its files stay, and where this process writes them.

  Attributes:
    kept: the folder, of `place`.
    local: the same folder if it is on a disk; for a bucket a new staging folder of this process.
    guard: see `Bucket`.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Raises ValueError as `place` does."""
    self.kept = self.local = place("--workdir", path)
    self.guard: Callable[[], None] = lambda: None
    self._lines: dict[str, _Lines] = {}
    self._put: dict[str, tuple[int, int]] = {}  # size and time of change of other files
    self._publishing = threading.Lock()
    self._lock = -1
    if in_bucket(self.kept):
      staging, self._lock = _staging_folder()
      self.local = staging / self.kept.name
      self.local.mkdir()

  def bucket(self, folder: str = "") -> Bucket:
    """A folder of a workdir in a bucket."""
    bucket = Bucket(self.kept / folder)
    bucket.guard = lambda: self.guard()
    return bucket

  def fetch(self) -> None:
    """Copies what a run reads of its own files into the staging folder; a disk has them already.

    These are the files at the top, and all files of lines. Other folders are created empty.
    """
    if not in_bucket(self.kept):
      return
    bucket, names = self.bucket(), self.bucket().names()
    lines: dict[str, list[int]] = {}
    for name in names:
      if match := SEGMENT.fullmatch(name):
        lines.setdefault(match[1], []).append(int(match[2]))
      elif "/" in name:
        (self.local / name.partition("/")[0]).mkdir(exist_ok=True)
      elif name != OWNER:
        (self.local / name).write_bytes(bucket.read(name))
        self._put[name] = _size_and_time(self.local / name)
    for name, numbers in lines.items():
      segments = bucket.read_segments(name, numbers)
      self._lines[name] = _Lines(bucket, name, segments)
      (self.local / name).parent.mkdir(exist_ok=True, parents=True)
      (self.local / name).write_bytes(b"".join(data for _, data in segments))

  def publish(self, *names: str) -> None:
    """Puts new and changed files of the staging folder into the bucket; all, or those of `names`.

    Raises:
      OSError: the bucket cannot be reached.
    """
    if not in_bucket(self.kept):
      return
    with self._publishing, ThreadPoolExecutor(AT_ONCE) as pool:
      list(pool.map(self._publish, names or self._names()))

  def close(self) -> None:
    """`publish`, then removes the staging folder."""
    if in_bucket(self.kept):
      self.publish()
      shutil.rmtree(self.local.parent)
      os.close(self._lock)

  def _names(self) -> list[str]:
    files = (path for path in self.local.rglob("*") if path.is_file() and not path.is_symlink())
    names = (path.relative_to(self.local) for path in files if path.suffix != TEMPORARY)
    return sorted(name.as_posix() for name in names if ONLY_HERE not in name.parts)

  def _publish(self, name: str) -> None:
    path = self.local / name
    if path.suffix == ".jsonl":
      self._lines.setdefault(name, _Lines(self.bucket(), name)).publish(path)
      return
    about = _size_and_time(path)
    if self._put.get(name) != about:
      self.bucket().put(name, path.read_bytes())
      self._put[name] = about


def _size_and_time(path: pathlib.Path) -> tuple[int, int]:
  about = path.stat()
  return about.st_size, about.st_mtime_ns


def _staging_folder() -> tuple[pathlib.Path, int]:
  """A new folder, and a descriptor whose lock on it ends with this process.

  Folders that killed processes have left are removed.
  """
  for left in pathlib.Path(tempfile.gettempdir()).glob(f"{_STAGING}*"):
    with contextlib.suppress(OSError):  # of another user, or locked
      os.close(_locked(left))
      shutil.rmtree(left)
  folder = pathlib.Path(tempfile.mkdtemp(prefix=_STAGING))
  return folder, _locked(folder)


def _locked(folder: pathlib.Path) -> int:
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    os.close(descriptor)
    raise
  return descriptor


def bucket_of(folder: pathlib.Path, workdir: Workdir | None = None) -> Bucket | None:
  """The objects of a folder, of `place`; None if it is on a disk.

  `workdir`: the one that the folder is in, which guards what is written.
  """
  if not in_bucket(folder):
    return None
  return workdir.bucket(folder.name) if workdir else Bucket(folder)


def files_in(folder: pathlib.Path, workdir: Workdir | None = None) -> LocalFiles | BucketFiles:
  """The files of a folder; arguments as of `bucket_of`."""
  bucket = bucket_of(folder, workdir)
  if bucket is None:
    return LocalFiles(folder)
  return BucketFiles(bucket, workdir.local.parent if workdir else None)


def tail_of(path: pathlib.Path) -> LocalTail | BucketTail:
  """Reads what is appended to a file of lines, of `place`."""
  return BucketTail(Bucket(path.parent), path.name) if in_bucket(path) else LocalTail(path)
