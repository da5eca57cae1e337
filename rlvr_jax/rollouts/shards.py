"""One shard of the rollout store: a batch in an ArrayRecord file, with checksums.

Record 0 is JSON with a checksum: format, number, info, and the name, type, shape and checksum of
each field. Each further record has the bytes of one field, little-endian.
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

from rlvr_jax.storage.files import file_crc32, json_crc32

MARKER = "rlvr_jax rollouts 1"
_WRITER_OPTIONS = "group_size:1,zstd:1"  # a chunk per record; faster than uncompressed
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_READER_THREADS = 64  # threads that the library starts with the first reader, whatever the options
_DTYPES = {
  np.dtype(name)
  for name in (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
  )
}


class StoreError(RuntimeError):
  """The folder is not a store, has another format, or is in use by another writer."""


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
  """The content with its checksum, to be written as JSON."""
  return {"crc32": json_crc32(content), "content": content}


def checked_content(line: bytes, path: pathlib.Path) -> dict[str, Any] | None:
  """The inverse of `with_checksum`; None if the line, of the file `path`, is corrupted.

  Raises:
    StoreError: the content has another format.
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
    ValueError, TypeError: arrays or info cannot be stored.
  """
  info = _checked_info(number, info)
  fields = [_describe(number, name, array) for name, array in arrays.items()]
  return {"format": MARKER, "number": number, "info": info, "fields": fields}


def write_shard(
  path: pathlib.Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
  """Writes a shard; read it back afterwards, since the library does not report all failures."""
  writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
  try:
    writer.write(json.dumps(with_checksum(header)).encode())
    for array in arrays.values():
      writer.write(_little_endian(array))
  finally:
    writer.close()


def read_shard(path: pathlib.Path, number: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """(header, arrays), with all checksums verified.

  Raises:
    StoreError: the shard has another format.
    Exception: of any kind, if the shard is corrupted.
  """
  _check_threads()
  reader = ArrayRecordReader(str(path), _READER_OPTIONS)
  try:
    records = reader.read_all()
  finally:
    reader.close()
  header = checked_content(records[0], path) if records else None
  if header is None:
    raise ValueError("its header is damaged")
  if header["number"] != number:
    raise ValueError(f"it has batch {header['number']}")
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
  """Raises StoreError if ArrayRecord could not start its threads: it would wait indefinitely."""
  ended = threading.Event()
  started: list[threading.Thread] = []
  try:
    for _ in range(_READER_THREADS):
      started.append(threading.Thread(target=ended.wait))
      started[-1].start()
  except (RuntimeError, MemoryError) as error:
    del started[-1:]
    raise StoreError(
      f"rollouts cannot be read: only {len(started)} of {_READER_THREADS} threads could be started"
      f" ({error}). Allow the process more address space (ulimit -v) or threads (ulimit -u)"
    ) from error
  finally:
    ended.set()
    for thread in started:
      thread.join()


def entry_of(path: pathlib.Path, number: int) -> dict[str, Any] | None:
  """The index entry of a batch, made from its shard; None if the shard is corrupted."""
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
  """The header's entry for one array."""
  if not isinstance(array, np.ndarray) or array.dtype not in _DTYPES:
    kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
    raise TypeError(
      f"batch {number}: {name!r} is of type {kind}; the store takes NumPy arrays of "
      f"{', '.join(sorted(map(str, _DTYPES)))}; convert it (bfloat16 to float32 is exact)"
    )
  checksum = zlib.crc32(_little_endian(array))
  return {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "crc32": checksum}


def _little_endian(array: np.ndarray) -> bytes:
  return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _checked_info(number: int, info: Mapping[str, Any]) -> dict[str, Any]:
  """The info after a round trip through JSON."""
  if reserved := {"bytes", "removed"} & info.keys():
    raise ValueError(f"batch {number}: info has {sorted(reserved)}, names of the store; rename it")
  try:
    return json.loads(json.dumps(dict(info), allow_nan=False))
  except (TypeError, ValueError) as error:
    raise type(error)(
      f"batch {number}: info must be finite JSON values ({error}); pass arrays as `arrays`"
    ) from error
