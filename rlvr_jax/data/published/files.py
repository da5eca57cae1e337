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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging
from fsspec.implementations.local import LocalFileSystem

from rlvr_jax.data.published.rows import Row
from rlvr_jax.storage.folders import locate

if TYPE_CHECKING:  # this module imports tensorflow-datasets, which loads slowly
  from rlvr_jax.data.published.dataset import Layouts

# If a file is published in several formats, the first of these is read.
_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
FORMATS = (*_LINES, ".json", ".json.gz", ".parquet")
_LIKE_FORMATS = re.compile(r"\.(json|ndjson|parquet|csv|tsv|arrow)", re.IGNORECASE)
_MAX_NAMED = 5  # files in a message
_DEPTH = 4  # levels of folders that are searched: MATH/train/algebra/1.json
_FETCH_SIZE = 128  # small files that are requested at once; object stores answer in parallel
_TRUNCATION_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)


class PublishedFiles:
  """The data files of one folder, or a single file, on any file system.

  Attributes:
    data_dir: folder or file, as given.
    is_single_file: whether `data_dir` is a file.
  """

  def __init__(self, data_dir: str | os.PathLike[str], *, user_written: bool = False):
    """Lists the files.

    Args:
      data_dir: folder or file, local or a URL such as gs://bucket/folder.
      user_written: the user wrote the files; messages say to fix them, not to fetch them again.
    Raises:
      FileNotFoundError: there is no data file; the message lists similar names in the folder.
      ValueError: `data_dir` is empty, or its URL scheme is unknown.
    """
    if not os.fspath(data_dir):
      raise ValueError("data_dir is empty: give the folder with the published files")
    self.data_dir = data_dir
    self._user_written = user_written
    self._remedy = "Write the file again." if user_written else "Fetch the file again."
    self._filesystem, root = locate(data_dir)
    root = root.rstrip("/")
    self.is_single_file = self._filesystem.isfile(root)
    if self.is_single_file:
      details = {root: self._filesystem.info(root)}
      root = os.path.dirname(root)
    else:
      details = self._filesystem.find(root, maxdepth=_DEPTH, detail=True)
    self._details: Mapping[str, Mapping[str, Any]] = details
    self._paths: dict[str, str] = {}  # by name relative to the folder, without the format
    data_paths = filter(file_format, details)
    for path in sorted(data_paths, key=lambda path: FORMATS.index(file_format(path))):
      stem = path[: -len(file_format(path))].removeprefix(root).lstrip("/")
      if not any(part.startswith(".") for part in stem.split("/")):
        self._paths.setdefault(stem, path)
    self._stems = {path: stem for stem, path in self._paths.items()}
    if not self._paths:
      is_local = isinstance(self._filesystem, LocalFileSystem)
      missing = _describe_missing_path(root) if is_local and not os.path.exists(root) else ""
      reason = missing or f"it contains no file of problems {_describe_endings(details)}"
      raise FileNotFoundError(errno.ENOENT, reason, os.fspath(data_dir))
    if unread := [p for p in details if not file_format(p) and _LIKE_FORMATS.search(p)]:
      logging.warning(
        "%s: some files are not read, since their extension is none of %s",
        data_dir,
        _describe_endings(unread),
      )

  def names(self) -> list[str]:
    """The names of all data files, relative to the folder and without their formats."""
    return sorted(self._paths, key=_natural_sort_key)

  def paths(self) -> list[str]:
    """The paths of all data files, in the order of their names."""
    return [self._paths[stem] for stem in self.names()]

  def layout_paths(self, layouts: Layouts) -> list[str]:
    """Paths of the first layout whose names all have files; [] if there is none.

    A layout is a tuple of names of files or folders.
    """
    for layout in layouts:
      paths_by_name = [self._matching_paths(name) for name in layout]
      if all(paths_by_name):
        return [path for paths in paths_by_name for path in paths]
    return []

  def _matching_paths(self, name: str) -> list[str]:
    if name.endswith("/"):
      return [self._paths[stem] for stem in self.names() if stem.startswith(name.lstrip("/"))]
    return [self._paths[name]] if name in self._paths else []

  def digest(self, paths: Sequence[str]) -> str:
    """A digest of the files: of the bytes of local files, or of the listing of remote files."""
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
      ValueError: a file is empty, truncated or not in its format; the message names the file and
        the line or record.
    """
    for is_json, group in itertools.groupby(paths, lambda path: file_format(path) == ".json"):
      for path, stream in self._fetch_files(list(group)) if is_json else self._open_files(group):
        yield from self._parse_rows(path, stream)

  def _parse_rows(self, path: str, stream: Any) -> Iterator[Row]:
    label = path if isinstance(self._filesystem, LocalFileSystem) else f"{self.data_dir} {path}"
    number = 0
    try:
      with stream:
        for number, (where, value) in enumerate(_parse_file(path, stream, self._remedy), start=1):
          where = f"{label}, {where}" if where else label
          if isinstance(value, ValueError):
            raise ValueError(f"{where} {self._describe_json_error(value)}")
          if not isinstance(value, dict):
            raise ValueError(f"{where} is not a JSON object: {str(value)[:80]!r}")
          yield Row(value, where=where, name=f"{self._stems[path]}/{number}")
    except _TRUNCATION_ERRORS as error:
      raise ValueError(f"{label} is truncated ({error}). {self._remedy}") from error
    if not number:
      raise ValueError(f"{label} is empty. {self._remedy}")

  def _describe_json_error(self, error: ValueError) -> str:
    """Describes an error; the message already names the file and line."""
    reason = str(error)
    place = ""
    if isinstance(error, json.JSONDecodeError):
      place = f"line {error.lineno}, " if "\n" in error.doc.strip() else ""
      reason = f"{error.msg} at {place}character {error.colno if place else error.pos + 1}"
    if self._user_written:
      return f"is not JSON: {reason}; fix this {'file' if place else 'line'}"
    return f"is truncated or not JSON ({reason}). {self._remedy}"

  def _fetch_files(self, paths: list[str]) -> Iterator[tuple[str, Any]]:
    for start in range(0, len(paths), _FETCH_SIZE):
      batch_paths = paths[start : start + _FETCH_SIZE]
      contents = self._filesystem.cat(batch_paths)
      yield from ((path, io.BytesIO(contents[path])) for path in batch_paths)

  def _open_files(self, paths: Iterator[str]) -> Iterator[tuple[str, Any]]:
    for path in paths:
      compression = "gzip" if file_format(path).endswith(".gz") else None
      yield path, self._filesystem.open(path, "rb", compression=compression)


def _describe_endings(others: Iterable[str]) -> str:
  """A phrase for messages: the file extensions that are read, and files with other extensions."""
  names = ", ".join(sorted(map(os.path.basename, others))[:_MAX_NAMED])
  found = f": found {names}; rename files of JSON lines to .jsonl"
  return f"({', '.join(FORMATS)}){found if names else ''}"


def _describe_missing_path(path: str) -> str:
  """Describes a missing local path, with similar names in its folder."""
  folder, name = os.path.split(path)
  if not os.path.isdir(folder):
    return f"there is no folder {folder}"
  similar_names = difflib.get_close_matches(name, os.listdir(folder), cutoff=0.5)
  hint = f"; similar names: {', '.join(similar_names)}" if similar_names else ""
  return f"there is no such file in {folder}{hint}"


def file_format(path: str) -> str:
  """Format of a file of problems; "" for any other file."""
  return next((ending for ending in FORMATS if path.lower().endswith(ending)), "")


def _natural_sort_key(stem: str) -> list[str | int]:
  """Sort key that orders algebra/2 before algebra/10, and test before test2."""
  return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", stem)]


def _parse_file(path: str, stream: Any, remedy: str) -> Iterator[tuple[str, Any]]:
  """Yields (location in the file, value or the error from parsing it)."""
  if file_format(path) == ".parquet":
    yield from _parse_parquet(path, stream, remedy)
  elif file_format(path) in _LINES:
    yield from _parse_lines(stream)
  else:
    yield from _parse_json(stream.read())


def _parse_json(data: bytes) -> Iterator[tuple[str, Any]]:
  if not data.strip():
    return
  value = _load_json(data)
  if isinstance(value, list):
    yield from ((f"record {n}", record) for n, record in enumerate(value, start=1))
  elif isinstance(value, json.JSONDecodeError) and value.msg == "Extra data":
    yield from _parse_lines(io.BytesIO(data))  # JSON lines in a file named .json
  else:
    yield "", value


def _parse_lines(lines: Any) -> Iterator[tuple[str, Any]]:
  for number, line in enumerate(lines, start=1):
    if line.strip():
      yield f"line {number}", _load_json(line)


def _load_json(data: bytes) -> Any:
  """Returns the value, or the error if the text is not JSON."""
  try:
    return json.loads(data)
  except ValueError as error:  # not JSON, or not UTF-8
    return error
  except RecursionError:
    return ValueError("it is nested too deeply")


def _parse_parquet(path: str, stream: Any, remedy: str) -> Iterator[tuple[str, Any]]:
  try:
    from pyarrow import parquet
  except ImportError as error:
    raise ValueError(
      f"{path}: reading Parquet needs pyarrow, which is not installed; install it (pip install "
      "pyarrow), or convert the file to .jsonl, one JSON object per line"
    ) from error
  try:
    file = parquet.ParquetFile(stream)
    names = [field.name for field in file.schema_arrow if _is_json(field.type)]
    if len(names) < len(file.schema_arrow):
      others = [f"{f.name} ({f.type})" for f in file.schema_arrow if f.name not in names]
      logging.info("%s: not read, since JSON has no such values: %s", path, ", ".join(others))
    rows = (row for batch in file.iter_batches(columns=names) for row in batch.to_pylist())
    yield from ((f"record {n}", row) for n, row in enumerate(rows, start=1))
  except (OSError, ValueError) as error:
    raise ValueError(f"{path} is truncated or not Parquet ({error}). {remedy}") from error


def _is_json(kind: Any) -> bool:
  """Whether the values of a column's type are JSON, also within lists and structs."""
  from pyarrow import types

  if types.is_dictionary(kind):
    return _is_json(kind.value_type)
  if types.is_nested(kind):
    return all(_is_json(kind.field(index).type) for index in range(kind.num_fields))
  plain = (types.is_null, types.is_boolean, types.is_integer, types.is_floating)
  texts = (types.is_string, types.is_large_string, types.is_string_view)
  return any(is_kind(kind) for is_kind in (*plain, *texts))
