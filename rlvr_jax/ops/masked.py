"""Reductions over the entries that a mask keeps.

Masked entries may have any value, NaN and ±inf included: they are replaced *before* any arithmetic,
so that they affect neither the value nor the gradient. The sum over an empty mask is 0.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from rlvr_jax.types import Array, Mean

Axis = int | tuple[int, ...] | None


def upcast(x: Array | np.ndarray) -> Array:
  """`x` in at least float32; float64 stays float64."""
  x = jnp.asarray(x)
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def masked_fill(x: Array, mask: Array, fill: float = 0.0) -> Array:
  """`x` in at least float32 where mask > 0, `fill` elsewhere; shapes broadcast."""
  x = upcast(x)
  return jnp.where(mask > 0, x, jnp.asarray(fill, x.dtype))


def masked_count(mask: Array, axis: Axis = None) -> Array:
  """Number of kept entries, in at least float32."""
  return jnp.sum(upcast(mask > 0), axis=axis)


def masked_sum(x: Array, mask: Array, axis: Axis = None) -> Array:
  """Sum of the kept entries; 0 if none is kept."""
  return jnp.sum(masked_fill(x, mask), axis=axis)


def masked_mean(x: Array, mask: Array, axis: Axis = None) -> Array:
  """Mean of the kept entries of `x`, which has the mask's shape; 0 if none is kept."""
  return masked_sum(x, mask, axis) / jnp.maximum(masked_count(mask, axis), 1)


def masked_max(x: Array, mask: Array, axis: Axis = None, *, initial: float) -> Array:
  """Largest of `initial` and the kept entries; `initial` if none is kept."""
  return jnp.max(masked_fill(x, mask, initial), axis=axis, initial=initial)


def masked_min(x: Array, mask: Array, axis: Axis = None, *, initial: float) -> Array:
  """Smallest of `initial` and the kept entries; `initial` if none is kept."""
  return jnp.min(masked_fill(x, mask, initial), axis=axis, initial=initial)


def for_tokens(coefficients: Array) -> Array:
  """Reshapes coefficients of rollouts, [P, G], to [P, G, 1]; returns [P, G, T] unchanged."""
  return coefficients[..., None] if coefficients.ndim == 2 else coefficients


def token_share(marked: Array, mask: Array) -> Mean:
  """The fraction of the kept tokens that are marked, as a metric that also holds the marks.

  Args:
    marked: [P, G, T], bool or in [0, 1].
    mask: [P, G, T].
  """
  mean = mean_metric(marked, mask)
  return Mean(total=mean.total, weight=mean.weight, tokens=marked)


def mean_metric(x: Array, mask: Array) -> Mean:
  """The mean of the kept entries of `x`, as a metric; `x` is broadcast to the mask's shape."""
  return Mean(total=masked_sum(x, mask), weight=masked_count(mask))
