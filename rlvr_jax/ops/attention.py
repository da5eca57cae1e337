"""Grouped-query attention over a shared prompt and a rollout's own tokens.

The sampling engine encodes prompts with this attention. An update uses it for a batch that is not
packed. Only positions determine the mask: padding has negative positions.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.types import Array

_MASKED = -1e30  # finite, so that a query without a visible key (padding) gives no NaN
_QUERY_BLOCK = 512  # longer responses are processed in checkpointed blocks of this many queries


class Keys(NamedTuple):
  """Keys and values of one segment, in the layout that the matrix products need.

  A segment is a prompt, or a rollout's own tokens. The axis G has size 1 if all rollouts of a
  prompt share the segment. J is the number of keys per head, K the number of key heads, and H their
  width.
  """

  keys: Array  # [P, G or 1, K, H, J]
  values: Array  # [P, G or 1, K, J, H]
  positions: Array  # i32[P, G or 1, J], negative where padded

  @classmethod
  def of(cls, keys: Array, values: Array, positions: Array) -> Keys:
    """Makes `Keys` from a layer's keys and values, both [P, G or 1, J, K, H]."""
    return cls(jnp.transpose(keys, (0, 1, 3, 4, 2)), jnp.swapaxes(values, 2, 3), positions)


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

  A query sees a key unless the key's position is negative (padding), later than the query's, or at
  least `window` tokens earlier. Scores and the softmax are at least float32. With more than 512
  queries, scores exist for only one block of queries at a time, also in the backward pass.

  Args:
    queries: [P, G, Q, N, H]: Q queries of each rollout, in N heads of width H.
    positions: i32[P, G, Q], positions of the queries.
    segments: keys and values; a segment with G = 1 is shared by the prompt's rollouts, not copied.
    scale: factor on the scores, usually 1/√H.
    window: how many tokens a query may attend to, its own token included; may be traced.
    soft_cap: c of c·tanh(score/c) (Gemma 2); None for no cap.
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
  K = segments[0].keys.shape[2]
  dtype = jnp.promote_types(queries.dtype, jnp.float32)
  # Queries that share a key head become rows of one matrix: [P, G, K, Q·n, H], n = N/K.
  rows = jnp.transpose(queries.reshape(P, G, Q, K, N // K, H), (0, 1, 3, 2, 4, 5))
  rows = rows.reshape(P, G, K, -1, H)

  scores = []
  for segment in segments:
    score = _product(rows, segment.keys, dtype).reshape(P, G, K, Q, N // K, -1) * scale
    if soft_cap is not None:
      score = soft_cap * jnp.tanh(score / soft_cap)
    distance = positions[:, :, :, None] - segment.positions[:, :, None, :]
    visible = (segment.positions[:, :, None, :] >= 0) & (distance >= 0) & (distance < window)
    scores.append(jnp.where(visible[:, :, None, :, None], score, _MASKED))

  # Softmax over all segments, without concatenating them.
  peak = jnp.max(jnp.stack([jnp.max(s, axis=-1) for s in scores]), axis=0)[..., None]
  weights = [jnp.exp(s - jax.lax.stop_gradient(peak)) for s in scores]
  sums = [jnp.sum(w, axis=-1) for w in weights]
  normalizer = functools.reduce(jnp.add, sums)  # [P, G, K, Q, n]
  mixed = [
    _product(w.astype(s.values.dtype).reshape(P, G, K, Q * N // K, -1), s.values, dtype)
    for w, s in zip(weights, segments, strict=True)
  ]
  out = functools.reduce(jnp.add, mixed).reshape(P, G, K, Q, N // K, H) / normalizer[..., None]
  return jnp.transpose(out, (0, 1, 3, 2, 4, 5)).reshape(P, G, Q, N, H).astype(queries.dtype)


def _product(rows: Array, matrices: Array, dtype: jnp.dtype) -> Array:
  """[P, G, K, R, X] @ [P, G or 1, K, X, Y]; a matrix shared by the group is multiplied once."""
  P, G, K, R, X = rows.shape
  if matrices.shape[1] == G:
    return jnp.matmul(rows, matrices, preferred_element_type=dtype)
  rows = jnp.swapaxes(rows, 1, 2).reshape(P, K, G * R, X)
  product = jnp.matmul(rows, matrices[:, 0], preferred_element_type=dtype)
  return jnp.swapaxes(product.reshape(P, K, G, R, -1), 1, 2)
