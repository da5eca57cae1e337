"""Reductions over the valid rollouts of each group, [P, G] → [P, 1].

What `x` is at other rollouts does not matter, NaN included. A batch without such rollouts is
rounded as by the functions of jax.numpy.
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
  return _sum_over(masked_fill(x, valid), valid, less=0)


def group_deviation(x: Array, valid: Array) -> Array:
  """Standard deviation over them, f32[P, 1], unbiased: √(Σ(x − x̄)²/(n − 1)); 0 where n < 2."""
  centered = masked_fill(x - group_mean(x, valid), valid)
  return jnp.sqrt(_sum_over(jnp.square(centered), valid, less=1))


def varies(x: Array, valid: Array) -> Array:
  """bool[P, 1], whether two valid rollouts of a group differ; never with fewer than two."""
  kept: dict[str, Any] = dict(axis=1, keepdims=True, where=valid > 0)
  x = upcast(x)
  return ~(jnp.max(x, initial=-jnp.inf, **kept) <= jnp.min(x, initial=jnp.inf, **kept))


def _sum_over(x: Array, valid: Array, *, less: int) -> Array:
  """Σ x/(n − less), of x that is 0 where not valid."""
  size = x.shape[1] - less
  number = jnp.maximum(count_valid(valid).astype(x.dtype) - less, 1)
  # XLA rounds a division by the constant `size` otherwise than one by n. The factor is exactly 1
  # where no rollout is left out.
  return jnp.sum(x, axis=1, keepdims=True) / size * (size / number)
