"""Checkpoints in safetensors files: one file, or shards and an index from tensors to shards.

The safetensors library reads and checks the files. Tensors are read by rows from a memory-mapped
file; a file at a URL is first copied to a temporary file of this machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rlvr_jax.storage.folders import (
  list_files,
  locate,
  open_to_read,
  open_to_write,
  read_json,
  write_bytes,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 2 * 2**30
DTYPES: dict[str, np.dtype] = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A matrix or vector in an open file; its data is not in memory."""

  name: str
  dtype_name: str  # the dtype's name in the file, such as BF16
  shape: tuple[int, ...]
  path: str  # the file's path, for messages
  view: Any = dataclasses.field(repr=False)  # the library's slice, which reads when indexed
  before: tuple[int, ...] = ()  # indices into the leading axes of `view`; `shape` lacks them
  first: int = 0  # row of `view` that is row 0 of the tensor
  # i64[rows]: the tensor has only these rows, counted from `first`, in this order; None: all.
  selected: npt.NDArray[np.int64] | None = dataclasses.field(default=None, compare=False)

  @property
  def dtype(self) -> np.dtype:
    """The NumPy dtype; raises ValueError unless it is a plain floating-point type."""
    if self.dtype_name not in DTYPES:
      raise ValueError(
        f"{self.path}: tensor {self.name!r} has dtype {self.dtype_name}, but only"
        f" {', '.join(DTYPES)} can be read; convert a quantized checkpoint to one of these first"
      )
    return DTYPES[self.dtype_name]

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  def rows(self, start: int, stop: int) -> np.ndarray:
    """Reads rows [start, stop) of the first axis; raises ValueError as `dtype` does.

    Rows between the `selected` rows are also read, and then dropped.
    """
    dtype = self.dtype
    if self.selected is None:
      rows = self.view[(*self.before, slice(self.first + start, self.first + stop))]
      return np.asarray(rows, dtype).reshape(-1, *self.shape[1:])
    rows = self.selected[start:stop]
    if not len(rows):
      return np.empty((0, *self.shape[1:]), dtype)
    least = int(np.min(rows))
    whole = dataclasses.replace(self, selected=None)
    return whole.rows(least, int(np.max(rows)) + 1)[rows - least]


# --- reading --------------------------------------------------------------------------------------


def open_checkpoint(directory: str | os.PathLike[str]) -> dict[str, Tensor]:
  """Opens the tensors of a checkpoint directory, by name; reads and checks only the headers.

  Args:
    directory: contains model.safetensors, or model.safetensors.index.json and its shards; local or
      a URL such as gs://bucket/folder, whose files are copied to the folder of temporary files.
  Raises:
    FileNotFoundError: the directory does not exist, it has no weights, or a shard is missing.
    OSError: the directory cannot be reached, or there is no space for a copy.
    ValueError: the weights are pickled, or a file is truncated or does not match its header.
  """
  system, folder = locate(directory)
  names = list_files(directory)
  if SINGLE in names:
    return open_file(system, posixpath.join(folder, SINGLE))
  if INDEX in names:
    return _open_shards(system, folder, names)
  pickled = [name for name in names if name.endswith(_PICKLED)]
  if pickled:
    raise ValueError(
      f"{directory} has only pickled weights ({', '.join(pickled[:3])}): unpickling runs code from"
      " the file, so they are not read. Convert the weights to safetensors with save_pretrained of"
      " transformers, and load the converted checkpoint"
    )
  raise FileNotFoundError(
    f"{directory} has neither {SINGLE} nor {INDEX}; it has {names[:8] or 'nothing'}"
  )


def tensor_names(directory: str | os.PathLike[str]) -> list[str]:
  """The names of the tensors of a checkpoint directory, from its index alone if it has one.

  For arguments and errors see `open_checkpoint`.
  """
  system, folder = locate(directory)
  names = list_files(directory)
  if SINGLE not in names and INDEX in names:
    return list(_read_index(system, posixpath.join(folder, INDEX)))
  return list(open_checkpoint(directory))


def _read_index(system: fsspec.AbstractFileSystem, path: str) -> dict[str, str]:
  """Tensor name → file, as an index file lists them."""
  weight_map = read_json(system, path).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f"{path} has no weight_map of tensor names to files")
  return weight_map


def _open_shards(
  system: fsspec.AbstractFileSystem, folder: str, names: Collection[str]
) -> dict[str, Tensor]:
  """Opens the tensors that the index of a folder lists."""
  index_path = posixpath.join(folder, INDEX)
  weight_map = _read_index(system, index_path)
  shards = {}
  for file in sorted(set(map(str, weight_map.values()))):
    if posixpath.basename(file) != file or not file.endswith(".safetensors"):
      raise ValueError(
        f"{index_path} names {file!r}, which is not a safetensors file in the same folder"
      )
    path = posixpath.join(folder, file)
    if file not in names:
      raise FileNotFoundError(f"{path}, named by {INDEX}, is missing: download it again")
    shards[file] = open_file(system, path)
  for name, file in weight_map.items():
    if name not in shards[file]:
      raise ValueError(f"{posixpath.join(folder, file)} lacks {name!r}, which {INDEX} says it has")
  return {name: shards[file][name] for name, file in weight_map.items()}


def open_file(system: fsspec.AbstractFileSystem, path: str) -> dict[str, Tensor]:
  """Opens the tensors of a safetensors file; raises ValueError if header and file do not match."""
  try:
    # The memory map stays valid after the copy's name is deleted.
    with open_to_read(system, path) as local, safe_open(local, framework="numpy") as file:
      views = {name: file.get_slice(name) for name in file.keys()}
  except SafetensorError as error:
    raise ValueError(
      f"{path} is not a complete safetensors file: {error}; download or write it again"
    ) from error
  return {
    name: Tensor(name, view.get_dtype(), tuple(view.get_shape()), path, view)
    for name, view in views.items()
  }


# --- writing --------------------------------------------------------------------------------------


def write_checkpoint(
  system: fsspec.AbstractFileSystem,
  folder: str,
  shapes: Mapping[str, tuple[int, ...]],
  dtype: np.dtype,
  tensors: Iterable[np.ndarray],
  *,
  max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
  """Writes model.safetensors, or shards and their index, with one shard in memory at a time.

  Args:
    system: file system of the folder.
    folder: an existing folder.
    shapes: shapes of the tensors by name.
    dtype: dtype of all tensors.
    tensors: the tensors, in the order of `shapes`.
    max_shard_bytes: limit on the size of a shard; a larger tensor gets a separate shard.
  """
  sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
  shards = [*_shards(sizes, max_shard_bytes)]
  count = len(shards)
  files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
  remaining = iter(tensors)
  for file, names in zip(files, shards, strict=True):
    path = posixpath.join(folder, file if count > 1 else SINGLE)
    write_file(system, path, dict(zip(names, remaining, strict=False)))
  if count > 1:
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    write_bytes(system, posixpath.join(folder, INDEX), json.dumps(index, indent=2).encode())


def _shards(sizes: Mapping[str, int], max_shard_bytes: int) -> Iterator[list[str]]:
  """Yields the names of the tensors of each shard, in order."""
  shard: list[str] = []
  for name, size in sizes.items():
    if shard and sum(sizes[other] for other in shard) + size > max_shard_bytes:
      yield shard
      shard = []
    shard.append(name)
  yield shard


def write_file(
  system: fsspec.AbstractFileSystem, path: str, tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes one safetensors file."""
  contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
  with open_to_write(system, path) as local:
    with open(local, "ab"):
      mode = os.stat(local).st_mode  # by the umask; the library would admit only the owner
    save_file(contiguous, local, {"format": "pt"})  # required by transformers
    os.chmod(local, mode)
