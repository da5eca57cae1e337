"""The exact Gram matrix of the output head's per-rollout gradients, without a [B, D·V] array.

Rollout i's gradient with respect to the head's kernel is g_i = Σ_t h[i,t] ⊗ d[i,t], where d is the
derivative of −log π[y] with respect to the head's product. The vocabulary is processed in blocks:
for each block, g of all rollouts restricted to the block is formed, and its B×B inner products are
added to the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rlvr_jax.geometry.base import GramContext, GramFn
from rlvr_jax.ops.checks import check_integer
from rlvr_jax.ops.logprobs import head_logits, through_head
from rlvr_jax.ops.spectral import EXACT
from rlvr_jax.types import Array, Forward, Head, Mean, Metrics, Params, Sum, TrainBatch

_LANES = 128  # columns that an accelerator multiplies at once
_BATCH_AXES = ("data", "fsdp")
# The kernel is split along `tensor`: with that axis first, columns stay within their tensor part.
_COLUMN_AXES = ("tensor", "data")
_VOCABULARY_AXES = (*_COLUMN_AXES, "fsdp")


class _Rollouts(NamedTuple):
  hidden: Array  # [..., T, D], zero where masked
  log_normalizers: Array  # f32[..., T]
  tokens: Array  # i32[..., T]
  mask: Array  # [..., T]


class _Columns(NamedTuple):
  """Columns of the output head that one device processes."""

  head: Callable[[], Head]  # its kernel has only these columns
  first: Array | int  # the vocabulary index of the first of them
  vocabulary: int  # V; columns at or past it are padding


def streaming(*, block_elements: int = 2**22, gather_chunks: int = 1) -> GramFn:
  """Exact output-head Gram matrix at the cost of 2 + B/T products of the size of the head's.

  One product recomputes a block's logits, whose normalizer is known, one forms the block of g, and
  B/T are the inner products. All accumulate in float32 (float64 for float64 models); operands,
  including g, are in the model's compute dtype.

  On a mesh the hidden states are gathered over the data axes in the compute dtype, the vocabulary
  is split over all devices, and the [B, B] results are summed over devices; see `bytes_moved`.

  Args:
    block_elements: numbers in the largest array of a block, [B, v, D] or [B, T, v]; it sets the
      block's width v, of 128 columns at least.
    gather_chunks: C > 1 splits each device's rollouts into C chunks and processes pairs of chunks,
      for when [B, T, D] does not fit on a device. The first two products are then done C times.
  Raises:
    ValueError: an argument is below 1; when called, C does not divide a device's rollouts.
  Source: methods of "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How
    to Make Them Matter" (arXiv:2606.05800), §3, without its [B, D·V] matrix.
  """
  # Over 60 lines: what a device does closes over how the head is split.
  check_integer("streaming", "block_elements", block_elements, low=1)
  check_integer("streaming", "gather_chunks", gather_chunks, low=1)

  def gram(
    trained: Params,
    frozen: Params,
    batch: TrainBatch,
    forward: Forward | None,
    context: GramContext,
  ) -> Array:
    assert forward is not None
    kept = batch.mask > 0
    clean = jnp.where(kept[..., None], forward.hidden, jnp.zeros((), forward.hidden.dtype))
    rollouts = _Rollouts(clean, forward.log_normalizers, batch.tokens, kept)
    params = context.model.combine(trained, frozen)
    head = context.model.head(params)
    vocabulary = head.kernel.shape[1]

    def sum_over_blocks(chunks, columns):
      return _sum_over_blocks(chunks, columns, context.temperature, block_elements)

    if context.mesh is None or context.mesh.size == 1:
      columns = _Columns(lambda: context.model.head(params), 0, vocabulary)
      return _over_chunks(rollouts, columns, sum_over_blocks, gather_chunks, 1, lambda x: x)

    devices = context.mesh.size
    shards = int(np.prod([context.mesh.shape[axis] for axis in _BATCH_AXES]))
    kernel = head.kernel.astype(clean.dtype)
    kernel = jnp.pad(kernel, [(0, 0), (0, -vocabulary % devices)])
    rows_split = kernel.shape[0] % context.mesh.shape["fsdp"] == 0

    def on_device(rollouts, kernel):
      if rows_split:  # for fewer columns, all of their rows
        kernel = jax.lax.all_to_all(kernel, "fsdp", split_axis=1, concat_axis=0, tiled=True)
      first = jax.lax.axis_index(_VOCABULARY_AXES) * kernel.shape[1]
      columns = _Columns(lambda: head._replace(kernel=kernel), first, vocabulary)
      gather = lambda x: jax.lax.all_gather(x, _BATCH_AXES, tiled=True)
      partial = _over_chunks(rollouts, columns, sum_over_blocks, gather_chunks, shards, gather)
      return jax.lax.psum(partial, _VOCABULARY_AXES)

    where = ("fsdp", _COLUMN_AXES) if rows_split else (None, _VOCABULARY_AXES)
    return jax.shard_map(
      on_device,
      mesh=context.mesh,
      in_specs=(PartitionSpec(_BATCH_AXES), PartitionSpec(*where)),
      out_specs=PartitionSpec(),
      check_vma=False,  # a loop that starts from zeros on every device counts as replicated
    )(rollouts, kernel)

  def cost(hidden: Array, kernel: Array, context: GramContext) -> Metrics:
    P, G, T, _ = hidden.shape
    moved = bytes_moved(hidden, kernel, context.mesh, gather_chunks=gather_chunks)
    products, one = jnp.float32(2 * gather_chunks + P * G / T), jnp.float32(1)
    return {
      "gram/head_products": Mean(total=products, weight=one),
      "gram/megabytes_moved": Sum(jnp.float32(moved / 1e6)),
    }

  return GramFn(gram, cost=cost)


def bytes_moved(hidden: Any, kernel: Any, mesh: Any, *, gather_chunks: int = 1) -> int:
  """Bytes that each device receives in one streaming Gram matrix.

  These are hidden states, log-normalizers, tokens and masks of the other devices, C times for C
  chunks; the rows of the head's kernel on other devices along `fsdp`; and two rounds of a ring for
  the final sum.

  Args:
    hidden: shape [P, G, T, D] and dtype of the final hidden states of the full batch.
    kernel: shape [D, V] of the head's kernel, split over (fsdp, tensor).
    mesh: None or a mesh with axes (data, fsdp, tensor).
    gather_chunks: as given to `streaming`.
  """
  if mesh is None or mesh.size == 1:
    return 0
  P, G, T, D = hidden.shape
  itemsize = jnp.dtype(hidden.dtype).itemsize
  accumulator = jnp.promote_types(hidden.dtype, jnp.float32).itemsize
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  of_position = D * itemsize + accumulator + 4 + 1  # hidden, log-normalizer, token, mask
  gathered = gather_chunks * P * G * T * of_position * (shards - 1) // shards
  columns = -(-kernel.shape[1] // mesh.size)
  rows = D * (mesh.shape["fsdp"] - 1) // mesh.shape["fsdp"]
  summed = 2 * (P * G) ** 2 * accumulator * (mesh.size - 1) // mesh.size
  return gathered + columns * rows * itemsize + summed


def _over_chunks(
  rollouts: _Rollouts,
  columns: _Columns,
  sum_over_blocks: Callable[[tuple[_Rollouts, ...], _Columns], Array],
  num_chunks: int,
  shards: int,
  gather: Callable[[Array], Array],
) -> Array:
  """Sums over these columns for all pairs of `num_chunks` chunks of rollouts, [B, B].

  Args:
    rollouts: this device's, [P', G, ...].
    gather: one device's part [n, ...] → that of all `shards` devices, [shards·n, ...].
  """
  local = rollouts.tokens.shape[0] * rollouts.tokens.shape[1]
  if local % num_chunks:
    raise ValueError(
      f"streaming: gather_chunks = {num_chunks} does not divide the {local} rollouts of a device;"
      " set it (config.gram = 'streaming(gather_chunks=…)') to a divisor"
    )
  cut = jax.tree.map(lambda x: x.reshape(num_chunks, -1, *x.shape[2:]), rollouts)
  load = lambda chunk: jax.tree.map(lambda x: gather(x[chunk]), cut)
  within = jax.lax.map(lambda i: sum_over_blocks((load(i),), columns), jnp.arange(num_chunks))
  n = within.shape[-1]
  gram = jnp.zeros((num_chunks, num_chunks, n, n), within.dtype)
  gram = gram.at[np.diag_indices(num_chunks)].set(within)
  if num_chunks > 1:
    i, j = np.triu_indices(num_chunks, 1)
    between = lambda pair: sum_over_blocks((load(pair[0]), load(pair[1])), columns)
    across = jax.lax.map(between, (jnp.asarray(i), jnp.asarray(j)))
    gram = gram.at[i, j].set(across).at[j, i].set(across.mT)
  # A chunk has a part of every device's rollouts: [C, C, shards·n, shards·n] → [B, B].
  gram = gram.reshape(num_chunks, num_chunks, shards, -1, shards, n // shards)
  gram = gram.transpose(2, 0, 3, 4, 1, 5)
  return gram.reshape(shards * local, shards * local)


def _sum_over_blocks(
  chunks: tuple[_Rollouts, ...], columns: _Columns, temperature: float, block_elements: int
) -> Array:
  """Inner products of one chunk's rollouts [n, ...] with its own or another chunk's, [n, n]."""
  n, T, D = chunks[0].hidden.shape
  num_columns = columns.head().kernel.shape[1]
  width = min(_block_width(len(chunks) * n * max(D, T), block_elements), num_columns)

  def block(start, width):
    head = columns.head()  # inside the loop, a tied head transposes the block, not the kernel
    part = jax.lax.dynamic_slice_in_dim(head.kernel, start, width, axis=1)
    head = head._replace(kernel=part)
    indices = columns.first + start + jnp.arange(width)
    g = [_gradients(chunk, head, indices, columns.vocabulary, temperature) for chunk in chunks]
    dtype = jnp.promote_types(g[0].dtype, jnp.float32)
    return jnp.einsum("ivd,jvd->ij", g[0], g[-1], precision=EXACT, preferred_element_type=dtype)

  num_blocks, rest = divmod(num_columns, width)
  zeros = jnp.zeros((n, n), jnp.promote_types(chunks[0].hidden.dtype, jnp.float32))
  add = lambda total, start: (total + block(start, width), None)
  total, _ = jax.lax.scan(add, zeros, jnp.arange(num_blocks) * width)
  return total + block(num_blocks * width, rest) if rest else total


def _block_width(elements_per_column: int, block_elements: int) -> int:
  return max(block_elements // elements_per_column // _LANES, 1) * _LANES


def _gradients(
  rollouts: _Rollouts, head: Head, indices: Array, vocabulary: int, temperature: float
) -> Array:
  """Σ_t h[i,t] ⊗ d[i,t] for the columns `indices` of the vocabulary, [n, v, D].

  d = scale/τ · (1 − (z/c)²) · (softmax(z/τ) − onehot(y)) for logits z, soft cap c, temperature τ.
  """
  hidden = rollouts.hidden
  logits = head_logits(hidden, head)
  d = jnp.exp(logits / temperature - rollouts.log_normalizers[..., None])
  d = through_head(d - (indices == rollouts.tokens[..., None]), logits, head, temperature)
  d = jnp.where(rollouts.mask[..., None] & (indices < vocabulary), d, 0.0)
  d = d.astype(hidden.dtype)
  g = jnp.einsum("itv,itd->ivd", d, hidden, precision=EXACT, preferred_element_type=logits.dtype)
  return g.astype(hidden.dtype)
