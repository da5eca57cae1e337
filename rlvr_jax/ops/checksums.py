"""Checksums of arrays on devices; how an array is sharded does not change its checksum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.types import Array

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def checksum(x: Array) -> Array:
  """Σ bits·(2·index + 1) mod 2³² of an array, where index is the row-major position.

  Integer arithmetic is exact in any order, so the sum does not depend on the sharding. The weights
  2·index + 1 are odd, so that any change of one element changes the sum. The weights differ from
  each other, so that the order of the elements matters.

  Args:
    x: numbers of 1, 2, 4 or 8 bytes, or booleans.
  Returns:
    u32[].
  """
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
  weight, stride = jnp.ones((), jnp.uint32), 2
  for axis in reversed(range(bits.ndim)):
    index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    weight, stride = weight + index * jnp.uint32(stride % 2**32), stride * bits.shape[axis]
  return jnp.sum(bits * weight, dtype=jnp.uint32)


def checksums(tree: Any) -> Array:
  """u32[leaves], the `checksum` of every leaf of a tree."""
  return _checksums(jax.tree.leaves(tree))


@jax.jit
def _checksums(leaves: list[Array]) -> Array:
  return jnp.stack([checksum(leaf) for leaf in leaves])
