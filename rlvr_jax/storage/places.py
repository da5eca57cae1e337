"""Where a run's files stay: on a disk, or in a bucket of Google Cloud Storage, gs://BUCKET/FOLDER.

A bucket has no locks, renames or appends. But an object is complete or absent, and a condition on
its generation decides between writers. So a run whose workdir is in a bucket writes into a folder
on this machine, its staging folder, and `Workdir.publish` puts the files into the bucket. Files of
lines, which only grow, are put in segments.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import pathlib
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO, cast

from rlvr_jax.storage.bucket import MAX_CONCURRENT_REQUESTS, SEGMENT, Bucket, Lines
from rlvr_jax.storage.files import (
  TEMPORARY,
  own_folder,
  replacing_path,
  reporting_full_disk,
  sync_folder,
)

OWNER = ".owner"  # the object by which a process claims a bucket's folder
_STAGING = "rlvr_jax_staging_"  # begins the names of staging folders
FOLLOW_S = 5.0  # seconds between two puts of the files of `Workdir.follow`
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)")


def place(
  owner: str, path: str | os.PathLike[str], *, must_be_on_disk: bool = False
) -> pathlib.Path:
  """The path that a flag or field names: pathlib's, or in a bucket an `etils.epath.Path`.

  Args:
    owner: the flag or field, for the message.
    path: a folder, or gs://BUCKET/FOLDER; pathlib would take a URL for a folder named "gs:".
    must_be_on_disk: whether a bucket will not do.
  Raises:
    ValueError: it is a URL of another kind, or gcsfs is not installed.
  """
  text = os.fspath(path)
  if not (url := _URL.match(text)):
    return pathlib.Path(text)
  if must_be_on_disk:
    raise ValueError(
      f"{owner} = {text!r} is a URL, but must be a folder: on a disk, or on a file system that all"
      " hosts mount, such as Filestore (docs/tpu.md). A mounted bucket will not do, as gcsfuse has"
      " neither locks nor atomic renames"
    )
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
  """Opens a file of lines for reading; in a bucket its segments, joined.

  Args:
    path: of `place`.
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
  data = b"".join(segment.data for segment in segments)
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

  def sizes(self) -> dict[str, int] | None:
    """Bytes of the files by name, where they prove that a file is as it was written; here None."""
    return None

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
  """Files of a folder in a bucket, through temporary files on this machine; as `LocalFiles`."""

  def __init__(self, bucket: Bucket, staging: pathlib.Path | None = None):
    """`staging`: folder for the temporary files; None for that of the system."""
    self._bucket, self._staging = bucket, staging

  def names(self) -> list[str]:
    return sorted({name.partition("/")[0] for name in self._bucket.names()})

  def exists(self, name: str) -> bool:
    return self._bucket.exists(name)

  def sizes(self) -> dict[str, int]:
    """Bytes of the files by name: a bucket keeps an object as it was put."""
    return self._bucket.sizes()

  @contextlib.contextmanager
  def writing(self, name: str) -> Iterator[pathlib.Path]:
    """A path to write to, which is put as one object at the end; it never replaces an object."""
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
  """Reads what is appended to a file of lines in a bucket; as `LocalTail`."""

  def __init__(self, bucket: Bucket, name: str):
    self._bucket, self._name, self._next = bucket, name, 0

  def is_empty(self) -> bool:
    return not self._bucket.names(f"{self._name}/")

  def new(self) -> bytes:
    segments = self._bucket.segments(self._name, first=self._next)
    self._next = segments[-1].number + 1 if segments else self._next
    return b"".join(segment.data for segment in segments)


# --- workdirs -------------------------------------------------------------------------------------


class Workdir:
  """The folder of a run: where its files stay, and where this process writes them.

  Attributes:
    kept: the folder, of `place`.
    local: the same folder if it is on a disk; for a bucket a new staging folder of this process.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Raises ValueError as `place` does."""
    self.kept = self.local = place("--workdir", path)
    self._guard: Callable[[], float] = lambda: math.inf
    self._mirror: _Mirror | None = None
    if in_bucket(self.kept):
      staging, self._lock = own_folder(_STAGING)
      self.local = staging / self.kept.name
      self.local.mkdir()
      self._mirror = _Mirror(self.local, self.bucket())
      self._follower = _Follower(self._mirror)

  def guard_by(self, check: Callable[[], float]) -> None:
    """Calls `check` before every write into the bucket; see `Bucket`."""
    self._guard = check

  def bucket(self, folder: str = "") -> Bucket:
    """A folder of a workdir in a bucket."""
    return Bucket(self.kept / folder, lambda: self._guard())

  def fetch(self) -> None:
    """Copies what a run reads of its own files into the staging folder; a disk has them already.

    These are the files at the top, and all files of lines. Other folders are created empty.
    """
    if self._mirror is not None:
      self._mirror.fetch()

  def publish(self, *names: str) -> None:
    """Puts new and changed files of the staging folder into the bucket; all, or those of `names`.

    Raises:
      OSError: the bucket cannot be reached.
    """
    if self._mirror is not None:
      self._mirror.publish(*names)

  def follow(self, path: pathlib.Path) -> None:
    """Publishes a file of lines that has grown, or was removed, after some seconds.

    Returns at once. A failed put is tried again, until `publish` or `close` raises its error.
    """
    if self._mirror is not None:
      self._mirror.note(path.relative_to(self.local).as_posix())
      self._follower.start()

  def close(self) -> None:
    """`publish`, then removes the staging folder."""
    if self._mirror is not None:
      self._follower.close()
      self.publish()
      shutil.rmtree(self.local.parent)
      os.close(self._lock)


class _Mirror:
  """The files of a staging folder, and what the bucket has of them."""

  def __init__(self, local: pathlib.Path, bucket: Bucket):
    self._local, self._bucket = local, bucket
    self._lines: dict[str, Lines] = {}
    self._put: dict[str, tuple[int, int]] = {}  # size and time of change of other files
    self._due: set[str] = set()  # see `note`; a set's own operations are atomic
    self._publishing = threading.Lock()

  def fetch(self) -> None:
    """See `Workdir.fetch`."""
    lines: dict[str, list[int]] = {}
    for name in self._bucket.names():
      if match := SEGMENT.fullmatch(name):
        lines.setdefault(match[1], []).append(int(match[2]))
      elif "/" in name:
        (self._local / name.partition("/")[0]).mkdir(exist_ok=True)
      elif name != OWNER:
        (self._local / name).write_bytes(self._bucket.read(name))
        self._put[name] = _size_and_time(self._local / name)
    for name, numbers in lines.items():
      segments = self._bucket.read_segments(name, numbers)
      self._lines[name] = Lines(self._bucket, name, segments)
      (self._local / name).parent.mkdir(exist_ok=True, parents=True)
      (self._local / name).write_bytes(b"".join(segment.data for segment in segments))

  def note(self, name: str) -> None:
    """Adds a file to those that `publish_noted` publishes."""
    self._due.add(name)

  def publish_noted(self) -> None:
    """Publishes the files of `note`."""
    if due := set(self._due):
      self.publish(*due)

  def publish(self, *names: str) -> None:
    """See `Workdir.publish`."""
    due = set(names) or {*self._names(), *self._due}
    self._due -= due
    try:
      with self._publishing, ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
        list(pool.map(self._publish, due))
    except BaseException:
      self._due |= due
      raise

  def _names(self) -> list[str]:
    files = (path for path in self._local.rglob("*") if path.is_file() and not path.is_symlink())
    names = (path.relative_to(self._local) for path in files if path.suffix != TEMPORARY)
    return sorted(name.as_posix() for name in names)

  def _publish(self, name: str) -> None:
    path = self._local / name
    try:
      file = open(path, "rb")
    except FileNotFoundError:  # such as groups of a batch that is now in the store
      if name in self._lines:
        self._lines[name].remove()
        del self._lines[name]
      return
    with file:
      if path.suffix == ".jsonl":
        self._lines.setdefault(name, Lines(self._bucket, name)).publish(file)
      elif self._put.get(name) != (about := _size_and_time(path)):
        self._bucket.put(name, file.read())
        self._put[name] = about


class _Follower:
  """Publishes the noted files of a mirror every few seconds, in a thread."""

  def __init__(self, mirror: _Mirror):
    self._mirror = mirror
    self._closing = threading.Event()
    self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

  def start(self) -> None:
    """Starts the thread unless it runs."""
    if not self._thread.ident:
      self._thread.start()

  def close(self) -> None:
    """Ends the thread."""
    self._closing.set()
    if self._thread.ident:
      self._thread.join()

  def _run(self) -> None:
    while not self._closing.wait(FOLLOW_S):
      with contextlib.suppress(Exception):
        self._mirror.publish_noted()


def _size_and_time(path: pathlib.Path) -> tuple[int, int]:
  about = path.stat()
  return about.st_size, about.st_mtime_ns


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
