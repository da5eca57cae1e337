"""Grouped-query attention over a shared prompt and a rollout's own tokens.

One function serves prompt encoding, training and cached decoding. Which key a query may see follows
from positions alone, so there is one masking rule: padding has a negative position.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.types import Array

_MASKED = -1e30  # finite, so that a query that sees no key (padding) yields finite garbage, not NaN
_QUERY_BLOCK = 512  # longer responses are processed in checkpointed blocks of this many queries


class Keys(NamedTuple):
  """Keys and values of one segment; G is 1 where all rollouts of a prompt share the segment."""

  keys: Array  # [P, G or 1, J, K, H]
  values: Array  # [P, G or 1, J, K, H]
  positions: Array  # i32[P, G or 1, J], negative where padded


def attention(
  queries: Array,
  positions: Array,
  segments: tuple[Keys, ...],
  *,
  scale: float,
  window: Array | int,
  soft_cap: float | None = None,
) -> Array:
  """softmax(q·kᵀ·scale) v over the keys of all segments jointly.

  A query sees a key whose position is neither negative (padding), later than its own, nor `window`
  or more tokens back. Scores and the softmax are at least float32. Above 512 queries the scores
  exist for one block of queries at a time, in the backward pass too.

  Args:
    queries: [P, G, Q, N, H].
    positions: i32[P, G, Q], of the queries.
    segments: keys and values; a segment with G = 1 is shared by the prompt's rollouts, not copied.
    scale: factor on the scores, usually 1/√H.
    window: tokens a query looks back, itself included; may be traced.
    soft_cap: c·tanh(score/c) where given (Gemma 2).
  Returns:
    [P, G, Q, N, H] in the queries' dtype.
  """
  chex.assert_rank([queries, positions], [5, 3])
  num_queries = queries.shape[2]

  def block(args):
    queries, positions = args
    return _attend(queries, positions, segments, scale=scale, window=window, soft_cap=soft_cap)

  if num_queries <= _QUERY_BLOCK:
    return block((queries, positions))
  padding = -num_queries % _QUERY_BLOCK
  blocks = (num_queries + padding) // _QUERY_BLOCK

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 3))
    return jnp.moveaxis(x.reshape(*x.shape[:2], blocks, _QUERY_BLOCK, *x.shape[3:]), 2, 0)

  out = jax.lax.map(jax.checkpoint(block), (split(queries), split(positions)))
  out = jnp.moveaxis(out, 0, 2).reshape(*queries.shape[:2], -1, *queries.shape[3:])
  return out[:, :, :num_queries]


def _attend(queries, positions, segments, *, scale, window, soft_cap):
  P, G, Q, N, H = queries.shape
  K = segments[0].keys.shape[3]
  dtype = jnp.promote_types(queries.dtype, jnp.float32)
  queries = queries.reshape(P, G, Q, K, N // K, H)

  scores = []
  for segment in segments:
    if segment.keys.shape[1] == 1 and G > 1:
      score = jnp.einsum(
        'pgqknh,pjkh->pgknqj', queries, segment.keys[:, 0], preferred_element_type=dtype
      )
    else:
      score = jnp.einsum(
        'pgqknh,pgjkh->pgknqj', queries, segment.keys, preferred_element_type=dtype
      )
    score = score * scale
    if soft_cap is not None:
      score = soft_cap * jnp.tanh(score / soft_cap)
    distance = positions[:, :, :, None] - segment.positions[:, :, None, :]
    visible = (segment.positions[:, :, None, :] >= 0) & (distance >= 0) & (distance < window)
    scores.append(jnp.where(visible[:, :, None, None], score, _MASKED))

  # The softmax over all segments, without concatenating them.
  peak = jnp.max(jnp.stack([jnp.max(s, axis=-1) for s in scores]), axis=0)[..., None]
  weights = [jnp.exp(s - jax.lax.stop_gradient(peak)) for s in scores]
  normalizer = sum(jnp.sum(w, axis=-1) for w in weights)  # [P, G, K, n, Q]
  out = 0.0
  for weight, segment in zip(weights, segments, strict=True):
    weight = weight.astype(segment.values.dtype)
    if segment.values.shape[1] == 1 and G > 1:
      out += jnp.einsum(
        'pgknqj,pjkh->pgqknh', weight, segment.values[:, 0], preferred_element_type=dtype
      )
    else:
      out += jnp.einsum(
        'pgknqj,pgjkh->pgqknh', weight, segment.values, preferred_element_type=dtype
      )
  out = out / jnp.transpose(normalizer, (0, 1, 4, 2, 3))[..., None]
  return out.reshape(P, G, Q, N, H).astype(queries.dtype)
