"""Grouped products on TPUs: the megablox kernels that ship with jax.

It builds on `jax.experimental.pallas.ops.tpu.megablox`, whose functions may change with any
release; tested with jax 0.7.2 and 0.10.2.

A kernel visits every tile of 128 rows that is not empty, once for each group with rows in the tile.
An inner dimension of at most 2048 (`_MATRIX`) is not split. Then the kernel fetches a group's
matrix only once, even if the group's rows lie in two tiles, since it keeps a matrix while the
matrix's index stays the same. A row's sum is accumulated in float32 in an order that no other row
changes.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from rlvr_jax.ops.row_blocks import TILE
from rlvr_jax.types import Array

# The largest tiles: of a matrix, [inner, outer] in bfloat16, with half the outer size in float32;
# and of the sums of outer products. Two tiles of each fit into 16 MiB beside the kernels' other
# data.
_MATRIX, _SUMS = (2048, 1024), (1024, 768)


def multiply(
  rows: Array, kernels: Array, sizes: Array, *, transposed: bool, interpret: bool = False
) -> Array:
  """Multiplies each row by the matrix of its group; groups lie one after the other.

  Float32 products have the precision of `jax.default_matmul_precision`, since the kernel has no
  precision argument.

  Args:
    rows: [M, D], or [M, F] if transposed; M is a multiple of `TILE`.
    kernels: [E, D, F].
    sizes: i32[E], rows of each group; rows after the last group belong to no group.
    transposed: whether to multiply by the transposed matrices.
    interpret: whether to emulate the kernel without a TPU; slow, for tests.
  Returns:
    [M, F], or [M, D] if transposed, in the rows' dtype. Rows of no group may have any value, since
    the kernel does not write a tile without a group's row.
  """
  inner, outer = kernels.shape[1:][:: -1 if transposed else 1]
  largest_inner, largest_outer = _MATRIX
  tiling = (
    TILE,
    _tile_size(inner, largest_inner),
    _tile_size(outer, largest_outer * 2 // kernels.dtype.itemsize),
  )
  return gmm(
    rows,
    kernels,
    sizes,
    preferred_element_type=rows.dtype,
    tiling=tiling,
    transpose_rhs=transposed,
    interpret=interpret,
  )


def multiply_outer(
  rows: Array, columns: Array, sizes: Array, *, dtype: jnp.dtype, interpret: bool = False
) -> Array:
  """For each group, the sum of the outer products of two sets of rows: [E, D, F] in `dtype`.

  Args:
    rows: [M, D].
    columns: [M, F].
    sizes, interpret: as for `multiply`.
    dtype: the dtype of the sums.
  """
  sizes_of_tile = map(_tile_size, (rows.shape[1], columns.shape[1]), _SUMS)
  return tgmm(
    rows.T,
    columns,
    sizes,
    preferred_element_type=dtype,
    tiling=(TILE, *sizes_of_tile),
    interpret=interpret,
  )


def _tile_size(size: int, largest: int) -> int:
  """The largest multiple of 128 up to `largest` that divides `size`, else min(size, largest)."""
  divisors = [tile for tile in range(128, largest + 1, 128) if size % tile == 0]
  return max(divisors, default=min(size, largest))
