"""Attention of one query per slot over cached keys.

Keys lie in blocks (`ops.caches`): a slot has blocks of its prompt and of its response, and one
block of staged keys. First the largest of all scores is found. Then each block is summed
separately, and the sums of blocks are added in order. A block without a visible key adds zeros. So
the bits of a slot's result do not depend on the number of blocks that other slots need. On CPUs in
bfloat16, bits may depend on this number, since it changes the order of additions in some of XLA's
sums.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops.caches import Cache, Pages, Part, Reach
from rlvr_jax.types import Array

_MASKED = -1e30  # far below any score, so that exp(masked − largest) is exactly 0


class _Sums(NamedTuple):
  """The sums of an unnormalized softmax over some keys."""

  peak: Array  # [K, slots, n], the largest score
  total: Array  # [K, slots, n], Σ exp(score − peak)
  mixed: Array  # [K, slots, n, H], Σ exp(score − peak)·v

  def join(self, other: _Sums) -> _Sums:
    """The sums over both sets of keys."""
    peak = jnp.maximum(self.peak, other.peak)
    decay, other_decay = jnp.exp(self.peak - peak), jnp.exp(other.peak - peak)
    mixed = self.mixed * decay[..., None] + other.mixed * other_decay[..., None]
    return _Sums(peak, self.total * decay + other.total * other_decay, mixed)


class _Keys(NamedTuple):
  """Cached tokens and their positions."""

  cache: Cache  # [K, blocks, slots, …]
  positions: Array  # i32[blocks, slots, block]
  exists: Array  # bool[blocks, slots, block]

  @classmethod
  def of(cls, cache: Cache, first: Array, length: Array) -> _Keys:
    """The first `length` tokens of every slot, at positions from `first` on; both i32[slots]."""
    _, blocks, _, size, _ = cache.values.shape
    index = jnp.arange(blocks)[:, None, None] * size + jnp.arange(size)
    return cls(cache, first[:, None] + index, index < length[:, None])


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

  Scores and sums are at least float32. If keys and values are int8, the products read the 8-bit
  numbers, which every dtype represents exactly. The scales of keys multiply scores, and the scales
  of values multiply the weights of the softmax.

  Args:
    queries: [slots, N, H]: N heads of width H.
    prompt, response: the layer's caches of prompt and response. All blocks of a `Cache` are read;
      of `Pages`, only the pages with tokens are read.
    staged: keys and values of the burst's tokens 0 … step.
    reach: the lengths of all slots' caches at the start of the burst.
    step: i32[], index of the query's token in the burst.
    scale: factor on the scores, usually 1/√H.
    window: how many tokens a query may attend to, its own token included.
    soft_cap: c of c·tanh(score/c) (Gemma 2); None for no cap.
    cores: the number of cores of a device, over which the kernel for pages splits the slots.
  Returns:
    [slots, N, H] in the queries' dtype.
  """
  chex.assert_rank([queries, prompt.keys, response.keys, staged.keys], [3, 5, 5, 4])
  slots, N, H = queries.shape
  K = staged.keys.shape[0]
  rows = jnp.transpose(queries.reshape(slots, K, N // K, H), (1, 0, 2, 3))
  start = reach.prompt + reach.response  # position of the burst's first token
  keys, pages = [], []
  for part, first, length in (
    (prompt, jnp.zeros_like(start), reach.prompt),
    (response, reach.prompt, reach.response),
  ):
    if not part.keys.size:
      continue
    if isinstance(part, Pages):
      pages.append((part, length))
    else:
      keys.append(_Keys.of(part, first, length))
  one_block = jax.tree.map(lambda x: x[:, None], staged)
  keys.append(_Keys.of(one_block, start, jnp.full_like(start, step + 1)))
  sums = _sum_blocks(rows, keys, start + step, scale, window, soft_cap)
  for part, length in pages:
    sums = sums.join(_sum_pages(queries * scale, part, length, cores))
  out = sums.mixed / sums.total[..., None]
  return jnp.transpose(out, (1, 0, 2, 3)).reshape(slots, N, H).astype(queries.dtype)


def _sum_blocks(
  rows: Array,
  parts: Sequence[_Keys],
  position: Array,
  scale: float,
  window: int,
  soft_cap: float | None,
) -> _Sums:
  """Sums over all blocks for queries `rows` [K, slots, n, H] at positions i32[slots]."""
  dtype = jnp.promote_types(rows.dtype, jnp.float32)

  def score(keys: _Keys) -> Array:
    """Scores [K, blocks, slots, n, block]; `_MASKED` where a key is not visible."""
    of_blocks = keys.cache.keys.astype(rows.dtype)
    scores = jnp.matmul(rows[:, None], of_blocks, preferred_element_type=dtype) * scale
    if keys.cache.key_scales is not None:
      scores = scores * keys.cache.key_scales[:, :, :, None]
    if soft_cap is not None:
      scores = soft_cap * jnp.tanh(scores / soft_cap)
    visible = keys.exists & (position[:, None] - keys.positions < window)
    return jnp.where(visible[None, :, :, None], scores, _MASKED)

  scores = [score(keys) for keys in parts]
  by_row = [jnp.moveaxis(x, 1, 3).reshape(*rows.shape[:3], -1) for x in scores]
  # The newest token attends to itself, so that the largest score belongs to a visible key.
  peak = jnp.max(jnp.concatenate(by_row, axis=-1), axis=-1)
  totals, mixed = [], []
  for keys, scored in zip(parts, scores, strict=True):
    weights = jnp.exp(scored - peak[:, None, ..., None])
    # Summed block by block: in one operation, XLA on CPU would add in an order that depends on the
    # number of blocks.
    totals += [jnp.sum(weights[:, block], axis=-1) for block in range(weights.shape[1])]
    if keys.cache.value_scales is not None:
      weights = weights * keys.cache.value_scales[:, :, :, None]
    values = keys.cache.values.astype(rows.dtype)
    products = jnp.matmul(weights.astype(rows.dtype), values, preferred_element_type=dtype)
    mixed += [products[:, block] for block in range(products.shape[1])]
  add_in_order = functools.partial(functools.reduce, operator.add)
  return _Sums(peak, add_in_order(totals), add_in_order(mixed))


def _sum_pages(queries: Array, part: Pages, length: Array, cores: int) -> _Sums:
  """Sums over the first `length` tokens of every slot's own pages."""
  from rlvr_jax.ops.paged import paged_sums  # experimental in jax, so imported only on use

  return _Sums(*paged_sums(queries, part, length, cores=cores))
