"""Rollouts in files: a record per group, with named arrays, and shards of several groups.

A group's record describes itself: a line of JSON with name, axis, dtype and shape of each array,
then the arrays' bytes, little-endian. Padding is not stored: an array along responses or prompts
has the places of their lengths. Shards, the journal of groups and single batches have this format.

A shard is an ArrayRecord file. Record 0 is JSON with a checksum: format, number, info, and the
checksums of the groups. Each further record is a group.
"""

from __future__ import annotations

import functools
import json
import pathlib
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from rlvr_jax.storage.files import checked_record, file_crc32, with_crc32

MARKER = "rlvr_jax rollouts 2"
_WRITER_OPTIONS = "group_size:1,zstd:1"  # a chunk per record; faster than uncompressed
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_READER_THREADS = 64  # threads that the library starts with the first reader, whatever the options

# What the first axis of a group's array counts, after G for all but "group" and "prompt":
#   group     nothing: one value of the group               [...]
#   rollout   rollouts                                      [G, ...]
#   response  places of responses, padded on the right      [G, T, ...]
#   turn      turns of responses, padded on the right       [G, U, ...]
#   prompt    places of the prompt, padded on the left      [S, ...]
Axis = Literal["group", "rollout", "response", "turn", "prompt"]


class Kind(NamedTuple):
  """Axis and dtype of an array."""

  axis: Axis
  dtype: str


# Every array that a group may have. Axes and dtypes are in the files too, so a new line here needs
# no new format.
ARRAYS: Mapping[str, Kind] = {
  "prompts.tokens": Kind("prompt", "int32"),
  "prompts.lengths": Kind("group", "int32"),
  "tokens": Kind("response", "int32"),
  "lengths": Kind("rollout", "int32"),
  "stopped": Kind("rollout", "bool"),
  "mask": Kind("response", "float32"),
  "behavior_logprobs": Kind("response", "float32"),
  "sampled_logprobs": Kind("response", "float32"),
  "reference_logprobs": Kind("response", "float32"),
  "proximal_logprobs": Kind("response", "float32"),
  "rewards": Kind("rollout", "float32"),
  "correct": Kind("rollout", "float32"),
  "valid": Kind("rollout", "bool"),
  "lags": Kind("rollout", "int32"),
  "solve_rate": Kind("group", "float32"),
  "sources": Kind("group", "int32"),
  "versions": Kind("group", "int32"),
}
_LENGTHS = {"prompt": "prompts.lengths", "response": "lengths"}  # arrays that say them, by axis


class StoreError(RuntimeError):
  """The folder is not a store, has another format, or is in use by another writer."""


class Stored(NamedTuple):
  """The contents of a shard."""

  arrays: dict[str, np.ndarray]  # by name as in `ARRAYS`, with a first axis of P groups
  info: dict[str, Any]  # JSON values
  samples: list[Any]  # one JSON value per rollout, in order


# --- groups ---------------------------------------------------------------------------------------


def encode_group(arrays: Mapping[str, np.ndarray], samples: Sequence[Any] = ()) -> bytes:
  """The record of one group.

  Args:
    arrays: by name, with axes and dtypes as in `ARRAYS`; padding may have any value.
    samples: JSON values.
  Raises:
    ValueError, TypeError: an array or a sample cannot be stored.
  """
  arrays = {name: _checked(name, array) for name, array in arrays.items()}
  lengths = {axis: _lengths(axis, arrays) for axis in ("response", "turn", "prompt")}
  described, parts = list[dict[str, Any]](), list[bytes]()
  for name, array in arrays.items():
    kind = ARRAYS[name]
    entry = {"name": name, **kind._asdict(), "shape": list(array.shape)}
    if kind.axis in lengths:
      of_rows = lengths[kind.axis]
      entry["padding"] = _padding(_rows(kind.axis, array), of_rows).item()
      parts += map(_little_endian, _stored_places(kind.axis, array, of_rows))
    else:
      parts.append(_little_endian(array))
    described.append(entry)
  head = {"arrays": described, "lengths": lengths, "samples": list(samples)}
  return json.dumps(head).encode() + b"\n" + b"".join(parts)


def decode_group(record: bytes) -> tuple[dict[str, np.ndarray], list[Any]]:
  """(arrays with their padding, samples), bit for bit as they were given to `encode_group`.

  Arrays that `ARRAYS` lacks, of a later version, are returned by their names.

  Raises:
    Exception: of any kind, if the record is damaged.
  """
  line, _, data = record.partition(b"\n")
  head = json.loads(line)
  arrays, offset = {}, 0
  for entry in head["arrays"]:
    dtype, shape, axis = np.dtype(entry["dtype"]), entry["shape"], entry["axis"]
    stored = dtype.newbyteorder("<")
    if axis in head["lengths"]:
      array = np.full(shape, entry["padding"], dtype)
      places = _stored_places(axis, array, head["lengths"][axis])
    else:
      array = np.empty(shape, dtype)
      places = [array]
    for view in places:
      view[...] = np.frombuffer(data, stored, view.size, offset).reshape(view.shape)
      offset += view.nbytes
    arrays[entry["name"]] = array
  if offset != len(data):
    raise ValueError(f"a group has {len(data)} bytes of arrays, its head says {offset}")
  return arrays, head["samples"]


def _checked(name: str, array: np.ndarray) -> np.ndarray:
  if name not in ARRAYS:
    raise ValueError(
      f"{name!r} is not an array of rollouts: known are {', '.join(ARRAYS)}; add a line to ARRAYS"
      " in rollouts/shards.py"
    )
  dtype = getattr(array, "dtype", type(array).__name__)
  if not isinstance(array, np.ndarray) or dtype != ARRAYS[name].dtype:
    raise TypeError(f"{name!r} is of type {dtype}, must be a NumPy array of {ARRAYS[name].dtype}")
  return array


def _rows(axis: str, array: np.ndarray) -> np.ndarray:
  """A view [rows, places, ...] with the padding at the end of each row."""
  return array[None, ::-1] if axis == "prompt" else array


def _stored_places(axis: str, array: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
  """Views of what is stored of each row."""
  if axis == "prompt":
    (length,) = lengths
    return [array[len(array) - length :]]
  return [row[:length] for row, length in zip(array, lengths, strict=True)]


def _lengths(axis: str, arrays: Mapping[str, np.ndarray]) -> list[int]:
  """Places to store of each row: up to the last one where an array has another value than padding.

  Where an array says the lengths, they count, and so do values behind them.
  """
  found = [_rows(axis, array) for name, array in arrays.items() if ARRAYS[name].axis == axis]
  if not found:
    return []
  lengths = np.zeros(len(found[0]), np.int64)
  if axis in _LENGTHS and _LENGTHS[axis] in arrays:
    lengths[:] = arrays[_LENGTHS[axis]]
  # Floats are padded with 0, tokens with whatever is behind the shortest response.
  for rows in sorted(found, key=lambda rows: rows.dtype.kind == "i"):
    places = np.arange(1, rows.shape[1] + 1)
    differs = _bits(rows) != _bits(_padding(rows, lengths))
    differs = differs.any(axis=tuple(range(2, differs.ndim)))
    lengths = np.maximum(lengths, (differs * places).max(axis=1, initial=0))
  return lengths.tolist()


def _padding(rows: np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
  """The value behind the shortest row; 0 for floats."""
  if rows.dtype.kind != "i" or not rows.size:
    return np.zeros((), rows.dtype)
  return np.asarray(rows[np.argmin(lengths), -1].flat[0])


def _bits(array: np.ndarray) -> np.ndarray:
  """The bits of numbers as integers: they tell −0.0 from 0.0, and NaN equals itself."""
  return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _little_endian(array: np.ndarray) -> bytes:
  return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


# --- shards ---------------------------------------------------------------------------------------


def check_format(record: Mapping[str, Any], path: pathlib.Path) -> None:
  """Raises StoreError if a record, of the file `path`, is of another version's format."""
  if record["format"] != MARKER:
    raise StoreError(
      f"{path} has the format {record['format']!r}, this version reads {MARKER!r}. Use the version"
      " of rlvr_jax that wrote it, or another folder."
    )


def read_line(line: bytes, path: pathlib.Path) -> dict[str, Any] | None:
  """The record in a line, or record 0 of a shard, of the file `path`; None if it is damaged.

  Raises:
    StoreError: it has another format.
  """
  record = checked_record(line)
  if record is None:
    record = _of_first_format(line)
  if record is not None and "format" in record:
    check_format(record, path)
    return record
  return None


def _of_first_format(line: bytes) -> dict[str, Any] | None:
  """The content of a line of the first format, so that it is refused by its name."""
  try:
    content = json.loads(line)["content"]
    return content if content["format"] == "rlvr_jax rollouts 1" else None
  except (ValueError, KeyError, TypeError):
    return None


class Shard(NamedTuple):
  """A batch, ready to be written."""

  header: dict[str, Any]
  groups: list[bytes]  # see `encode_group`


def make_shard(
  number: int,
  arrays: Mapping[str, np.ndarray],
  info: Mapping[str, Any],
  samples: Sequence[Any] = (),
) -> Shard:
  """Encodes a batch; arguments as of `RolloutStore.append`.

  Raises:
    ValueError, TypeError: arrays, info or samples cannot be stored.
  """
  info = _checked_info(number, info)
  try:
    groups = [encode_group(*group) for group in _split(arrays, samples)]
  except (ValueError, TypeError) as error:
    raise type(error)(f"batch {number}: {error}") from error
  sums = [zlib.crc32(group) for group in groups]
  return Shard({"format": MARKER, "number": number, "info": info, "groups": sums}, groups)


def _split(
  arrays: Mapping[str, np.ndarray], samples: Sequence[Any]
) -> list[tuple[dict[str, np.ndarray], Sequence[Any]]]:
  """(arrays, samples) of each group of a batch."""
  sizes = {name: np.shape(array)[:1] for name, array in arrays.items()}
  if len(set(sizes.values())) != 1 or () in sizes.values():
    raise ValueError(f"arrays must have one number of groups as first axis, they have {sizes}")
  ((P,),) = set(sizes.values())
  if P == 0 or len(samples) % P:
    raise ValueError(f"{len(samples)} samples cannot be divided among {P} groups")
  size = len(samples) // P
  return [
    (
      {name: np.asarray(array[p]) for name, array in arrays.items()},
      samples[p * size : (p + 1) * size],
    )
    for p in range(P)
  ]


def write_shard(path: pathlib.Path, shard: Shard) -> None:
  """Writes a shard; read it back afterwards, since the library does not report all failures."""
  writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
  try:
    writer.write(json.dumps(with_crc32(shard.header)).encode())
    for group in shard.groups:
      writer.write(group)
  finally:
    writer.close()


def read_shard(path: pathlib.Path, number: int) -> Stored:
  """The contents of a shard, with all checksums verified.

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
  header = read_line(records[0], path) if records else None
  if header is None:
    raise ValueError("its header is damaged")
  if header["number"] != number:
    raise ValueError(f"it has batch {header['number']}")
  groups = []
  for index, (checksum, record) in enumerate(zip(header["groups"], records[1:], strict=True)):
    if zlib.crc32(record) != checksum:
      raise ValueError(f"its group {index} does not match its checksum")
    groups.append(decode_group(record))
  arrays = {name: np.stack([group[name] for group, _ in groups]) for name in groups[0][0]}
  return Stored(arrays, header["info"], [sample for _, samples in groups for sample in samples])


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
    stored = read_shard(path, number)
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
    "file_crc32": checksum,
    "info": stored.info,
  }


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
