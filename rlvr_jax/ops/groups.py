"""Reductions over the valid rollouts of each group, [P, G] → [P, 1].

Values of `x` at other rollouts are ignored, NaN included. If all rollouts are valid, results round
like those of jax.numpy.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rlvr_jax.ops.masked import masked_fill, upcast
from rlvr_jax.types import Array


def count_valid(valid: Array) -> Array:
  """n, the number of valid rollouts of each group: bool[P, G] → f32[P, 1]."""
  return jnp.sum(upcast(valid > 0), axis=1, keepdims=True)


def group_mean(x: Array, valid: Array) -> Array:
  """Mean over the valid rollouts of each group, f32[P, 1]; 0 where none is valid."""
  return _sum_over_count(masked_fill(x, valid), valid, ddof=0)


def group_deviation(x: Array, valid: Array) -> Array:
  """Unbiased standard deviation of each group, √(Σ(x − x̄)²/(n − 1)), f32[P, 1]; 0 where n < 2."""
  centered = masked_fill(x - group_mean(x, valid), valid)
  return jnp.sqrt(_sum_over_count(jnp.square(centered), valid, ddof=1))


def varies(x: Array, valid: Array) -> Array:
  """Whether a group has two valid rollouts with different values, bool[P, 1]."""
  over_valid: dict[str, Any] = dict(axis=1, keepdims=True, where=valid > 0)
  x = upcast(x)
  return ~(jnp.max(x, initial=-jnp.inf, **over_valid) <= jnp.min(x, initial=jnp.inf, **over_valid))


def _sum_over_count(x: Array, valid: Array, *, ddof: int) -> Array:
  """Σ x/(n − ddof), for x that is 0 where not valid."""
  size = max(x.shape[1] - ddof, 1)
  count = jnp.maximum(count_valid(valid).astype(x.dtype) - ddof, 1)
  # XLA rounds a division by the constant `size` differently from one by n. The factor is exactly 1
  # if all rollouts are valid.
  return jnp.sum(x, axis=1, keepdims=True) / size * (size / count)
