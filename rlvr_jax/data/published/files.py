"""Published files: the files in a folder or bucket, a digest of them, and their rows."""

from __future__ import annotations

import difflib
import errno
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsspec.implementations.local import LocalFileSystem

from rlvr_jax.data.published.rows import Row
from rlvr_jax.storage.files import located

if TYPE_CHECKING:  # tensorflow-datasets, which it imports, loads slowly
  from rlvr_jax.data.published.dataset import Layouts

# If a file is published in several formats, the first of these is read.
FORMATS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_DEPTH = 4  # levels of folders that are searched: MATH/train/algebra/1.json
_FETCHED_AT_ONCE = 128  # small files; object stores answer many requests as fast as one
_TORN = (EOFError, gzip.BadGzipFile, zlib.error)


class PublishedFiles:
  """The data files of one folder, or a single file, on any file system.

  Attributes:
    is_one: True for a single file.
  """

  def __init__(self, data_dir: str | os.PathLike[str], *, own: bool = False):
    """Lists the files.

    Args:
      data_dir: folder or file, local or a URL such as gs://bucket/folder.
      own: the user wrote the files: messages say to fix them, not to download them again.
    Raises:
      FileNotFoundError: there is no data file; the message has similar names in the folder.
      ValueError: `data_dir` is empty, or the kind of URL is unknown.
    """
    if not os.fspath(data_dir):
      raise ValueError("data_dir is empty: give the folder that holds the published files")
    self.data_dir = data_dir
    self._own = own
    self._remedy = "Write the file again." if own else "Fetch the file again."
    self._filesystem, root = located(data_dir)
    root = root.rstrip("/")
    self.is_one = self._filesystem.isfile(root)
    if self.is_one:
      found = {root: self._filesystem.info(root)}
      root = os.path.dirname(root)
    else:
      found = self._filesystem.find(root, maxdepth=_DEPTH, detail=True)
    self._details: Mapping[str, Mapping[str, Any]] = found
    self._paths: dict[str, str] = {}  # by name below the folder, without the format
    for path in sorted(filter(_format_of, found), key=lambda path: FORMATS.index(_format_of(path))):
      stem = path.removeprefix(root).lstrip("/").removesuffix(_format_of(path))
      if not any(part.startswith(".") for part in stem.split("/")):
        self._paths.setdefault(stem, path)
    self._stems = {path: stem for stem, path in self._paths.items()}
    if not self._paths:
      local = isinstance(self._filesystem, LocalFileSystem)
      missing = _missing(root) if local and not os.path.exists(root) else ""
      why = missing or f"no file of problems ({', '.join(FORMATS)}) is there"
      raise FileNotFoundError(errno.ENOENT, why, os.fspath(data_dir))

  def names(self) -> list[str]:
    """The names of all data files, relative to the folder and without their formats."""
    return sorted(self._paths, key=_natural)

  def paths(self) -> list[str]:
    """The paths of all data files, in the order of their names."""
    return [self._paths[stem] for stem in self.names()]

  def of_layout(self, layouts: Layouts) -> list[str]:
    """Paths of the files of the first complete layout; [] if no layout is complete."""
    for layout in layouts:
      found = [self._named(name) for name in layout]
      if all(found):
        return [path for paths in found for path in paths]
    return []

  def _named(self, name: str) -> list[str]:
    if name.endswith("/"):
      return [self._paths[stem] for stem in self.names() if stem.startswith(name.lstrip("/"))]
    return [self._paths[name]] if name in self._paths else []

  def digest(self, paths: Sequence[str]) -> str:
    """A digest of the files: of their bytes if local, of their listing if remote."""
    digest = hashlib.sha256()
    for path in paths:
      digest.update(f"{self._stems[path]}\n".encode())
      if isinstance(self._filesystem, LocalFileSystem):
        with open(path, "rb") as file:
          digest.update(hashlib.file_digest(file, "sha256").digest())
      else:
        digest.update(json.dumps(self._details[path], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]

  def rows(self, paths: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of the files, one file after another.

    Raises:
      OSError: a file cannot be read.
      ValueError: a file is empty, truncated or in another form; the message names the file and the
        line or record.
    """
    for whole, group in itertools.groupby(paths, lambda path: _format_of(path) == ".json"):
      for path, stream in self._fetched(list(group)) if whole else self._opened(group):
        yield from self._rows_of(path, stream)

  def _rows_of(self, path: str, stream: Any) -> Iterator[Row]:
    shown = path if isinstance(self._filesystem, LocalFileSystem) else f"{self.data_dir} {path}"
    number = 0
    try:
      with stream:
        for number, (where, value) in enumerate(_values(path, stream, self._remedy), start=1):
          where = f"{shown}, {where}" if where else shown
          if isinstance(value, ValueError):
            raise ValueError(f"{where} {self._not_json(value)}")
          if not isinstance(value, dict):
            raise ValueError(f"{where} is not a JSON object: {str(value)[:80]!r}")
          yield Row(value, where=where, name=f"{self._stems[path]}/{number}")
    except _TORN as error:
      raise ValueError(f"{shown} is truncated ({error}). {self._remedy}") from error
    if not number:
      raise ValueError(f"{shown} is empty. {self._remedy}")

  def _not_json(self, error: ValueError) -> str:
    """Says what is wrong with a text, whose file and line come before."""
    reason, place = str(error), ""
    if isinstance(error, json.JSONDecodeError):
      place = f"line {error.lineno}, " if "\n" in error.doc.strip() else ""
      reason = f"{error.msg} at {place}character {error.colno if place else error.pos + 1}"
    if self._own:
      return f"is not JSON: {reason}; fix that {'file' if place else 'line'}"
    return f"is truncated or not JSON ({reason}). {self._remedy}"

  def _fetched(self, paths: list[str]) -> Iterator[tuple[str, Any]]:
    for start in range(0, len(paths), _FETCHED_AT_ONCE):
      some = paths[start : start + _FETCHED_AT_ONCE]
      contents = self._filesystem.cat(some)
      yield from ((path, io.BytesIO(contents[path])) for path in some)

  def _opened(self, paths: Iterator[str]) -> Iterator[tuple[str, Any]]:
    for path in paths:
      compression = "gzip" if path.endswith(".gz") else None
      yield path, self._filesystem.open(path, "rb", compression=compression)


def _missing(path: str) -> str:
  """Says that a local path is missing, and which names in its folder are near."""
  folder, name = os.path.split(path)
  if not os.path.isdir(folder):
    return f"there is no folder {folder}"
  near = difflib.get_close_matches(name, os.listdir(folder), cutoff=0.5)
  return f"there is no such file in {folder}" + (f"; near it: {', '.join(near)}" if near else "")


def _format_of(path: str) -> str:
  """The format of a file of problems; "" for any other file."""
  return next((ending for ending in FORMATS if path.endswith(ending)), "")


def _natural(stem: str) -> list[str | int]:
  """A sort key that orders algebra/2 before algebra/10, and test before test2."""
  return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", stem)]


def _values(path: str, stream: Any, remedy: str) -> Iterator[tuple[str, Any]]:
  """Yields (location in the file, value or the error of reading it)."""
  if _format_of(path) == ".parquet":
    yield from _parquet_values(path, stream, remedy)
  elif ".jsonl" in _format_of(path):
    yield from _line_values(stream)
  else:
    yield from _json_values(stream.read())


def _json_values(data: bytes) -> Iterator[tuple[str, Any]]:
  if not data.strip():
    return
  value = _parsed(data)
  if isinstance(value, list):
    yield from ((f"record {n}", record) for n, record in enumerate(value, start=1))
  elif isinstance(value, json.JSONDecodeError) and value.msg == "Extra data":
    yield from _line_values(io.BytesIO(data))  # lines of JSON in a file named .json
  else:
    yield "", value


def _line_values(lines: Any) -> Iterator[tuple[str, Any]]:
  for number, line in enumerate(lines, start=1):
    if line.strip():
      yield f"line {number}", _parsed(line)


def _parsed(data: bytes) -> Any:
  try:
    return json.loads(data)
  except ValueError as error:  # not JSON, or not UTF-8
    return error


def _parquet_values(path: str, stream: Any, remedy: str) -> Iterator[tuple[str, Any]]:
  try:
    from pyarrow import parquet
  except ImportError as error:
    raise ValueError(
      f"{path}: reading Parquet needs pyarrow, which is not installed; install it (pip install "
      "pyarrow), or convert the file to .jsonl, one JSON object per line"
    ) from error
  try:
    batches = parquet.ParquetFile(stream).iter_batches()
    rows = (row for batch in batches for row in batch.to_pylist())
    yield from ((f"record {n}", row) for n, row in enumerate(rows, start=1))
  except (OSError, ValueError) as error:
    raise ValueError(f"{path} is truncated or not Parquet ({error}). {remedy}") from error
