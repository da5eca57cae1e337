"""File format of rollouts: a record per group, with named arrays, and shards of several groups.

A group's record describes itself: a line of JSON with name, axis, dtype and shape of each array,
then the arrays' bytes, little-endian. Padding is not stored: arrays along responses or prompts are
cut to their lengths. Shards, the journal of groups and single batches have this format.

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
import numpy.typing as npt
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from rlvr_jax.storage.files import file_crc32, parse_checked_line, with_crc32

MARKER = "rlvr_jax rollouts 2"
_WRITER_OPTIONS = "group_size:1,zstd:1"  # a chunk per record; faster than uncompressed
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_READER_THREADS = 64  # the library starts them with the first reader, whatever the options

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
  dtype: str  # or several, with "|" between them


# Every array that a group may have. The files contain axes and dtypes too, so a new line here does
# not need a new format.
ARRAYS: Mapping[str, Kind] = {
  "prompts.tokens": Kind("prompt", "int32"),
  "prompts.lengths": Kind("group", "int32"),
  "tokens": Kind("response", "int32"),
  "lengths": Kind("rollout", "int32"),
  "stopped": Kind("rollout", "bool"),
  "mask": Kind("response", "float32"),
  "turns": Kind("response", "int32"),
  "turn_scores": Kind("response", "float32"),
  "routes": Kind("response", "uint8|uint16"),
  "prompt_routes": Kind("prompt", "uint8|uint16"),
  "behavior_logprobs": Kind("response", "float32"),
  "sampled_logprobs": Kind("response", "float32"),
  "reference_logprobs": Kind("response", "float32"),
  "proximal_logprobs": Kind("response", "float32"),
  "rewards": Kind("rollout", "float32"),
  "correct": Kind("rollout", "float32"),
  "valid": Kind("rollout", "bool"),
  "ends": Kind("rollout", "int32"),
  "scores": Kind("rollout", "float32"),
  "lags": Kind("rollout", "int32"),
  "solve_rate": Kind("group", "float32"),
  "sources": Kind("group", "int32"),
  "versions": Kind("group", "int32"),
  "token_versions": Kind("response", "int32"),
}
_LENGTHS = {"prompt": "prompts.lengths", "response": "lengths"}  # axis → array of its lengths


class StoreError(RuntimeError):
  """A folder that is not a store, has another format, or is in use by another writer."""


class Stored(NamedTuple):
  """The contents of a shard."""

  arrays: dict[str, np.ndarray]  # by name as in `ARRAYS`, with a first axis of P groups
  info: dict[str, Any]  # JSON values
  samples: list[Any]  # one JSON value per rollout, in order


# --- groups ---------------------------------------------------------------------------------------


def encode_group(arrays: Mapping[str, np.ndarray], samples: Sequence[Any] = ()) -> bytes:
  """Encodes one group as a record.

  Args:
    arrays: by name, with axes and dtypes as in `ARRAYS`; padding may have any value.
    samples: JSON values.
  Raises:
    ValueError, TypeError: an array or a sample cannot be stored.
  """
  for name, array in arrays.items():
    _check_array(name, array)
  lengths = {axis: _stored_lengths(axis, arrays) for axis in ("response", "turn", "prompt")}
  entries: list[dict[str, Any]] = []
  parts: list[bytes] = []
  for name, array in arrays.items():
    kind = ARRAYS[name]
    about = {"axis": kind.axis, "dtype": str(array.dtype)}
    entry = {"name": name, **about, "shape": list(array.shape)}
    if kind.axis in lengths:
      row_lengths = lengths[kind.axis]
      entry["padding"] = _padding(_rows(kind.axis, array), row_lengths).item()
      parts.append(_little_endian(array[_stored_places(kind.axis, array, row_lengths)]))
    else:
      parts.append(_little_endian(array))
    entries.append(entry)
  head = {"arrays": entries, "lengths": lengths, "samples": list(samples)}
  return json.dumps(head).encode() + b"\n" + b"".join(parts)


def decode_group(record: bytes) -> tuple[dict[str, np.ndarray], list[Any]]:
  """Decodes (arrays with their padding, samples), bit for bit as given to `encode_group`.

  Arrays of a later version, which `ARRAYS` lacks, are returned by their names.

  Raises:
    Exception: of any type, if the record is damaged.
  """
  line, _, data = record.partition(b"\n")
  head = json.loads(line)
  arrays = {}
  offset = 0
  for entry in head["arrays"]:
    dtype, shape, axis = np.dtype(entry["dtype"]), entry["shape"], entry["axis"]
    places: Any = ...
    array = np.full(shape, entry.get("padding", 0), dtype)
    if axis in head["lengths"]:
      places = _stored_places(axis, array, head["lengths"][axis])
    stored = array[places]
    values = np.frombuffer(data, dtype.newbyteorder("<"), stored.size, offset)
    array[places] = values.reshape(stored.shape)
    offset += stored.nbytes
    arrays[entry["name"]] = array
  if offset != len(data):
    raise ValueError(f"a group has {len(data)} bytes of arrays, its head says {offset}")
  return arrays, head["samples"]


def _check_array(name: str, array: np.ndarray) -> None:
  """Raises ValueError for an unknown name, TypeError for an array of another dtype."""
  if name not in ARRAYS:
    raise ValueError(
      f"{name!r} is not an array of rollouts: known are {', '.join(ARRAYS)}; add a line to ARRAYS"
      " in rollouts/shards.py"
    )
  dtype = getattr(array, "dtype", type(array).__name__)
  allowed = ARRAYS[name].dtype.split("|")
  if not isinstance(array, np.ndarray) or dtype not in allowed:
    raise TypeError(f"{name!r} is of type {dtype}, must be a NumPy array of {' or '.join(allowed)}")


def _rows(axis: str, array: np.ndarray) -> np.ndarray:
  """A view [rows, places, ...] whose rows end with their padding."""
  return array[None, ::-1] if axis == "prompt" else array


def _stored_places(
  axis: str, array: np.ndarray, lengths: Sequence[int]
) -> slice | npt.NDArray[np.bool_]:
  """The index of the part of an array that is stored, row by row."""
  if axis == "prompt":
    (length,) = lengths
    return slice(len(array) - length, None)
  return np.arange(array.shape[1]) < np.asarray(lengths)[:, None]


def _stored_lengths(axis: str, arrays: Mapping[str, np.ndarray]) -> list[int]:
  """Places of each row to store: up to the last one at which an array differs from its padding.

  At least the lengths that an array gives, if there is one for this axis.
  """
  all_rows = [_rows(axis, array) for name, array in arrays.items() if ARRAYS[name].axis == axis]
  if not all_rows:
    return []
  lengths = np.zeros(len(all_rows[0]), np.int64)
  if axis in _LENGTHS and _LENGTHS[axis] in arrays:
    lengths[:] = arrays[_LENGTHS[axis]]
  # Floats are padded with 0 or NaN, routes with 0, integers with the value after the shortest row.
  for rows in sorted(all_rows, key=lambda rows: rows.dtype.kind == "i"):
    places = np.arange(1, rows.shape[1] + 1)
    differs = _bits(rows) != _bits(_padding(rows, lengths))
    differs = differs.any(axis=tuple(range(2, differs.ndim)))
    lengths = np.maximum(lengths, (differs * places).max(axis=1, initial=0))
  return lengths.tolist()


def _padding(rows: np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
  """The last value of the shortest row's padding; of floats 0, unless it is NaN."""
  if not rows.size:
    return np.zeros((), rows.dtype)
  last = np.asarray(rows[np.argmin(lengths), -1].flat[0])
  return last if rows.dtype.kind == "i" or np.isnan(last) else np.zeros_like(last)


def _bits(array: np.ndarray) -> np.ndarray:
  """The bits of numbers as integers, which distinguish −0.0 from 0.0; NaN equals itself."""
  return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _little_endian(array: np.ndarray) -> bytes:
  return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


# --- shards ---------------------------------------------------------------------------------------


def check_format(record: Mapping[str, Any], path: pathlib.Path) -> None:
  """Raises StoreError if a record of the file `path` has another version's format."""
  if record["format"] != MARKER:
    raise StoreError(
      f"{path} has the format {record['format']!r}, this version reads {MARKER!r}. Use the version"
      " of rlvr_jax that wrote it, or another folder."
    )


def read_line(line: bytes, path: pathlib.Path) -> dict[str, Any] | None:
  """Reads the record in a line, or record 0 of a shard, of the file `path`; None if damaged.

  Raises:
    StoreError: the record has another format.
  """
  record = parse_checked_line(line)
  if record is None:
    record = _read_first_format(line)
  if record is not None and "format" in record:
    check_format(record, path)
    return record
  return None


def _read_first_format(line: bytes) -> dict[str, Any] | None:
  """Reads a line of the first format, so that the error can name it; None for other lines."""
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
  info = _to_json_values(number, info)
  try:
    groups = [encode_group(*group) for group in _split_groups(arrays, samples)]
  except (ValueError, TypeError) as error:
    raise type(error)(f"batch {number}: {error}") from error
  checksums = [zlib.crc32(group) for group in groups]
  return Shard({"format": MARKER, "number": number, "info": info, "groups": checksums}, groups)


def _split_groups(
  arrays: Mapping[str, np.ndarray], samples: Sequence[Any]
) -> list[tuple[dict[str, np.ndarray], Sequence[Any]]]:
  """Splits a batch into (arrays, samples) of each group."""
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
  """Writes a shard; callers must read it back, since the library does not report all failures."""
  writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
  try:
    writer.write(json.dumps(with_crc32(shard.header)).encode())
    for group in shard.groups:
      writer.write(group)
  finally:
    writer.close()


def read_shard(path: pathlib.Path, number: int) -> Stored:
  """Reads the contents of a shard and verifies all checksums.

  Raises:
    StoreError: the shard has another format.
    Exception: of any type, if the shard is corrupted.
  """
  info, records = _read_records(path, number)
  groups = [decode_group(record) for record in records]
  arrays = {name: np.stack([group[name] for group, _ in groups]) for name in groups[0][0]}
  return Stored(arrays, info, [sample for _, samples in groups for sample in samples])


def _read_records(path: pathlib.Path, number: int) -> tuple[dict[str, Any], list[bytes]]:
  """The info of a shard, and its groups as records; see `read_shard`."""
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
  for index, (checksum, record) in enumerate(zip(header["groups"], records[1:], strict=True)):
    if zlib.crc32(record) != checksum:
      raise ValueError(f"its group {index} does not match its checksum")
  return header["info"], records[1:]


@functools.cache
def _check_threads() -> None:
  """Raises StoreError if ArrayRecord could not start its threads: it would wait indefinitely."""
  done = threading.Event()
  threads: list[threading.Thread] = []
  try:
    for _ in range(_READER_THREADS):
      threads.append(threading.Thread(target=done.wait))
      threads[-1].start()
  except (RuntimeError, MemoryError) as error:
    del threads[-1:]
    raise StoreError(
      f"rollouts cannot be read: only {len(threads)} of {_READER_THREADS} threads could be started"
      f" ({error}). Allow the process more address space (ulimit -v) or threads (ulimit -u)"
    ) from error
  finally:
    done.set()
    for thread in threads:
      thread.join()


def make_entry(path: pathlib.Path, number: int) -> dict[str, Any] | None:
  """Makes the index entry of a batch from its shard; None if the shard is corrupted."""
  try:
    info, _ = _read_records(path, number)
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
    "info": info,
  }


def _to_json_values(number: int, info: Mapping[str, Any]) -> dict[str, Any]:
  """Converts info to JSON values; raises ValueError or TypeError if that is not possible."""
  if reserved := {"bytes", "removed"} & info.keys():
    raise ValueError(
      f"batch {number}: info has {sorted(reserved)}, which the store reserves; rename it"
    )
  try:
    return json.loads(json.dumps(dict(info), allow_nan=False))
  except (TypeError, ValueError) as error:
    raise type(error)(
      f"batch {number}: info must be finite JSON values ({error}); pass arrays as `arrays`"
    ) from error
