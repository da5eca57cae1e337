"""Loads and saves Hugging Face checkpoint directories, tensor by tensor, without remote code.

The weights are in safetensors files. `huggingface_config` reads the network's settings, and
`huggingface_tensors` maps tensors to parameters.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from rlvr_jax.models import safetensors
from rlvr_jax.models.huggingface_config import CONFIG, family_settings, read_config
from rlvr_jax.models.huggingface_export import published_config
from rlvr_jax.models.huggingface_tensors import (
  EMBEDDING,
  HEAD,
  Leaf,
  Part,
  Published,
  find_leaves,
  find_published,
  leaf_value,
  published_name,
  published_shape,
  rename_tensors,
  split_parts,
)
from rlvr_jax.models.safetensors import Tensor
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.ops.finite import check_finite
from rlvr_jax.storage.folders import (
  check_vacant,
  list_files,
  locate,
  new_directory,
  write_bytes,
)
from rlvr_jax.types import Array, Params

BLOCK_BYTES = 32 * 2**20  # bytes of a tensor that are on the host at a time
COPIED = (  # copied from the source of an export
  "generation_config.json",
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "chat_template.json",
)


# --- loading --------------------------------------------------------------------------------------


def load_params(
  directory: str | os.PathLike[str],
  abstract_params: Params,
  config: TransformerConfig,
  *,
  block_bytes: int = BLOCK_BYTES,
) -> Params:
  """Loads a checkpoint directory's weights as sharded parameters.

  Every process reads only the parts that its devices need, and reads each part once. It sends
  blocks of a tensor's rows to the devices, which transpose, cast and insert these blocks. So
  the host needs memory for about one block. It needs memory for the parameters only if they are on
  its CPU.

  Args:
    directory: local or a URL such as gs://bucket/folder.
    abstract_params: nested dict of `jax.ShapeDtypeStruct`s with shardings.
    config: settings of the network, such as the result of `checkpoint_config`.
    block_bytes: bytes of a tensor that are on the host at a time; one row if a row has more bytes.
  Raises:
    FileNotFoundError: there are no weights, or a shard is missing.
    ValueError: weights are pickled or quantized, a file is damaged, or tensors are missing, unknown
      or of another shape than the parameters; these errors come before weights are read. Or weights
      are NaN or infinite; this error comes after weights are read.
  """
  family = checkpoint_family(directory)
  leaves = find_leaves(abstract_params, config, family)
  tensors = split_parts(
    open_tensors(directory, abstract_params, config),
    find_published(abstract_params, config, family),
  )
  params = jax.tree.map(lambda _: None, abstract_params)
  for leaf in leaves:
    inner = functools.reduce(lambda tree, key: tree[key], leaf.path[:-1], params)
    abstract = leaf_value(abstract_params, leaf)
    inner[leaf.path[-1]] = _load_leaf(leaf, abstract, tensors, block_bytes)
  check_finite(str(directory), params)
  return params


def checkpoint_family(directory: str | os.PathLike[str]) -> str:
  """The family that a directory's config.json names; raises ValueError if it is unknown."""
  return family_settings(*read_config(directory))[0]


def open_tensors(
  directory: str | os.PathLike[str], abstract_params: Params, config: TransformerConfig
) -> dict[str, Tensor]:
  """Opens and checks the tensors of a checkpoint directory; returns usual name → tensor.

  `huggingface_tensors` defines usual names. No weights are read yet, except that a tied head is
  compared with the embedding if both were saved.

  Raises:
    FileNotFoundError, ValueError: the errors of `load_params` that come before weights are read.
  """
  tensors = rename_tensors(safetensors.open_checkpoint(directory), directory)
  published = find_published(abstract_params, config, checkpoint_family(directory))
  if HEAD not in published:
    _drop_tied_head(tensors, directory)
  _check_tensors(tensors, published, directory)
  return tensors


def _drop_tied_head(tensors: dict[str, Tensor], directory: Any) -> None:
  """Drops a tied head that was saved in addition to the embedding, or instead of it.

  Raises ValueError if head and embedding differ in any row, even in an added token's row.
  """
  if HEAD not in tensors:
    return
  head = tensors.pop(HEAD)
  embedding = tensors.setdefault(EMBEDDING, head)
  if (where := _first_difference(head, embedding)) is not None:
    raise ValueError(
      f"{directory}: {head.name!r} differs from {embedding.name!r} {where}, but {CONFIG} says that"
      f" the two are tied; if they are not, set tie_word_embeddings to false in {CONFIG}"
    )


def _first_difference(a: Tensor, b: Tensor) -> str | None:
  """Says where two matrices differ first, for a message; None if they are equal."""
  if a.shape != b.shape:
    return f"in shape, {a.shape} and {b.shape}"
  rows, width = a.shape
  block = max(1, BLOCK_BYTES // (width * a.dtype.itemsize))
  for start in range(0, rows, block):
    stop = min(start + block, rows)
    differs = np.any(a.rows(start, stop) != b.rows(start, stop), axis=1)
    if np.any(differs):
      return f"first in row {start + int(np.argmax(differs))} of {rows}"
  return None


def _check_tensors(
  tensors: Mapping[str, Tensor], published: Mapping[str, Published], directory: Any
) -> None:
  """Raises ValueError unless the names and shapes of the tensors are those of `published`.

  Also raises ValueError for a dtype that cannot be read. Reads no weights.
  """
  problems = []
  if missing := [name for name in published if name not in tensors]:
    untied = (
      f" (if it is tied to the embedding, set tie_word_embeddings to true in {CONFIG})"
      if HEAD in missing
      else ""
    )
    problems.append(f"{len(missing)} missing: {_first_names(missing)}{untied}")
  if unknown := [tensors[name].name for name in tensors if name not in published]:
    problems.append(f"{len(unknown)} unknown: {_first_names(unknown)}")
  for name, (shape, _) in published.items():
    if name in tensors and tensors[name].shape != shape:
      tensor = tensors[name]
      problems.append(
        f"{tensor.name!r} in {tensor.path} has shape {tensor.shape}, but the model needs {shape}"
      )
  if problems:
    raise ValueError(
      f"{directory}: the tensors do not match the model. {'; '.join(problems[:5])}. Check that"
      f" {CONFIG} belongs to this checkpoint"
    )
  for name in published:
    _ = tensors[name].dtype  # raises ValueError if the dtype cannot be read


def _first_names(names: list[str]) -> str:
  return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _load_leaf(
  leaf: Leaf, abstract: jax.ShapeDtypeStruct, tensors: Mapping[str, Tensor], block_bytes: int
) -> Array:
  """Loads one parameter with the shape, dtype and sharding of `abstract`."""
  shape, sharding = abstract.shape, abstract.sharding
  indices = sharding.addressable_devices_indices_map(shape)
  shards = {device: _bounds(index, shape) for device, index in indices.items()}
  local_bytes = len(shards) * math.prod(sharding.shard_shape(shape)) * abstract.dtype.itemsize
  # A small tensor is assembled on the host, so that no program is compiled for its shape and
  # device.
  on_host = local_bytes <= block_bytes
  buffers: dict[jax.Device, Any] = {}
  for device, bounds in shards.items():
    lengths = [stop - start for start, stop in bounds]
    zeros = functools.partial(np.zeros if on_host else jnp.zeros, lengths, abstract.dtype)
    buffers[device] = zeros() if on_host else zeros(device=device)
  for pieces in _pieces(leaf, shards, tensors, block_bytes):
    for device, (at, piece) in pieces.items():
      if on_host:
        _put_on_host(buffers[device], piece, at, leaf.transposed)
      else:
        piece, at = jax.device_put(piece, device), np.asarray(at, np.int32)
        buffers[device] = _put(buffers[device], piece, at, leaf.transposed)
    jax.block_until_ready([buffers[device] for device in pieces])  # frees the block's memory
  arrays = [jax.device_put(buffer, device) for device, buffer in buffers.items()]
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _pieces(
  leaf: Leaf,
  shards: Mapping[jax.Device, tuple[tuple[int, int], ...]],
  tensors: Mapping[str, Tensor],
  block_bytes: int,
) -> Iterator[dict[jax.Device, tuple[tuple[int, ...], np.ndarray]]]:
  """Yields for every block: device → (index in the device's shard at which a piece begins, piece).

  A piece is the part of the block that the device needs.
  """
  # Devices that need the same rows of a published tensor share one read.
  by_rows: dict[Any, list[jax.Device]] = {}
  for device, bounds in shards.items():
    stacked, (rows, *_) = leaf.published(bounds)
    by_rows.setdefault((stacked, rows), []).append(device)
  for (stacked, rows), devices in by_rows.items():
    for index in itertools.product(*(range(*bounds) for bounds in stacked)):
      for first, block in _blocks(tensors[str(leaf.names[index])], rows, block_bytes):
        pieces = {}
        for device in devices:
          _, (_, *columns) = leaf.published(shards[device])
          at = (first - rows[0], *(0 for _ in columns))
          at = at[::-1] if leaf.transposed else at
          at = (*(i - start for i, (start, _) in zip(index, stacked, strict=True)), *at)
          pieces[device] = at, block[:, slice(*columns[0])] if columns else block
        yield pieces


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _blocks(
  tensor: Tensor, rows: tuple[int, int], block_bytes: int
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields each block's first row and its rows.

  All blocks have one size, so that one compiled program can insert each of them.
  """
  first, last = rows
  size = _block_rows(tensor.shape, tensor.dtype, last - first, block_bytes)
  for start in range(first, last, size):
    start = min(start, last - size)
    yield start, tensor.rows(start, start + size)


def _block_rows(shape: tuple[int, ...], dtype: np.dtype, rows: int, block_bytes: int) -> int:
  """The number of rows in a block: as many as fit in `block_bytes`, at least one."""
  row_bytes = math.prod(shape[1:]) * dtype.itemsize
  return min(rows, max(1, block_bytes // row_bytes))


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(buffer: Array, block: Array, at: Array, transposed: bool) -> Array:
  block = _to_parameter_layout(block, buffer.ndim, transposed).astype(buffer.dtype)
  return jax.lax.dynamic_update_slice(buffer, block, tuple(at))


def _put_on_host(
  buffer: np.ndarray, block: np.ndarray, at: Iterable[int], transposed: bool
) -> None:
  block = _to_parameter_layout(block, buffer.ndim, transposed)
  buffer[tuple(slice(i, i + n) for i, n in zip(at, block.shape, strict=True))] = block


def _to_parameter_layout(block: Any, rank: int, transposed: bool) -> Any:
  """Converts rows of a published tensor to the layout of the parameter."""
  block = block.T if transposed else block
  return block.reshape((1,) * (rank - block.ndim) + block.shape)


# --- saving ---------------------------------------------------------------------------------------


def save_checkpoint(
  directory: str | os.PathLike[str],
  params: Params,
  config: TransformerConfig,
  *,
  dtype: str = "bfloat16",
  source: str | os.PathLike[str] | None = None,
  further_files: dict[str, bytes] | None = None,
  max_shard_bytes: int = safetensors.MAX_SHARD_BYTES,
  block_bytes: int = BLOCK_BYTES,
) -> None:
  """Writes a checkpoint directory that `transformers` loads.

  All processes must call this function; the first process writes. Only the tensors of one shard at
  a time are on the host. A local directory is written atomically; at a URL, config.json is written
  last.

  Args:
    directory: absent or empty; local or a URL such as gs://bucket/folder.
    params: nested dict of arrays, sharded or not.
    config: settings of the network.
    dtype: dtype of the written weights: bfloat16, float16 or float32.
    source: a checkpoint directory of the same family; its tokenizer, its generation_config.json and
      its further settings, such as the stop tokens, are copied.
    further_files: name → content, such as a tokenizer's files; these replace copied files.
    max_shard_bytes: limit on the size of a file.
    block_bytes: bytes of a tensor that are gathered at a time.
  Raises:
    FileExistsError: `directory` is not empty.
    ValueError: no family of `transformers` has these parameters or settings.
  """
  check_choice("save_checkpoint", "dtype", dtype, ("bfloat16", "float16", "float32"))
  check_vacant(directory)
  settings = published_config(config, dtype, source)
  family = settings["model_type"]
  published = find_published(params, config, family)
  places = {
    str(leaf.names[index]): (leaf, index)
    for leaf in find_leaves(params, config, family)
    for index in np.ndindex(leaf.names.shape)
  }
  file_dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)

  def fetch(part: Part) -> np.ndarray:
    leaf, index = places[part.name]
    return _fetch(leaf_value(params, leaf), leaf, index, file_dtype, block_bytes)

  tensors = (
    _join(tensor, map(fetch, tensor.parts)).reshape(published_shape(name, tensor.shape))
    for name, tensor in published.items()
  )
  if jax.process_index() == 0:
    with new_directory(directory) as (system, folder):
      safetensors.write_checkpoint(
        system,
        folder,
        {
          published_name(name, family): published_shape(name, tensor.shape)
          for name, tensor in published.items()
        },
        file_dtype,
        tensors,
        max_shard_bytes=max_shard_bytes,
      )
      text = json.dumps(settings, indent=2, allow_nan=False).encode()
      files = _read_copied_files(source) | (further_files or {}) | {CONFIG: text}
      for name, content in files.items():
        write_bytes(system, posixpath.join(folder, name), content)
  else:
    for _ in tensors:  # the other processes participate in gathering
      pass
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f"save_checkpoint {directory}")


def _join(tensor: Published, parts: Iterable[np.ndarray]) -> np.ndarray:
  """Assembles a published tensor from its parts."""
  arrays = list(parts)
  if all(part.rows is None for part in tensor.parts):
    return arrays[0]
  joined = np.empty(tensor.shape, arrays[0].dtype)
  for part, array in zip(tensor.parts, arrays, strict=True):
    joined[part.rows] = array
  return joined


def _fetch(
  value: Array, leaf: Leaf, index: tuple[int, ...], dtype: np.dtype, block_bytes: int
) -> np.ndarray:
  """Copies a published tensor to the host, in blocks of rows."""
  shape = leaf.published(value.shape)[1]
  size = _block_rows(shape, dtype, shape[0], block_bytes)
  replicated = None
  if isinstance(value, jax.Array) and isinstance(value.sharding, jax.sharding.NamedSharding):
    replicated = jax.sharding.NamedSharding(value.sharding.mesh, PartitionSpec())
  take = _make_take(leaf.transposed, dtype, replicated)
  tensor = np.empty(shape, dtype)
  for start in range(0, shape[0], size):
    first = min(start, shape[0] - size)
    tensor[first : first + size] = take(value, index, first, size).addressable_data(0)
  return tensor


@functools.cache
def _make_take(transposed: bool, dtype: np.dtype, replicated: Any):
  """Makes a program: (parameter, index of a tensor, first row, number of rows) → these rows."""

  @functools.partial(jax.jit, static_argnums=3, out_shardings=replicated)
  def take(value, index, first, size):
    for i in index:  # on the axes on which tensors are stacked
      value = jax.lax.dynamic_index_in_dim(value, i, keepdims=False)
    axis = value.ndim - 1 if transposed else 0
    block = jax.lax.dynamic_slice_in_dim(value, first, size, axis)
    return (block.T if transposed else block).astype(dtype)

  return take


def _read_copied_files(source: str | os.PathLike[str] | None) -> dict[str, bytes]:
  """Name → content of the small files of a checkpoint that an export copies."""
  if source is None:
    return {}
  origin, folder = locate(source)
  names = sorted(set(COPIED) & set(list_files(source)))
  return {name: origin.cat_file(posixpath.join(folder, name)) for name in names}
