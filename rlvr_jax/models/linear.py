"""Products of activations and kernels; a kernel may have a separate low-rank change."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array, Params

PRODUCT = "product"  # names a product for remat; for a `LowRank`, the sum but not its terms


class LowRank(NamedTuple):
  """A kernel W plus a low-rank change A·B; products do not form W + A·B; see `models.lora`."""

  kernel: Array  # [D, E]
  a: Array  # [D, R]
  b: Array  # [R, E]


class Rounded(NamedTuple):
  """A matrix s·q with scales s and 8-bit numbers q, for decoding.

  Products read q, and s·q is never formed. See `models.quantized`.
  """

  values: Array  # q [..., D, E], int8 or float8
  scale: Array  # s, at least float32, of length 1 along the axis that a product sums over


def init_kernel(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: str, gain: float = 1.0) -> nnx.Param:
  """Initializes kernels [..., D, E] so that a product with a kernel scales variances by `gain`."""
  batch_axes = tuple(range(len(shape) - 2))
  initializer = jax.nn.initializers.variance_scaling(
    gain, "fan_in", "normal", batch_axis=batch_axes
  )
  return nnx.Param(initializer(rngs.params(), shape, jnp.dtype(dtype)))


def merge_low_rank(params: Params) -> Params:
  """Merges every `LowRank` kernel into one array, W + A·B.

  The result is at least float32, since rounding to fewer bits would lose small changes.
  """

  def merge(x):
    if not isinstance(x, LowRank):
      return x
    change = jnp.matmul(x.a, x.b, precision=EXACT)
    return x.kernel.astype(change.dtype) + change

  return jax.tree.map(merge, params, is_leaf=lambda x: isinstance(x, LowRank))


def dense(x: Array, kernel: nnx.Param, bias: nnx.Param | None = None) -> Array:
  """x @ kernel in x's dtype."""
  weights = value_of(kernel)
  # On CPUs, which compute in float32, the backward pass is 3× faster over flattened tokens. On
  # accelerators, which compute in bfloat16, devices that each have some tokens of every row
  # exchange half as much if tokens are not flattened.
  flat = x if x.dtype == jnp.bfloat16 else x.reshape(-1, x.shape[-1])
  out = _product(flat, weights)
  out = checkpoint_name(out, PRODUCT)
  if bias is not None:
    out = out + bias[...].astype(x.dtype)
  return out.reshape(*x.shape[:-1], -1)


def value_of(parameter: nnx.Param) -> Array | LowRank | Rounded:
  """The value of a parameter: an array, a `LowRank` or a `Rounded`."""
  # flax 0.12 replaced `value` by `get_value`; [...] works for arrays only.
  return parameter.get_value() if hasattr(parameter, "get_value") else parameter.value


def _product(x: Array, weights: Array | LowRank | Rounded) -> Array:
  if isinstance(weights, LowRank):
    return _product(x, weights.kernel) + _product(_product(x, weights.a), weights.b)
  if isinstance(weights, Rounded):
    # bfloat16 represents 8-bit numbers exactly, and the product converts them as it reads them.
    return ((x @ weights.values.astype(x.dtype)) * weights.scale).astype(x.dtype)
  if weights.dtype.itemsize > x.dtype.itemsize:
    return _narrow_product(x, weights)
  return x @ weights.astype(x.dtype)


@jax.custom_vjp
def _narrow_product(x: Array, kernel: Array) -> Array:
  """[..., D] @ [D, E] in x's dtype, with a gradient of the kernel in the kernel's dtype.

  So devices add up float32 terms of the kernel's gradient. Plain differentiation would first round
  each device's term to x's dtype.
  """
  return x @ kernel.astype(x.dtype)


def _narrow_product_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
  x, kernel = saved
  tokens = tuple(range(x.ndim - 1))
  into_kernel = jnp.tensordot(x, gradient, (tokens, tokens), preferred_element_type=kernel.dtype)
  return gradient @ kernel.astype(x.dtype).T, into_kernel


_narrow_product.defvjp(
  lambda x, kernel: (_narrow_product(x, kernel), (x, kernel)), _narrow_product_backward
)
