"""The Gram matrix of the sampled tokens' part of the output head's gradients.

The softmax of g_i = Σ_t h[i,t] ⊗ d[i,t] is left out. With ĥ = m·h·∂(z_y/τ)/∂(h·W_y) and y = y[i,t],

    K_ij = Σ_{t,s} [y_it = y_js] ĥ_it · ĥ_js = Σ_v u_iv · u_jv,    u_iv = Σ_{t: y_it = v} ĥ_it.

The tokens are sorted by (v, i), and added up to at most one row u_iv for each pair. A token has at
most B rows, so that in tiles of B rows or more, each meets itself and the next alone.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlvr_jax.geometry.base import GramContext
from rlvr_jax.geometry.by_rollout import Places, places_of
from rlvr_jax.ops.logprobs import through_head
from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array, Forward, Head, TrainBatch

_LANES = 128  # columns that an accelerator multiplies at once
_BATCH_AXES = ("data", "fsdp")


class _Pairs(NamedTuple):
  """The pairs (token v, rollout i) of a batch, in order; n places, N ≥ the number of pairs."""

  order: Array  # i32[n], places by pair
  weights: Array  # f32[n], of a place's hidden state, in that order; 0 where it does not count
  pairs: Array  # i32[n], the pair of a place, in that order; N where it does not count
  tokens: Array  # i32[N], v of a pair; −1 behind the last
  rollouts: Array  # i32[N], i of a pair
  number: Array  # i32[], of pairs


class Sizes(NamedTuple):
  """Sizes of the computation of one Gram matrix, from shapes alone."""

  tile: int  # pairs
  tiles: int  # at most
  width: int  # of the hidden states that are added up at once


def sizes_of(
  rollouts: int, hidden: Any, vocabulary: int, block_elements: int, devices: int
) -> Sizes:
  """Sizes of tiles for hidden states [M, R, L, D] whose width is split over devices."""
  tile = max(rollouts, _LANES)
  tiles = -(-min(math.prod(hidden.shape[:-1]), rollouts * vocabulary) // tile)
  own = -(-hidden.shape[-1] // devices)
  width = max(block_elements // (tiles * tile) // _LANES, 1) * _LANES
  return Sizes(tile, tiles, min(width, own))


def sampled_gram(
  batch: TrainBatch, forward: Forward, head: Head, context: GramContext, block_elements: int
) -> Array:
  """f32[B, B]; on a mesh each device has a part of the width of all hidden states.

  Args:
    forward: its `logprobs` are read where the head has a soft cap.
    block_elements: as for `streaming`.
  """
  mesh = context.mesh if context.mesh is not None and context.mesh.size > 1 else None
  devices, B = 1 if mesh is None else mesh.size, batch.rewards.size
  sizes = sizes_of(B, forward.hidden, head.kernel.shape[1], block_elements, devices)
  pairs = _pairs_of(places_of(batch), forward, head, context.temperature, sizes.tile * sizes.tiles)
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
  """The cost in products of the size of the head's, at most: with as many pairs as there can be."""
  (D, V), B = kernel.shape, batch.rewards.size
  used = 1 if batch.packed is None else batch.packed.num_micro_batches
  places = used * math.prod(hidden.shape[1:-1])
  devices = 1 if mesh is None else mesh.size
  tile, tiles, width = sizes_of(B, hidden, V, block_elements, devices)
  own = -(-D // devices)
  blocks = devices * -(-own // width)
  of_tile = 2 * tile * D + blocks * B * (2 * tile + B)  # inner products, and to their places
  return tiles * tile * (of_tile / (D * V)) / places  # divided early: it may exceed int32


def bytes_moved(hidden: Any, mesh: Any, *, rollouts: int) -> float:
  """Bytes that each device receives in one of these Gram matrices.

  These are its part of the width of the hidden states on other devices, [M, R, L, D] in all, and
  two rounds of a ring for the final sum. Tokens and masks are small in comparison.
  """
  if mesh is None or mesh.size == 1:
    return 0.0
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  *places, D = hidden.shape
  own = math.prod(places) * -(-D // mesh.size) * jnp.dtype(hidden.dtype).itemsize
  accumulator = jnp.promote_types(hidden.dtype, jnp.float32).itemsize
  summed = 2 * rollouts**2 * accumulator * (mesh.size - 1) // mesh.size
  return float(own * (shards - 1) // shards + summed)


def _pairs_of(
  places: Places, forward: Forward, head: Head, temperature: float, size: int
) -> _Pairs:
  kept, targets = places.kept.ravel(), places.targets.ravel()
  spans, absent = places.spans, head.kernel.shape[1]
  nth = jnp.searchsorted(spans.firsts, jnp.arange(kept.size), side="right") - 1
  rollouts, tokens = spans.slots[nth], jnp.where(kept, targets, absent)
  order = jnp.lexsort((rollouts, tokens))
  rollouts, tokens = rollouts[order], tokens[order]
  differs = lambda x: x[1:] != x[:-1]
  new = jnp.concatenate([jnp.zeros(1, bool), differs(tokens) | differs(rollouts)])
  pairs = jnp.where(tokens < absent, jnp.cumsum(new), size)
  of_pair = lambda x: jnp.full(size, -1).at[pairs].set(x, mode="drop")
  weights = jnp.where(kept, _weights(forward, head, temperature), 0.0)[order]
  number = jnp.max(jnp.where(tokens < absent, pairs, -1)) + 1
  return _Pairs(order, weights, pairs, of_pair(tokens), of_pair(rollouts), number)


def _weights(forward: Forward, head: Head, temperature: float) -> Array:
  """f32[n], the derivative of z_y/τ with respect to the head's product."""
  ones = jnp.ones(forward.log_normalizers.size, forward.log_normalizers.dtype)
  if head.soft_cap is None:
    return through_head(ones, ones, head, temperature)
  assert forward.logprobs is not None
  logits = temperature * (forward.logprobs + forward.log_normalizers)
  return through_head(ones, logits.ravel(), head, temperature)


def _on_mesh(sums, hidden, pairs, count, mesh):
  """Exchanges rows of hidden states for a part of their width, on each device."""
  hidden = jnp.pad(hidden, [(0, 0)] * 3 + [(0, -hidden.shape[-1] % mesh.size)])

  def on_device(hidden, pairs, count):
    width = hidden.shape[-1] // mesh.shape["tensor"]
    own = jax.lax.axis_index("tensor") * width
    hidden = jax.lax.dynamic_slice_in_dim(hidden, own, width, axis=3)
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
  """Half of the Gram matrix over these columns of the hidden states, [B, B]: plus its transpose.

  Args:
    hidden: [M, R, L, d].
    count: tiles that hold a pair.
  """
  tile, tiles, width = sizes
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)
  hidden, ahead = hidden.reshape(-1, hidden.shape[-1]), (0, tile)  # the last tile's next is empty
  tokens = jnp.pad(pairs.tokens, ahead, constant_values=-1)
  rollouts = jnp.pad(pairs.rollouts, ahead, constant_values=-1)
  # A tile meets itself in both orders: each counts half, and with the transpose, once.
  once = jnp.where(jnp.arange(2 * tile) < tile, 0.5, 1.0)

  def block(start, width, total):
    part = jax.lax.dynamic_slice_in_dim(hidden, start, width, axis=1)[pairs.order]
    counts = pairs.weights[:, None] != 0
    part = jnp.where(counts, part.astype(dtype) * pairs.weights[:, None], 0.0)
    u = jax.ops.segment_sum(part, pairs.pairs, tile * tiles, indices_are_sorted=True)
    u = jnp.pad(u.astype(hidden.dtype), [ahead, (0, 0)])

    def add(number, total):
      of = lambda x, size: jax.lax.dynamic_slice_in_dim(x, number * tile, size)
      product = jnp.einsum(
        "md,nd->mn", of(u, tile), of(u, 2 * tile), precision=EXACT, preferred_element_type=dtype
      )
      same = of(tokens, tile)[:, None] == of(tokens, 2 * tile)
      product = jnp.where(same, product * once.astype(dtype), 0.0)
      place = jax.nn.one_hot(of(rollouts, 2 * tile), num_rollouts, dtype=dtype)
      right = jnp.dot(product, place, precision=EXACT)
      return total + jnp.dot(place[:tile].T, right, precision=EXACT)

    return jax.lax.fori_loop(0, count, add, total)

  blocks, rest = divmod(hidden.shape[1], width)
  total = jnp.zeros((num_rollouts, num_rollouts), dtype)
  total = jax.lax.fori_loop(0, blocks, lambda i, x: block(i * width, width, x), total)
  return block(blocks * width, rest, total) if rest else total
