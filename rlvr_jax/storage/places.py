"""The storage of a run: a disk, or a bucket of Google Cloud Storage, gs://BUCKET/FOLDER.

A bucket has no locks, renames or appends. But an object is complete or absent, and a precondition
on its generation decides which process may write the object. So a run whose workdir is in a bucket
writes checkpoints and rollouts there, as objects. It writes its logs into a folder on this machine,
the staging folder; `Workdir.publish` copies changed files from there into the bucket.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO, cast

import rlvr_jax
from rlvr_jax.storage.bucket import MAX_CONCURRENT_REQUESTS, Bucket
from rlvr_jax.storage.files import TEMPORARY, make_locked_folder, path_within, replace_path

OWNER = ".owner"  # the object by which a process claims a bucket's folder
_STAGING = "rlvr_jax_staging_"  # prefix of the names of staging folders
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)")
_FORMER = re.compile(r".+\.jsonl/\d{8,}")  # part of a log, as a former version stored it


def parse_path(
  owner: str, path: str | os.PathLike[str], *, must_be_on_disk: bool = False
) -> pathlib.Path:
  """Parses the path in a flag or field: a `pathlib.Path`, or an `etils.epath.Path` for a bucket.

  Args:
    owner: the flag or field, for the message.
    path: a folder, or gs://BUCKET/FOLDER, which pathlib would take for a folder named "gs:".
    must_be_on_disk: whether a path in a bucket is refused.
  Raises:
    ValueError: the path is a URL but must be on a disk, or is another URL than gs://BUCKET/FOLDER;
      or gcsfs is not installed.
  """
  text = os.fspath(path)
  if not (url := _URL.match(text)):
    return pathlib.Path(text)
  if must_be_on_disk:
    raise ValueError(
      f"{owner} = {text!r} is a URL, but must be a folder: on a disk, or on a file system that all"
      f" hosts mount, such as Filestore ({rlvr_jax.page('tpu.md')}). A mounted bucket"
      " does not work: gcsfuse has neither locks nor atomic renames"
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
      f'{owner} = {text!r} needs gcsfs ({error}): pip install "rlvr_jax[gcs]", or choose a local'
      " folder"
    ) from error
  return cast(pathlib.Path, epath.Path(f"gs://{url[2].rstrip('/')}"))


def in_bucket(path: str | os.PathLike[str]) -> bool:
  """Whether a path from `parse_path` is in a bucket."""
  return os.fspath(path).startswith("gs://")


def make_absolute(path: pathlib.Path) -> pathlib.Path:
  """Makes a path on a disk absolute; returns a path in a bucket unchanged."""
  return path if in_bucket(path) else path.absolute()


@contextlib.contextmanager
def open_lines(path: pathlib.Path) -> Iterator[TextIO]:
  """Opens a file of lines for reading.

  Args:
    path: the result of `parse_path`.
  Raises:
    FileNotFoundError: the file does not exist.
  """
  if not in_bucket(path):
    with open(path, encoding="utf-8", errors="replace") as file:
      yield file
    return
  try:
    data = Bucket(path.parent).read(path.name)
  except FileNotFoundError:
    raise FileNotFoundError(f"{path} does not exist; give the --workdir of a run") from None
  yield io.StringIO(data.decode("utf-8", errors="replace"))


class Workdir:
  """The folder of a run: where its files are kept, and where this process writes its logs.

  Attributes:
    path: the folder, from `parse_path`.
    local: the same folder if it is on a disk; for a bucket, a new staging folder of this process.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Opens the folder; raises the ValueError of `parse_path`."""
    self.path = self.local = parse_path("--workdir", path)
    self._guard: Callable[[], float] = lambda: math.inf
    self._published: dict[str, tuple[int, int]] = {}  # (size, time) of published files, by name
    if in_bucket(self.path):
      staging, self._lock = make_locked_folder(_STAGING)
      self.local = path_within(staging, self.path.name)
      self.local.mkdir()

  def set_guard(self, guard: Callable[[], float]) -> None:
    """Sets a function that is called before every write into the bucket; see `Bucket`."""
    self._guard = guard

  def guard(self) -> float:
    """Seconds for which this process certainly may write; raises if it may not write."""
    return self._guard()

  def bucket(self) -> Bucket:
    """The objects of the workdir, which must be in a bucket."""
    return Bucket(self.path, self.guard)

  def fetch(self) -> None:
    """Copies the files at the top level of the workdir from its bucket into the staging folder.

    Folders of the workdir are created in the staging folder, but empty. If the workdir is on a
    disk, nothing is copied.

    Raises:
      ValueError: a former version of this program wrote the files.
    """
    if not in_bucket(self.path):
      return
    bucket = self.bucket()
    names = bucket.names()
    if former := next(filter(_FORMER.fullmatch, names), None):
      raise ValueError(
        f"{self.path} was written by a former version of rlvr_jax, which stored logs in parts"
        f" ({former}): use that version, or another --workdir"
      )
    for name in names:
      folder, is_within, _ = name.partition("/")
      path = path_within(self.local, folder)
      if is_within:
        path.mkdir(exist_ok=True)
      elif name != OWNER:
        with replace_path(path) as temporary:  # an incomplete copy must not be published
          temporary.write_bytes(bucket.read(name))
        self._published[name] = _size_and_time(path)

  def publish(self, *names: str) -> None:
    """Copies new and changed files from the staging folder into the bucket.

    With `names`, no other files are copied.

    Raises:
      OSError: the bucket cannot be reached.
    """
    if in_bucket(self.path):
      with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
        list(pool.map(self._publish, names or self._names()))

  def _names(self) -> list[str]:
    files = (path for path in self.local.rglob("*") if path.is_file() and not path.is_symlink())
    names = (path.relative_to(self.local) for path in files if path.suffix != TEMPORARY)
    return sorted(name.as_posix() for name in names)

  def _publish(self, name: str) -> None:
    path = path_within(self.local, name)
    version = _size_and_time(path)
    if self._published.get(name) != version:
      self.bucket().put(name, path.read_bytes())
      self._published[name] = version

  def close(self) -> None:
    """Publishes all files, then removes the staging folder."""
    if in_bucket(self.path):
      self.publish()
      shutil.rmtree(self.local.parent)
      os.close(self._lock)


def _size_and_time(path: pathlib.Path) -> tuple[int, int]:
  status = path.stat()
  return status.st_size, status.st_mtime_ns


def open_bucket(folder: pathlib.Path, workdir: Workdir | None = None) -> Bucket | None:
  """The bucket that holds a folder; None if the folder is on a disk.

  Args:
    folder: the result of `parse_path`.
    workdir: the workdir that contains the folder and guards writes into it; None for no guard.
  """
  if not in_bucket(folder):
    return None
  return Bucket(folder, workdir.guard) if workdir else Bucket(folder)
