"""The storage of a run: a disk, or a bucket of Google Cloud Storage, gs://BUCKET/FOLDER.

A bucket has no locks, renames or appends. But an object is complete or absent, and a condition on
its generation decides between writers. So a run whose workdir is in a bucket writes into a folder
on this machine, its staging folder, and `Workdir.publish` puts the files into the bucket. Files of
lines, which only grow, are stored in segments.
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
  make_locked_folder,
  path_within,
  replace_path,
  report_full_disk,
  sync_folder,
)

OWNER = ".owner"  # the object by which a process claims a bucket's folder
_STAGING = "rlvr_jax_staging_"  # begins the names of staging folders
FOLLOW_S = 5.0  # seconds between two uploads of the files of `Workdir.follow`
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)")


def parse_path(
  owner: str, path: str | os.PathLike[str], *, must_be_on_disk: bool = False
) -> pathlib.Path:
  """Parses the path in a flag or field: a `pathlib.Path`, or in a bucket an `etils.epath.Path`.

  Args:
    owner: the flag or field, for the message.
    path: a folder, or gs://BUCKET/FOLDER, which pathlib would take for a folder named "gs:".
    must_be_on_disk: whether a bucket is refused.
  Raises:
    ValueError: the path is a URL of another kind, or gcsfs is not installed.
  """
  text = os.fspath(path)
  if not (url := _URL.match(text)):
    return pathlib.Path(text)
  if must_be_on_disk:
    raise ValueError(
      f"{owner} = {text!r} is a URL, but must be a folder: on a disk, or on a file system that all"
      " hosts mount, such as Filestore (docs/tpu.md). A mounted bucket does not work: gcsfuse has"
      " neither locks nor atomic renames"
    )
  if url[1] != "gs" or not re.match("[^/]+/+[^/]", url[2]):  # pathlib drops a slash of gs://
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
  """Whether a path from `parse_path` is in a bucket."""
  return os.fspath(path).startswith("gs://")


def make_absolute(path: pathlib.Path) -> pathlib.Path:
  """Makes a path on a disk absolute; returns one in a bucket unchanged."""
  return path if in_bucket(path) else path.absolute()


@contextlib.contextmanager
def open_lines(path: pathlib.Path) -> Iterator[TextIO]:
  """Opens a file of lines for reading; in a bucket, its joined segments.

  Args:
    path: from `parse_path`.
  Raises:
    FileNotFoundError: the file does not exist.
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
    """Names of the files and folders in the folder, sorted."""
    return sorted(path.name for path in self._folder.iterdir())

  def exists(self, name: str) -> bool:
    return path_within(self._folder, name).exists()

  def open_to_write(self, name: str) -> contextlib.AbstractContextManager[pathlib.Path]:
    """Context with a path to write to; its file replaces `name` at the end."""
    return replace_path(path_within(self._folder, name))

  def open_to_read(self, name: str) -> contextlib.AbstractContextManager[pathlib.Path]:
    """Context with a path to read from."""
    return contextlib.nullcontext(path_within(self._folder, name))

  def read_start(self, name: str, size: int) -> bytes:
    """Reads so many bytes of a file from its beginning on; all if it is shorter."""
    with open(path_within(self._folder, name), "rb") as file:
      return file.read(size)

  def size(self, name: str) -> int:
    """Bytes of a file."""
    return path_within(self._folder, name).stat().st_size

  def delete(self, name: str) -> None:
    """Removes a file, if it exists."""
    path_within(self._folder, name).unlink(missing_ok=True)

  def move(self, name: str, folder: str) -> pathlib.Path:
    """Moves a file into a subfolder, as NAME.0, NAME.1, …: the first name that is free."""
    source, target = path_within(self._folder, name), path_within(self._folder, folder)
    target.mkdir(exist_ok=True)
    names = (path_within(target, f"{name}.{k}") for k in itertools.count())
    moved = source.rename(next(path for path in names if not path.exists()))
    sync_folder(target)
    sync_folder(self._folder)
    return moved


class BucketFiles:
  """Files of a folder in a bucket, by temporary files on this machine; methods as `LocalFiles`."""

  def __init__(self, bucket: Bucket, staging: pathlib.Path | None = None):
    """`staging`: folder for the temporary files; None for that of the system."""
    self._bucket = bucket
    self._staging = staging

  def names(self) -> list[str]:
    return sorted({name.partition("/")[0] for name in self._bucket.names()})

  def exists(self, name: str) -> bool:
    return self._bucket.exists(name)

  @contextlib.contextmanager
  def open_to_write(self, name: str) -> Iterator[pathlib.Path]:
    """Context with a path to write to; its file is stored at the end and never replaces another."""
    with tempfile.TemporaryDirectory(dir=self._staging) as folder:
      path = path_within(pathlib.Path(folder), name)
      yield path
      self._bucket.put(name, path.read_bytes(), generation=0)

  @contextlib.contextmanager
  def open_to_read(self, name: str) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(dir=self._staging) as folder:
      path = path_within(pathlib.Path(folder), name)
      with report_full_disk(path):
        path.write_bytes(self._bucket.read(name))
      yield path

  def read_start(self, name: str, size: int) -> bytes:
    return self._bucket.read_start(name, size)

  def size(self, name: str) -> int:
    return self._bucket.sizes(name)[name]

  def delete(self, name: str) -> None:
    self._bucket.delete(name)

  def move(self, name: str, folder: str) -> pathlib.Path:
    taken = set(self._bucket.names(f"{folder}/"))
    names = (f"{folder}/{name}.{k}" for k in itertools.count())
    target = next(name for name in names if name not in taken)
    self._bucket.put(target, self._bucket.read(name), generation=0)
    self._bucket.delete(name)
    return parse_path("", f"{self._bucket.url}/{target}")


# --- workdirs -------------------------------------------------------------------------------------


class Workdir:
  """The folder of a run: where its files are kept, and where this process writes them.

  Attributes:
    path: the folder, from `parse_path`.
    local: the same folder if it is on a disk; for a bucket, a new staging folder of this process.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Raises ValueError as `parse_path` does."""
    self.path = self.local = parse_path("--workdir", path)
    self._guard: Callable[[], float] = lambda: math.inf
    self._mirror: _Mirror | None = None
    if in_bucket(self.path):
      staging, self._lock = make_locked_folder(_STAGING)
      self.local = path_within(staging, self.path.name)
      self.local.mkdir()
      self._mirror = _Mirror(self.local, self.bucket())
      self._follower = _Follower(self._mirror)

  def set_guard(self, guard: Callable[[], float]) -> None:
    """Sets a function that is called before every write into the bucket; see `Bucket`."""
    self._guard = guard

  def guard(self) -> float:
    """Seconds for which this process certainly may write; raises if it may not."""
    return self._guard()

  def bucket(self) -> Bucket:
    """The objects of the workdir, which must be in a bucket."""
    return Bucket(self.path, self.guard)

  def fetch(self) -> None:
    """Copies from a bucket into the staging folder the files of its own that a run reads.

    These are the files at the top level, and all files of lines. Other folders are created empty.
    """
    if self._mirror is not None:
      self._mirror.fetch()

  def publish(self, *names: str) -> None:
    """Puts new and changed files of the staging folder into the bucket: `names`, or all.

    Raises:
      OSError: the bucket cannot be reached.
    """
    if self._mirror is not None:
      self._mirror.publish(*names)

  def follow(self, path: pathlib.Path) -> None:
    """Publishes, within some seconds, a file that is new, has grown or was removed.

    Returns at once. A failed upload is retried, until `publish` or `close` raises its error.
    """
    if self._mirror is not None:
      self._mirror.note(path.relative_to(self.local).as_posix())
      self._follower.start()

  def close(self) -> None:
    """Publishes all files, then removes the staging folder."""
    if self._mirror is not None:
      self._follower.close()
      self.publish()
      shutil.rmtree(self.local.parent)
      os.close(self._lock)


class _Mirror:
  """The files of a staging folder, and the versions of them that are in the bucket."""

  def __init__(self, local: pathlib.Path, bucket: Bucket):
    self._local = local
    self._bucket = bucket
    self._lines: dict[str, Lines] = {}
    self._published: dict[str, tuple[int, int]] = {}  # size and modification time, of other files
    self._due: set[str] = set()  # see `note`; a set's own operations are atomic
    self._publishing = threading.Lock()

  def fetch(self) -> None:
    """See `Workdir.fetch`."""
    lines: dict[str, list[int]] = {}
    for name in self._bucket.names():
      if match := SEGMENT.fullmatch(name):
        lines.setdefault(match[1], []).append(int(match[2]))
      elif "/" in name:
        path_within(self._local, name.partition("/")[0]).mkdir(exist_ok=True)
      elif name != OWNER:
        path = path_within(self._local, name)
        path.write_bytes(self._bucket.read(name))
        self._published[name] = _size_and_time(path)
    for name, numbers in lines.items():
      segments = self._bucket.read_segments(name, numbers)
      self._lines[name] = Lines(self._bucket, name, segments)
      path = path_within(self._local, name)
      path.parent.mkdir(exist_ok=True, parents=True)
      path.write_bytes(b"".join(segment.data for segment in segments))

  def note(self, name: str) -> None:
    """Adds a file to those that `publish_noted` publishes."""
    self._due.add(name)

  def publish_noted(self) -> None:
    """Publishes the files added by `note`."""
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
    path = path_within(self._local, name)
    try:
      file = open(path, "rb")
    except FileNotFoundError:  # such as a group of a batch that is now in the store
      if name in self._lines:
        self._lines.pop(name).remove()
      elif path.suffix != ".jsonl":
        self._bucket.delete(name)
      return
    with file:
      if path.suffix == ".jsonl":
        self._lines.setdefault(name, Lines(self._bucket, name)).publish(file)
      elif self._published.get(name) != (version := _size_and_time(path)):
        self._bucket.put(name, file.read())
        self._published[name] = version


class _Follower:
  """Publishes the noted files of a mirror every few seconds, in a thread."""

  def __init__(self, mirror: _Mirror):
    self._mirror = mirror
    self._closing = threading.Event()
    self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

  def start(self) -> None:
    """Starts the thread, unless it is running."""
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
  status = path.stat()
  return status.st_size, status.st_mtime_ns


def open_bucket(folder: pathlib.Path, workdir: Workdir | None = None) -> Bucket | None:
  """The objects of a folder; None if it is on a disk.

  Args:
    folder: from `parse_path`.
    workdir: the workdir that contains the folder and guards its writes, if any.
  """
  if not in_bucket(folder):
    return None
  return Bucket(folder, workdir.guard) if workdir else Bucket(folder)


def open_files(folder: pathlib.Path, workdir: Workdir | None = None) -> LocalFiles | BucketFiles:
  """The files of a folder; arguments as of `open_bucket`."""
  bucket = open_bucket(folder, workdir)
  if bucket is None:
    return LocalFiles(folder)
  return BucketFiles(bucket, workdir.local.parent if workdir else None)
