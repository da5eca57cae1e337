"""One shard of the store of rollouts: a batch in a closed ArrayRecord file, with its checksums.

Record 0 is JSON (format, number, info and the fields' names, types, shapes and checksums, itself
with a checksum), each further record one field's bytes, little-endian.
"""

from __future__ import annotations

import functools
import json
import pathlib
import threading
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from rlvr_jax.files import file_crc32, json_crc32

MARKER = "rlvr_jax rollouts 1"
_WRITER_OPTIONS = "group_size:1,zstd:1"  # a chunk per record; faster than uncompressed
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_READER_THREADS = 64  # that the library starts at the first reader all the same
_DTYPES = {
  np.dtype(name)
  for name in (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
  )
}


class StoreError(RuntimeError):
  """The folder is no store, one of another format, or in use by another writer."""


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
  """The content with its checksum, to be written as JSON."""
  return {"crc32": json_crc32(content), "content": content}


def unsealed(line: bytes, path: pathlib.Path) -> dict[str, Any] | None:
  """What `sealed` was given; None if the line, of `path`, is not as it was written.

  Raises:
    StoreError: it is of another format.
  """
  try:
    record = json.loads(line)
    content, checksum, marker = record["content"], record["crc32"], record["content"]["format"]
  except (ValueError, KeyError, TypeError):
    return None
  if json_crc32(content) != checksum:
    return None
  if marker != MARKER:
    raise StoreError(
      f"{path} has the format {marker!r}, this version reads {MARKER!r}. Use the version of "
      "rlvr_jax that wrote it, or another folder."
    )
  return content


def header_of(
  number: int, arrays: Mapping[str, np.ndarray], info: Mapping[str, Any]
) -> dict[str, Any]:
  """The header of a batch's shard.

  Raises:
    ValueError, TypeError: arrays or info that cannot be stored.
  """
  info = _checked_info(number, info)
  fields = [_describe(number, name, array) for name, array in arrays.items()]
  return {"format": MARKER, "number": number, "info": info, "fields": fields}


def write_shard(
  path: pathlib.Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
  """Writes a whole shard; the library does not report all that goes wrong, so read it back."""
  writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
  try:
    writer.write(json.dumps(sealed(header)).encode())
    for array in arrays.values():
      writer.write(_little_endian(array))
  finally:
    writer.close()


def read_shard(path: pathlib.Path, number: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Header and arrays, all checked.

  Raises:
    StoreError: it is of another format.
    Exception: of whatever kind, if the shard is not as it was written.
  """
  _check_threads()
  reader = ArrayRecordReader(str(path), _READER_OPTIONS)
  try:
    records = reader.read_all()
  finally:
    reader.close()
  header = unsealed(records[0], path) if records else None
  if header is None:
    raise ValueError("its header is damaged")
  if header["number"] != number:
    raise ValueError(f"it holds batch {header['number']}")
  arrays = {}
  for field, record in zip(header["fields"], records[1:], strict=True):
    if zlib.crc32(record) != field["crc32"]:
      raise ValueError(f"its field {field['name']!r} does not match its checksum")
    dtype = np.dtype(field["dtype"])
    array = np.frombuffer(record, dtype.newbyteorder("<")).astype(dtype)
    arrays[field["name"]] = array.reshape(field["shape"])
  return header, arrays


@functools.cache
def _check_threads() -> None:
  """Raises StoreError where ArrayRecord could not start its threads: it would wait for ever."""
  ended = threading.Event()
  started: list[threading.Thread] = []
  try:
    for _ in range(_READER_THREADS):
      started.append(threading.Thread(target=ended.wait))
      started[-1].start()
  except (RuntimeError, MemoryError) as error:
    del started[-1:]
    raise StoreError(
      f"rollouts cannot be read: of {_READER_THREADS} threads {len(started)} could be started"
      f" ({error}). Allow the process more address space (ulimit -v) or threads (ulimit -u)"
    ) from error
  finally:
    ended.set()
    for thread in started:
      thread.join()


def entry_of(path: pathlib.Path, number: int) -> dict[str, Any] | None:
  """What the index tells of a batch's shard, from the shard itself; None if it is not whole."""
  try:
    header, _ = read_shard(path, number)
    size, checksum = path.stat().st_size, file_crc32(path)
  except StoreError:
    raise
  except Exception:
    return None
  return {
    "format": MARKER,
    "number": number,
    "state": "stored",
    "file": path.name,
    "bytes": size,
    "crc32": checksum,
    "info": header["info"],
  }


def _describe(number: int, name: str, array: np.ndarray) -> dict[str, Any]:
  """The header's words on one array."""
  if not isinstance(array, np.ndarray) or array.dtype not in _DTYPES:
    kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
    raise TypeError(
      f"batch {number}: {name!r} is of type {kind}; it takes NumPy arrays of "
      f"{', '.join(sorted(map(str, _DTYPES)))}: convert it (bfloat16 to float32 loses nothing)"
    )
  checksum = zlib.crc32(_little_endian(array))
  return {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "crc32": checksum}


def _little_endian(array: np.ndarray) -> bytes:
  return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _checked_info(number: int, info: Mapping[str, Any]) -> dict[str, Any]:
  """The info as it will be read."""
  if taken := {"bytes", "removed"} & info.keys():
    raise ValueError(f"batch {number}: info has {sorted(taken)}, which the store adds; rename it")
  try:
    return json.loads(json.dumps(dict(info), allow_nan=False))
  except (TypeError, ValueError) as error:
    raise type(error)(
      f"batch {number}: info must be finite JSON values, {error}; arrays go among the arrays"
    ) from error
