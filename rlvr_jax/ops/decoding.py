"""Attention of one query per slot over cached keys, read in blocks up to the longest slot.

The blocks of a slot's prompt are accumulated first, then those of its response, then its staged
keys (`ops.caches`). A block without a visible key leaves a slot's sums bitwise unchanged, so that a
row's result does not depend on the number of blocks that other rows need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops.caches import Cache, Pages, Part, Reach
from rlvr_jax.types import Array

# Far below any score, and the initial peak far above it, so that exp(masked − peak) is exactly 0.
_MASKED, _LOWEST_PEAK = -1e30, -1e20


class _Sums(NamedTuple):
  """A softmax in progress."""

  peak: Array  # [K, slots, n], the largest score
  total: Array  # [K, slots, n], Σ exp(score − peak)
  mixed: Array  # [K, slots, n, H], Σ exp(score − peak)·v

  def add(self, scores: Array, cache: Cache, dtype: Any) -> _Sums:
    """Adds scores [K, slots, n, J] and values [K, slots, J, H], with a product in `dtype`."""
    peak = jnp.maximum(self.peak, jnp.max(scores, axis=-1))
    weights, decay = jnp.exp(scores - peak[..., None]), jnp.exp(self.peak - peak)
    total = self.total * decay + jnp.sum(weights, axis=-1)
    if cache.value_scales is not None:
      weights = weights * cache.value_scales[:, :, None]
    values = cache.values.astype(dtype)
    mixed = jnp.matmul(weights.astype(dtype), values, preferred_element_type=scores.dtype)
    return _Sums(peak, total, self.mixed * decay[..., None] + mixed)

  def join(self, other: _Sums) -> _Sums:
    """Joins the sums over two sets of keys."""
    peak = jnp.maximum(self.peak, other.peak)
    decay, other_decay = jnp.exp(self.peak - peak), jnp.exp(other.peak - peak)
    mixed = self.mixed * decay[..., None] + other.mixed * other_decay[..., None]
    return _Sums(peak, self.total * decay + other.total * other_decay, mixed)


def cached_attention(
  queries: Array,
  prompt: Part,
  response: Part,
  staged: Cache,
  reach: Reach,
  step: Array,
  *,
  scale: float,
  window: int,
  soft_cap: float | None = None,
  cores: int = 1,
) -> Array:
  """softmax(q·kᵀ·scale) v over a slot's prompt, its response, and its staged keys.

  Scores and sums are at least float32. Of keys and values in int8 the products read the 8-bit
  numbers, which every dtype has exactly; scales are factors on scores and on the softmax.

  Args:
    queries: [slots, N, H].
    prompt, response: of the layer; only blocks that a running slot has reached are read.
    staged: keys and values of the burst's tokens 0 … step.
    reach: of all slots at the start of the burst.
    step: i32[], index of the query's token in the burst.
    scale: factor on the scores, usually 1/√H.
    window: tokens that a query attends to, itself included.
    soft_cap: c of c·tanh(score/c) (Gemma 2); None for no cap.
    cores: of a device, over which a kernel splits the slots.
  Returns:
    [slots, N, H] in the queries' dtype.
  """
  chex.assert_rank([queries, prompt.keys, response.keys, staged.keys], [3, 5, 5, 4])
  slots, N, H = queries.shape
  K = staged.keys.shape[0]
  rows = jnp.transpose(queries.reshape(slots, K, N // K, H), (1, 0, 2, 3))
  dtype = jnp.promote_types(queries.dtype, jnp.float32)
  start = reach.prompt + reach.response  # position of the burst's first token

  def add(sums: _Sums, cache: Cache, positions: Array, exists: Array) -> _Sums:
    """Adds keys [K, slots, H, J] and their values, at positions i32[slots, J]."""
    keys = cache.keys.astype(rows.dtype)
    score = jnp.matmul(rows, keys, preferred_element_type=dtype) * scale
    if cache.key_scales is not None:
      score = score * cache.key_scales[:, :, None]
    if soft_cap is not None:
      score = soft_cap * jnp.tanh(score / soft_cap)
    visible = exists & ((start + step)[:, None] - positions < window)
    return sums.add(jnp.where(visible[None, :, None], score, _MASKED), cache, rows.dtype)

  zeros = jnp.zeros((K, slots, N // K), dtype)
  sums = _Sums(jnp.full_like(zeros, _LOWEST_PEAK), zeros, jnp.zeros((K, slots, N // K, H), dtype))
  for part, length, blocks, first in (
    (prompt, reach.prompt, reach.prompt_blocks, jnp.zeros_like(reach.prompt)),
    (response, reach.response, reach.response_blocks, reach.prompt),
  ):
    if isinstance(part, Pages):
      sums = _add_pages(sums, queries * scale, part, length, cores)
    else:
      sums = _add_blocks(sums, add, part, blocks, length, first)
  index = jnp.arange(staged.values.shape[2])
  sums = add(sums, staged, start[:, None] + index, index <= step)
  out = sums.mixed / sums.total[..., None]
  return jnp.transpose(out, (1, 0, 2, 3)).reshape(slots, N, H).astype(queries.dtype)


def _add_blocks(
  sums: _Sums,
  add: Callable[[_Sums, Cache, Array, Array], _Sums],
  part: Cache,
  blocks: Array,
  length: Array,
  first: Array,
) -> _Sums:
  """Adds a part of the cache, whose first tokens are at positions `first`."""
  size = part.values.shape[3]

  def add_block(j: Array, sums: _Sums) -> _Sums:
    block = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, 1, keepdims=False), part)
    index = j * size + jnp.arange(size)
    return add(sums, block, first[:, None] + index, index < length[:, None])

  return jax.lax.fori_loop(0, blocks, add_block, sums) if part.keys.size else sums


def _add_pages(sums: _Sums, queries: Array, part: Pages, length: Array, cores: int) -> _Sums:
  """Adds every slot's own pages, up to its own length."""
  from rlvr_jax.ops.paged import paged_sums  # experimental in jax, so imported only on use

  if not part.keys.size:
    return sums
  return sums.join(_Sums(*paged_sums(queries, part, length, cores=cores)))
