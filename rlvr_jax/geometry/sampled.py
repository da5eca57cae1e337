"""The Gram matrix of the output head's gradients without the softmax term (feature "sampled").

Rollout i's gradient is g_i = Σ_t h[i,t] ⊗ d[i,t] for hidden states h and derivatives d of −log π[y]
with respect to the head's product h·W. Here the softmax term of d is omitted. y = y[i,t] is the
sampled token, z_y its logit, W_y its column of the head's kernel W, m the loss mask, and τ the
temperature. With ĥ = m·h·∂(z_y/τ)/∂(h·W_y),

    K_ij = Σ_{t,s} [y_it = y_js] ĥ_it · ĥ_js = Σ_v u_iv · u_jv,    u_iv = Σ_{t: y_it = v} ĥ_it.

The weighted hidden states ĥ are sorted by the pair (token v, rollout i), and all ĥ of a pair are
summed to one row u_iv. A token v has at most B rows. So with tiles of B rows or more, a tile needs
only the products with itself and with the next tile.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlvr_jax.geometry.base import GramContext
from rlvr_jax.geometry.by_rollout import Places, find_places
from rlvr_jax.ops.logprobs import product_gradient
from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array, Forward, Head, TrainBatch

_LANES = 128  # columns that an accelerator multiplies at once
_BATCH_AXES = ("data", "fsdp")


class _Pairs(NamedTuple):
  """The sorted pairs (token v, rollout i) of a batch's n positions, with room for N pairs."""

  order: Array  # i32[n], positions sorted by pair
  weights: Array  # f32[n], in this order, factor of a position's hidden state; 0 if not in the loss
  pairs: Array  # i32[n], in this order, index of a position's pair; N if not in the loss
  tokens: Array  # i32[N], v of a pair; −1 after the last pair
  rollouts: Array  # i32[N], i of a pair; −1 after the last pair
  number: Array  # i32[], number of pairs


class Sizes(NamedTuple):
  """Sizes of the computation of one Gram matrix, from shapes alone."""

  tile: int  # pairs per tile
  tiles: int  # the largest possible number of tiles
  width: int  # columns of the hidden states that are added up at once


def choose_sizes(
  rollouts: int, hidden: Any, vocabulary: int, block_elements: int, devices: int
) -> Sizes:
  """Chooses sizes for hidden states [M, R, L, D] whose dimension D is split over devices."""
  tile = max(rollouts, _LANES)
  tiles = -(-min(math.prod(hidden.shape[:-1]), rollouts * vocabulary) // tile)
  local_width = -(-hidden.shape[-1] // devices)
  width = max(block_elements // (tiles * tile) // _LANES, 1) * _LANES
  return Sizes(tile, tiles, min(width, local_width))


def sampled_gram(
  batch: TrainBatch, forward: Forward, head: Head, context: GramContext, block_elements: int
) -> Array:
  """The Gram matrix f32[B, B] of the feature "sampled".

  On a mesh each device has a slice of the hidden dimension, for all positions.

  Args:
    forward: results of the forward pass; a head with a soft cap needs `logprobs`.
    block_elements: as for `streaming`.
  """
  mesh = context.mesh if context.mesh is not None and context.mesh.size > 1 else None
  devices, B = 1 if mesh is None else mesh.size, batch.rewards.size
  sizes = choose_sizes(B, forward.hidden, head.kernel.shape[1], block_elements, devices)
  size = sizes.tile * sizes.tiles
  pairs = _find_pairs(find_places(batch), forward, head, context.temperature, size)
  count = sizes.tiles if batch.packed is None else -(-pairs.number // sizes.tile)
  sums = functools.partial(_sum_over_pairs, num_rollouts=B, sizes=sizes)
  if mesh is None:
    total = sums(forward.hidden, pairs, count)
  else:
    total = _on_mesh(sums, forward.hidden, pairs, count, mesh)
  return total + total.T  # makes it exactly symmetric


def head_products(
  batch: TrainBatch, hidden: Any, kernel: Any, mesh: Any, block_elements: int
) -> Any:
  """The cost of one Gram matrix, as a multiple of the product of hidden states and head kernel.

  The cost is an upper bound: it counts the largest possible number of pairs (token, rollout).
  """
  (D, V), B = kernel.shape, batch.rewards.size
  used = 1 if batch.packed is None else batch.packed.num_micro_batches
  places = used * math.prod(hidden.shape[1:-1])
  devices = 1 if mesh is None else mesh.size
  tile, tiles, width = choose_sizes(B, hidden, V, block_elements, devices)
  local_width = -(-D // devices)
  blocks = devices * -(-local_width // width)
  # The cost of a pair's inner products, and of adding them to the Gram matrix.
  per_pair = 2 * tile * D + blocks * B * (2 * tile + B)
  return tiles * tile * (per_pair / (D * V)) / places  # divided early: it may exceed int32


def bytes_moved(hidden: Any, mesh: Any, *, rollouts: int) -> float:
  """Bytes that each device receives for one Gram matrix.

  A device receives its columns of the other devices' hidden states [M, R, L, D], and the data of
  the final sum. This sum is a ring all-reduce of two rounds. Tokens and masks are small in
  comparison.
  """
  if mesh is None or mesh.size == 1:
    return 0.0
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  *places, D = hidden.shape
  local_bytes = math.prod(places) * -(-D // mesh.size) * jnp.dtype(hidden.dtype).itemsize
  accumulator = jnp.promote_types(hidden.dtype, jnp.float32).itemsize
  sum_bytes = 2 * rollouts**2 * accumulator * (mesh.size - 1) // mesh.size
  return float(local_bytes * (shards - 1) // shards + sum_bytes)


def _find_pairs(
  places: Places, forward: Forward, head: Head, temperature: float, size: int
) -> _Pairs:
  """Sorts the positions of a batch by pair; `size` is N."""
  in_loss, targets = places.in_loss.ravel(), places.targets.ravel()
  spans, absent = places.spans, head.kernel.shape[1]
  nth = jnp.searchsorted(spans.firsts, jnp.arange(in_loss.size), side="right") - 1
  rollouts, tokens = spans.slots[nth], jnp.where(in_loss, targets, absent)
  order = jnp.lexsort((rollouts, tokens))
  rollouts, tokens = rollouts[order], tokens[order]
  differs = lambda x: x[1:] != x[:-1]
  new = jnp.concatenate([jnp.zeros(1, bool), differs(tokens) | differs(rollouts)])
  pairs = jnp.where(tokens < absent, jnp.cumsum(new), size)
  by_pair = lambda x: jnp.full(size, -1).at[pairs].set(x, mode="drop")
  weights = jnp.where(in_loss, _weights(forward, head, temperature), 0.0)[order]
  number = jnp.max(jnp.where(tokens < absent, pairs, -1)) + 1
  return _Pairs(order, weights, pairs, by_pair(tokens), by_pair(rollouts), number)


def _weights(forward: Forward, head: Head, temperature: float) -> Array:
  """The derivative of z_y/τ with respect to the head's product, f32[n]."""
  ones = jnp.ones(forward.log_normalizers.size, forward.log_normalizers.dtype)
  if head.soft_cap is None:
    return product_gradient(ones, ones, head, temperature)
  assert forward.logprobs is not None
  logits = temperature * (forward.logprobs + forward.log_normalizers)
  return product_gradient(ones, logits.ravel(), head, temperature)


def _on_mesh(sums, hidden, pairs, count, mesh):
  """Reshards the hidden states from rows to columns, and adds up the devices' sums."""
  hidden = jnp.pad(hidden, [(0, 0)] * 3 + [(0, -hidden.shape[-1] % mesh.size)])

  def on_device(hidden, pairs, count):
    width = hidden.shape[-1] // mesh.shape["tensor"]
    first = jax.lax.axis_index("tensor") * width
    hidden = jax.lax.dynamic_slice_in_dim(hidden, first, width, axis=3)
    hidden = jax.lax.all_to_all(hidden, _BATCH_AXES, split_axis=3, concat_axis=1, tiled=True)
    return jax.lax.psum(sums(hidden, pairs, count), (*_BATCH_AXES, "tensor"))

  replicated = PartitionSpec()
  return jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(PartitionSpec(None, _BATCH_AXES), replicated, replicated),
    out_specs=replicated,
    check_vma=False,  # a loop that starts from zeros on every device counts as replicated
  )(hidden, pairs, count)


def _sum_over_pairs(
  hidden: Array, pairs: _Pairs, count: Array | int, *, num_rollouts: int, sizes: Sizes
) -> Array:
  """Half of the Gram matrix from the given columns of the hidden states, [B, B].

  The sum of the result and its transpose is the Gram matrix.

  Args:
    hidden: [M, R, L, d].
    count: number of tiles with a pair.
  """
  tile, tiles, width = sizes
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)
  hidden, ahead = hidden.reshape(-1, hidden.shape[-1]), (0, tile)  # one empty tile after the last
  tokens = jnp.pad(pairs.tokens, ahead, constant_values=-1)
  rollouts = jnp.pad(pairs.rollouts, ahead, constant_values=-1)
  # Products of a tile with itself occur in both orders, so each counts half.
  factors = jnp.where(jnp.arange(2 * tile) < tile, 0.5, 1.0)

  def block(start, width, total):
    part = jax.lax.dynamic_slice_in_dim(hidden, start, width, axis=1)[pairs.order]
    counts = pairs.weights[:, None] != 0
    part = jnp.where(counts, part.astype(dtype) * pairs.weights[:, None], 0.0)
    u = jax.ops.segment_sum(part, pairs.pairs, tile * tiles, indices_are_sorted=True)
    u = jnp.pad(u.astype(hidden.dtype), [ahead, (0, 0)])

    def add_tile(index, total):
      cut = lambda x, size: jax.lax.dynamic_slice_in_dim(x, index * tile, size)
      product = jnp.einsum(
        "md,nd->mn", cut(u, tile), cut(u, 2 * tile), precision=EXACT, preferred_element_type=dtype
      )
      same = cut(tokens, tile)[:, None] == cut(tokens, 2 * tile)
      product = jnp.where(same, product * factors.astype(dtype), 0.0)
      one_hot = jax.nn.one_hot(cut(rollouts, 2 * tile), num_rollouts, dtype=dtype)
      right = jnp.dot(product, one_hot, precision=EXACT)
      return total + jnp.dot(one_hot[:tile].T, right, precision=EXACT)

    return jax.lax.fori_loop(0, count, add_tile, total)

  blocks, rest = divmod(hidden.shape[1], width)
  total = jnp.zeros((num_rollouts, num_rollouts), dtype)
  total = jax.lax.fori_loop(0, blocks, lambda i, x: block(i * width, width, x), total)
  return block(blocks * width, rest, total) if rest else total
