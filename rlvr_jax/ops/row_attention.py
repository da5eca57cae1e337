"""Attention within rows that hold several prompts and their rollouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.types import Array, Rows


def row_attention(
  queries: Array,
  keys: Array,
  values: Array,
  rows: Rows,
  *,
  scale: float,
  window: Array | int,
  soft_cap: float | None = None,
) -> Array:
  """softmax(q·kᵀ·scale) v over the keys that `Rows` lets each query see.

  Args:
    queries: [R, L, N, H].
    keys, values: [R, L, K, H].
    rows: fields i32[R, L].
    scale: factor on the scores, usually 1/√H.
    window: tokens a query looks back, itself included; may be traced.
    soft_cap: c·tanh(score/c) where given (Gemma 2).
  Returns:
    [R, L, N, H] in the queries' dtype.
  """
  R, L, N, H = queries.shape
  K = keys.shape[2]
  dtype = jnp.promote_types(queries.dtype, jnp.float32)
  grouped = queries.reshape(R, L, K, N // K, H)
  scores = jnp.einsum("rikgh,rjkh->rkgij", grouped, keys, preferred_element_type=dtype) * scale
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  index = jnp.arange(L)
  column = lambda x: x[:, :, None]
  line = lambda x: x[:, None, :]
  visible = (column(rows.prompts) == line(rows.prompts)) & (index[:, None] >= index)
  visible &= (index >= column(rows.starts)) | (index < column(rows.prompt_ends))
  visible &= column(rows.positions) - line(rows.positions) < window
  scores = jnp.where(visible[:, None, None], scores, -1e30)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  out = jnp.einsum("rkgij,rjkh->rikgh", weights, values, preferred_element_type=dtype)
  return out.reshape(R, L, N, H).astype(queries.dtype)
