"""Products of activations and kernels, which may be a kernel plus a low-rank change."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from rlvr_jax.types import Array, Params

PRODUCT = "product"  # names a product for remat; of a `LowRank`, the sum and not its terms


class LowRank(NamedTuple):
  """A kernel W plus a low-rank change A·B, whose sum is never formed; see `models.lora`."""

  kernel: Array  # [D, E]
  a: Array  # [D, R]
  b: Array  # [R, E]


def merged(params: Params) -> Params:
  """The parameters with every `LowRank` kernel as one array, W + A·B.

  It is at least float32: rounded to fewer bits, small changes would be lost.
  """

  def leaf(x):
    if not isinstance(x, LowRank):
      return x
    change = jnp.matmul(x.a, x.b, precision=jax.lax.Precision.HIGHEST)
    return x.kernel.astype(change.dtype) + change

  return jax.tree.map(leaf, params, is_leaf=lambda x: isinstance(x, LowRank))


def dense(x: Array, kernel: nnx.Param, bias: nnx.Param | None = None) -> Array:
  """x @ kernel in x's dtype, over flattened tokens: XLA's CPU backward pass is 3× faster so."""
  # `value` is deprecated since flax 0.12, which brought `get_value`; [...] is for arrays alone.
  weights = kernel.get_value() if hasattr(kernel, "get_value") else kernel.value
  out = _product(x.reshape(-1, x.shape[-1]), weights)
  out = checkpoint_name(out, PRODUCT)
  if bias is not None:
    out = out + bias[...].astype(x.dtype)
  return out.reshape(*x.shape[:-1], -1)


def _product(x: Array, weights: Array | LowRank) -> Array:
  if isinstance(weights, LowRank):
    return _product(x, weights.kernel) + _product(_product(x, weights.a), weights.b)
  return x @ weights.astype(x.dtype)
