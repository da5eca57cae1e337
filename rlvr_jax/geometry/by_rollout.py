"""Positions of a batch's rollouts in the rows of a forward pass, and sums over these positions."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array, TrainBatch

ROLLOUTS, TILES = "rollouts", "tiles"  # names of loops whose lengths depend on the batch
_TILE = 512  # maximum number of a rollout's positions that are multiplied at once


class Places(NamedTuple):
  """Positions in M micro-batches of R rows of L tokens; see `types.Packed`."""

  targets: Array  # i32[M, R, L], the response token that a position predicts
  in_loss: Array  # bool[M, R, L], whether the token that a position predicts is in the loss
  spans: Spans
  num_micro_batches: Array | int  # ≤ M; later micro-batches are empty


class Spans(NamedTuple):
  """The rollouts in order of their positions; rollouts without a position come last."""

  firsts: Array  # i32[B], position of the first loss token, < M·R·L
  ends: Array  # i32[B], position after the last loss token; environment tokens may lie between
  slots: Array  # i32[B], index of the rollout in the batch, < P·G
  bounds: Array  # i32[M + 1], entries bounds[i] to bounds[i + 1] − 1 belong to micro-batch i


def find_places(batch: TrainBatch) -> Places:
  """Finds the positions of a batch's rollouts; an unpacked rollout is a row of T positions."""
  P, G, T = batch.tokens.shape
  B, mask = P * G, batch.mask > 0
  if batch.packed is None:
    firsts = jnp.arange(B, dtype=jnp.int32) * T
    spans = Spans(firsts, firsts + T, jnp.arange(B), jnp.asarray([0, B]))
    return Places(batch.tokens.reshape(1, B, T), mask.reshape(1, B, T), spans, 1)
  packed = batch.packed
  size, rows = packed.tokens.size, packed.tokens[0].size
  places = jnp.where(packed.places >= 0, packed.places, size)
  in_loss = jnp.zeros(size, bool).at[places].set(mask, mode="drop").reshape(packed.tokens.shape)
  firsts = jnp.min(places, axis=-1).reshape(B)
  ends = jnp.max(packed.places, axis=-1).reshape(B) + 1  # 0 for a rollout without positions
  order = jnp.argsort(firsts)
  firsts = firsts[order]
  starts = jnp.arange(packed.tokens.shape[0] + 1, dtype=firsts.dtype) * rows
  bounds = jnp.searchsorted(firsts, starts)
  spans = Spans(firsts, jnp.maximum(firsts, ends[order]), order, bounds)
  return Places(packed.targets, in_loss, spans, packed.num_micro_batches)


def choose_tile(batch: TrainBatch) -> tuple[int, int | None]:
  """(positions per tile, tiles per rollout), for `outer_sums`.

  A tile is a range of a rollout's positions that are multiplied at once. The number of tiles is
  None for a packed batch, whose rollouts differ in length.
  """
  width, tiles = split_into_tiles(batch.tokens.shape[-1])
  return width, None if batch.packed is not None else tiles


def split_into_tiles(length: int) -> tuple[int, int]:
  """The positions per tile, and the number of tiles, for a rollout with `length` positions."""
  tiles = -(-length // _TILE)
  return -(-length // tiles), tiles


def outer_sums(
  sums: Array,
  left: Array,
  right: Array,
  spans: Spans,
  index: Array | int,
  tile: tuple[int, int | None],
) -> Array:
  """`sums`, with the entries of one micro-batch's rollouts set to Σ_n left[n] ⊗ right[n].

  n runs over a rollout's positions. Entries of the other micro-batches' rollouts are kept. Each
  rollout is multiplied in as many tiles as it needs, so that short rollouts cost less.

  Args:
    sums: [B, X, Y], rollouts in the order of the batch.
    left, right: [R·L, X] and [R·L, Y], 0 at positions that are not in the loss.
    index: the index of the micro-batch.
    tile: the result of `choose_tile`.
  """
  (width, tiles), size = tile, left.shape[0]
  width = min(width, size)

  def add_rollout(i, sums):
    first, end, slot = (x[i] - offset for x, offset in zip(spans[:3], (base, base, 0), strict=True))

    def add_tile(j, total):
      start = first + j * width
      at = jnp.minimum(start, size - width)  # a slice must end within the array
      place = at + jnp.arange(width)
      in_tile = (place >= start) & (place < end)
      x, y = (jax.lax.dynamic_slice_in_dim(z, at, width) for z in (left, right))
      x = jnp.where(in_tile[:, None], x, jnp.zeros((), x.dtype))
      product = jnp.einsum("nx,ny->xy", x, y, precision=EXACT, preferred_element_type=sums.dtype)
      return total + product

    count = -(-(end - first) // width) if tiles is None else tiles
    with jax.named_scope(TILES):
      total = jax.lax.fori_loop(0, count, add_tile, jnp.zeros(sums.shape[1:], sums.dtype))
    return jax.lax.dynamic_update_index_in_dim(sums, total, slot, 0)

  base = index * size
  low, high = 0, spans.firsts.shape[0]
  if spans.bounds.shape[0] > 2:  # several micro-batches
    low, high = spans.bounds[index], spans.bounds[index + 1]
  with jax.named_scope(ROLLOUTS):
    return jax.lax.fori_loop(low, high, add_rollout, sums)
