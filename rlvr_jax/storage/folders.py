"""Folders of any file system, local or at a URL: reads files, and writes folders as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import posixpath
import shutil
import tempfile
from collections.abc import Iterator

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rlvr_jax.storage.files import (
  TEMPORARY,
  JsonObject,
  locked,
  replace_file,
  report_full_disk,
  report_unwritable,
  sync_folder,
)

_LOCK = ".lock"  # name of the lock in a folder that is being written


def locate(path: str | os.PathLike[str]) -> tuple[fsspec.AbstractFileSystem, str]:
  """Locates a path: returns its file system, and the path within it.

  Args:
    path: local (~ is the home folder), or a URL such as gs://bucket/folder.
  Raises:
    ValueError: the protocol of the URL is unknown, or its library is not installed.
  """
  text = os.fspath(path)
  try:
    system, within = fsspec.url_to_fs(text if "://" in text else os.path.expanduser(text))
    return system, within
  except (ImportError, ValueError) as error:
    raise ValueError(
      f"{text!r} cannot be opened: {error}. Give a local path or a URL that fsspec knows;"
      ' gs:// needs gcsfs: pip install "rlvr_jax[gcs]"'
    ) from error


def list_files(directory: str | os.PathLike[str]) -> list[str]:
  """Lists the names of the files of a directory, sorted.

  Raises:
    FileNotFoundError: `directory` is not a directory.
    OSError: the directory cannot be reached (fsspec's isfile and exists would return False).
  """
  system, folder = locate(directory)
  try:
    entries = system.ls(folder, detail=True)
  except (FileNotFoundError, NotADirectoryError):
    entries = [{"name": folder}]
  except Exception as error:  # libraries for remote systems raise errors without a common class
    raise OSError(f"{directory} cannot be listed: {type(error).__name__}: {error}") from error
  if [entry["name"].rstrip("/") for entry in entries] == [folder.rstrip("/")]:
    raise FileNotFoundError(
      f"{directory} is not a directory: give a local directory, or a URL such as gs://bucket/folder;"
      " a model is not downloaded by its name on a hub"
    )
  # Caches of hubs consist of symbolic links, which a local listing calls neither file nor folder.
  files = [e["name"] for e in entries if e["type"] == "file" or system.isfile(e["name"])]
  return sorted(posixpath.basename(file) for file in files)


def read_json(system: fsspec.AbstractFileSystem, path: str) -> JsonObject:
  """Reads the object in a JSON file; ValueError if the file is not a JSON object."""
  try:
    value = json.loads(system.cat_file(path))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} contains a {type(value).__name__}, not a JSON object")
  return value


@contextlib.contextmanager
def open_to_read(system: fsspec.AbstractFileSystem, path: str) -> Iterator[str]:
  """Context with a local file: `path`, or a temporary copy of a remote file."""
  if isinstance(system, LocalFileSystem):
    yield path
    return
  with tempfile.NamedTemporaryFile() as copy:
    with report_full_disk(pathlib.Path(copy.name)):
      system.get_file(path, copy.name)
    yield copy.name


@contextlib.contextmanager
def open_to_write(system: fsspec.AbstractFileSystem, path: str) -> Iterator[str]:
  """Context with a local file to write; at the end of the context `path` has the file's content.

  If `path` is local, the context yields `path` itself and syncs the file to the disk at the end.
  Until then others can see an incomplete file: write into a `new_directory`, which hides it.
  """
  if isinstance(system, LocalFileSystem):
    with report_full_disk(pathlib.Path(path)):
      yield path
      with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return
  with tempfile.NamedTemporaryFile() as copy:
    with report_full_disk(pathlib.Path(copy.name)):
      yield copy.name
    system.put_file(copy.name, path)


def write_bytes(system: fsspec.AbstractFileSystem, path: str, content: bytes) -> None:
  """Writes a small file; a local file is on the disk when this call returns."""
  if isinstance(system, LocalFileSystem):
    with replace_file(pathlib.Path(path)) as file:
      file.write(content)
  else:
    system.pipe_file(path, content)


@contextlib.contextmanager
def new_directory(
  directory: str | os.PathLike[str],
) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
  """Yields a file system and a folder to fill; a local `directory` appears when it is complete.

  Object stores can neither rename nor lock. There, the last file to write is the file that marks
  the directory as complete.

  Raises:
    FileExistsError: `directory` is not empty, or another process is writing it.
    OSError: a local `directory` cannot be created.
  """
  check_vacant(directory)
  system, path = locate(directory)
  if not isinstance(system, LocalFileSystem):
    system.makedirs(path, exist_ok=True)
    yield system, path
    return
  target = pathlib.Path(path)
  temporary = target.with_name(target.name + TEMPORARY)
  with report_unwritable(str(directory)):
    temporary.mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as stack:
    try:
      stack.enter_context(locked(temporary / _LOCK))
    except (BlockingIOError, FileNotFoundError):  # the other process may have finished meanwhile
      raise FileExistsError(
        f"{directory} is being written by another process: wait for it, or choose another directory"
      ) from None
    for remnant in temporary.iterdir():  # files of a process that was killed
      if remnant.name != _LOCK:
        shutil.rmtree(remnant) if remnant.is_dir() else remnant.unlink()
    try:
      yield system, str(temporary)
      (temporary / _LOCK).unlink()
      sync_folder(temporary)
      temporary.rename(target)
      sync_folder(target.parent)
    except BaseException:
      shutil.rmtree(temporary, ignore_errors=True)
      raise


def check_vacant(directory: str | os.PathLike[str]) -> None:
  """Raises FileExistsError unless `directory` is absent or empty."""
  system, path = locate(directory)
  if system.exists(path) and (not system.isdir(path) or system.ls(path, detail=False)):
    raise FileExistsError(
      f"{directory} is not empty; a checkpoint is written into a new directory: choose another, or"
      " remove this one"
    )
