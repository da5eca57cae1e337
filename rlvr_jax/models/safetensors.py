"""The safetensors format, read by slices: rows of tensors, from disks and object stores alike.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name → dtype, shape,
data_offsets), and the tensors' bytes in the header's order, without gaps. A checkpoint is one such
file, or shards and an index from tensors to shards.
Source: huggingface.co/docs/safetensors.
"""

# The safetensors library is not used: it opens local files only, while this module reads byte
# ranges of remote files; and it requires all tensors of a file in memory to write the file.

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import os
import pathlib
import posixpath
import shutil
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from rlvr_jax.storage.files import (
  TEMPORARY,
  list_files,
  locate,
  open_own,
  report_full_disk,
  report_unwritable,
  sync_folder,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 2 * 2**30
DTYPES: dict[str, np.dtype] = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_ALIGNMENT = 8  # bytes, of the offset at which the tensors begin
_LOCK = ".lock"  # in a directory that is being written
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class Tensor:
  """The location of a tensor in a file; its data is not in memory."""

  name: str
  dtype_name: str  # the format's, such as BF16
  shape: tuple[int, ...]
  start: int  # offset of its first byte in the file
  system: fsspec.AbstractFileSystem = dataclasses.field(repr=False)
  path: str  # in the file system

  @property
  def dtype(self) -> np.dtype:
    """The NumPy dtype; raises ValueError unless the numbers are plain floating-point ones."""
    if self.dtype_name not in DTYPES:
      raise ValueError(
        f"{self.path}: tensor {self.name!r} has dtype {self.dtype_name}, only {', '.join(DTYPES)}"
        " can be read; quantized checkpoints have to be converted to one of these first"
      )
    return DTYPES[self.dtype_name]

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  def rows(self, start: int, stop: int) -> np.ndarray:
    """Reads rows [start, stop) of the first axis, as a read-only array.

    Local files are memory-mapped, so that the system can drop their pages. From remote files only
    these rows are fetched.
    """
    row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
    begin, end = self.start + start * row_bytes, self.start + stop * row_bytes
    if isinstance(self.system, LocalFileSystem):
      raw = np.memmap(self.path, np.uint8, mode="r", offset=begin, shape=end - begin)
    else:
      raw = np.frombuffer(self.system.cat_file(self.path, start=begin, end=end), np.uint8)
    if raw.nbytes != end - begin:
      raise ValueError(f"{self.path} ends within tensor {self.name!r}: the file is truncated")
    return np.asarray(raw).view(self.dtype).reshape(stop - start, *self.shape[1:])


# --- reading --------------------------------------------------------------------------------------


def open_checkpoint(directory: str | os.PathLike[str]) -> dict[str, Tensor]:
  """Opens the tensors of a checkpoint directory, by name; reads and checks the headers only.

  Args:
    directory: contains model.safetensors, or model.safetensors.index.json and its shards; local or
      a URL such as gs://bucket/folder.
  Raises:
    FileNotFoundError: the directory does not exist, it has no weights, or a shard is missing.
    OSError: the directory cannot be reached.
    ValueError: the weights are pickled, or a file is truncated or does not match its header.
  """
  system, folder = locate(directory)
  names = list_files(directory)
  if SINGLE in names:
    return read_header(system, posixpath.join(folder, SINGLE))
  if INDEX in names:
    return _open_shards(system, folder, names)
  pickled = [name for name in names if name.endswith(_PICKLED)]
  if pickled:
    raise ValueError(
      f"{directory} has only pickled weights ({', '.join(pickled[:3])}): unpickling runs code from"
      " the file, so they are not read. Convert them to safetensors (transformers'"
      " save_pretrained writes it) and load that"
    )
  raise FileNotFoundError(
    f"{directory} has neither {SINGLE} nor {INDEX}; it has {names[:8] or 'nothing'}"
  )


def _open_shards(
  system: fsspec.AbstractFileSystem, folder: str, names: Collection[str]
) -> dict[str, Tensor]:
  """Opens the tensors that the index of a folder lists."""
  index_path = posixpath.join(folder, INDEX)
  weight_map = read_json(system, index_path).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f"{index_path} has no weight_map of tensor names to files")
  shards = {}
  for file in sorted(set(map(str, weight_map.values()))):
    if posixpath.basename(file) != file or not file.endswith(".safetensors"):
      raise ValueError(
        f"{index_path} names {file!r}, which is not a safetensors file in the same folder"
      )
    path = posixpath.join(folder, file)
    if file not in names:
      raise FileNotFoundError(f"{path}, named by {INDEX}, is missing: download it again")
    shards[file] = read_header(system, path)
  for name, file in weight_map.items():
    if name not in shards[file]:
      raise ValueError(f"{posixpath.join(folder, file)} lacks {name!r}, which {INDEX} says it has")
  return {name: shards[file][name] for name, file in weight_map.items()}


def read_header(system: fsspec.AbstractFileSystem, path: str) -> dict[str, Tensor]:
  """Reads the tensors of one safetensors file; ValueError if the header does not match the file."""
  size = system.size(path)

  def require(condition: bool, what: str) -> None:
    if not condition:
      raise ValueError(
        f"{path} is not a complete safetensors file: {what}; download or write it again"
      )

  require(size >= 8, f"it has {size} bytes, the length of its header alone takes 8")
  (length,) = struct.unpack("<Q", system.cat_file(path, start=0, end=8))
  require(
    length <= min(size - 8, _MAX_HEADER),
    f"its header should have {length} bytes, the file has {size}",
  )
  try:
    header = json.loads(
      system.cat_file(path, start=8, end=8 + length), object_pairs_hook=_make_unique_dict
    )
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(entry) for name, entry in header.items()}
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
    require(False, f"its header cannot be read ({type(error).__name__}: {error})")
  free = 0  # the first byte that belongs to no tensor
  for name, (dtype, shape, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
    require(
      begin == free and begin <= end,
      f"tensor {name!r} should be at {begin}:{end}, the previous one ends at {free}",
    )
    free = end
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else end - begin
    require(
      end - begin == nbytes,
      f"tensor {name!r}, {dtype} of shape {shape}, takes {nbytes} bytes, not {end - begin}",
    )
  require(
    size == 8 + length + free,
    f"its tensors take {free} bytes, the file has {size - 8 - length} for them",
  )
  return {
    name: Tensor(name, dtype, shape, 8 + length + begin, system, path)
    for name, (dtype, shape, begin, _) in entries.items()
  }


def _parse_entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
  """Parses a tensor's dtype, shape, first byte and end, relative to the end of the header."""
  dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
  is_natural = lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= 0
  if not isinstance(dtype, str) or not all(map(is_natural, [*shape, begin, end])):
    raise ValueError(f"an entry is {entry!r}")
  return dtype, tuple(shape), begin, end


def _make_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Makes a dict; raises ValueError for a repeated name."""
  entries = dict(pairs)
  if len(entries) != len(pairs):
    raise ValueError("a name is repeated")
  return entries


def read_json(system: fsspec.AbstractFileSystem, path: str) -> dict[str, Any]:
  """Reads the object in a JSON file; ValueError if the file is not a JSON object."""
  try:
    value = json.loads(system.cat_file(path))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} contains a {type(value).__name__}, not a JSON object")
  return value


# --- writing --------------------------------------------------------------------------------------


def write_checkpoint(
  system: fsspec.AbstractFileSystem,
  folder: str,
  shapes: Mapping[str, tuple[int, ...]],
  dtype: np.dtype,
  blocks: Iterable[np.ndarray],
  *,
  max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
  """Writes model.safetensors, or shards and their index, with one block in memory at a time.

  Args:
    system: file system of the folder.
    folder: an existing folder.
    shapes: shapes of the tensors, in the order in which they are written.
    dtype: dtype of all tensors.
    blocks: the tensors' rows in that order, in pieces of any size within a tensor.
    max_shard_bytes: limit on the size of a shard; a larger tensor gets a separate shard.
  """
  sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
  shards: list[dict[str, tuple[int, ...]]] = [{}]
  room = max_shard_bytes
  for name, shape in shapes.items():
    if shards[-1] and sizes[name] > room:
      shards.append({})
      room = max_shard_bytes
    shards[-1][name] = shape
    room -= sizes[name]
  count = len(shards)
  files = (
    [SINGLE]
    if count == 1
    else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
  )
  remaining = iter(blocks)
  for file, shard in zip(files, shards, strict=True):
    write_file(system, posixpath.join(folder, file), shard, dtype, remaining)
  if count > 1:
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    write_bytes(system, posixpath.join(folder, INDEX), json.dumps(index, indent=2).encode())


def write_file(
  system: fsspec.AbstractFileSystem,
  path: str,
  shapes: Mapping[str, tuple[int, ...]],
  dtype: np.dtype,
  blocks: Iterator[np.ndarray],
) -> None:
  """Writes one safetensors file; consumes the blocks of its tensors."""
  sizes = [math.prod(shape) * dtype.itemsize for shape in shapes.values()]
  ends = list(itertools.accumulate(sizes))
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
  for (name, shape), size, end in zip(shapes.items(), sizes, ends, strict=True):
    header[name] = dict(dtype=_NAMES[dtype], shape=list(shape), data_offsets=[end - size, end])
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  with _open_for_writing(system, path) as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for name, size in zip(shapes, sizes, strict=True):
      while size > 0:
        block = next(blocks)
        assert block.dtype == dtype and block.nbytes <= size, name
        file.write(np.ascontiguousarray(block).view(np.uint8).data)
        size -= block.nbytes


def write_bytes(system: fsspec.AbstractFileSystem, path: str, content: bytes) -> None:
  """Writes a small file."""
  with _open_for_writing(system, path) as file:
    file.write(content)


@contextlib.contextmanager
def _open_for_writing(system: fsspec.AbstractFileSystem, path: str):
  """Opens a file for writing; a local file is synced to disk at the end."""
  local = isinstance(system, LocalFileSystem)
  with report_full_disk(pathlib.Path(path)), system.open(path, "wb") as file:
    yield file
    if local:
      file.flush()
      os.fsync(file.fileno())


@contextlib.contextmanager
def new_directory(
  directory: str | os.PathLike[str],
) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
  """Yields a file system and a folder to fill; a local `directory` appears when it is complete.

  Object stores can neither rename nor lock: write the file that marks the directory as complete
  last.

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
  with _lock_and_empty(temporary, directory):
    try:
      yield system, str(temporary)
      (temporary / _LOCK).unlink()
      sync_folder(temporary)
      temporary.rename(target)
      sync_folder(target.parent)
    except BaseException:
      shutil.rmtree(temporary, ignore_errors=True)
      raise


@contextlib.contextmanager
def _lock_and_empty(temporary: pathlib.Path, directory: str | os.PathLike[str]) -> Iterator[None]:
  """Locks and empties the folder that becomes `directory`.

  Raises:
    FileExistsError: another process is writing it.
  """
  path = temporary / _LOCK
  with contextlib.ExitStack() as stack:
    try:
      file = stack.enter_context(open_own(path, "a"))
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        raise FileNotFoundError  # the owner of the lock has finished or failed meanwhile
    except (BlockingIOError, FileNotFoundError):
      raise FileExistsError(
        f"{directory} is being written by another process: wait for it, or choose another directory"
      ) from None
    for remnant in temporary.iterdir():  # of a process that was killed
      if remnant != path:
        shutil.rmtree(remnant) if remnant.is_dir() else remnant.unlink()
    yield


def check_vacant(directory: str | os.PathLike[str]) -> None:
  """Raises FileExistsError unless `directory` is absent or empty."""
  system, path = locate(directory)
  if system.exists(path) and (not system.isdir(path) or system.ls(path, detail=False)):
    raise FileExistsError(
      f"{directory} is not empty; a checkpoint is written into a new directory: choose another, or"
      " remove this one"
    )
