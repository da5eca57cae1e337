"""Checksums of arrays: of arrays on devices, independent of their sharding, and of NumPy arrays."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.train.cluster.sharding import to_host

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


@jax.jit
def _checksums(leaves: list[jax.Array]) -> list[jax.Array]:
  """Σ bits·(2·index + 1) mod 2³² of each leaf, index = row-major position; u32[] each.

  Integer arithmetic is exact in any order, so the sums do not depend on the sharding. The weights
  are odd, so that any change of one element changes the sum, and differ, so that order matters.
  """

  def checksum(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
      x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    weight, stride = jnp.ones((), jnp.uint32), 2
    for axis in reversed(range(bits.ndim)):
      index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
      weight, stride = weight + index * jnp.uint32(stride % 2**32), stride * bits.shape[axis]
    return jnp.sum(bits * weight, dtype=jnp.uint32)

  return [checksum(x) for x in leaves]


def parameter_checksums(params: Any) -> jax.Array:
  """`_checksums` of all leaves, u32[leaves]; independent of the sharding."""
  return jnp.stack(_checksums(jax.tree.leaves(params)))


def device_checksums(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
  sums = to_host(_checksums(list(leaves.values())))
  return {name: int(s) for name, s in zip(leaves, sums, strict=True)}


def host_checksum(array: np.ndarray) -> int:
  return zlib.crc32(array.tobytes())
