"""Grouped products on TPUs: the megablox kernels that ship with jax.

It builds on `jax.experimental.pallas.ops.tpu.megablox`, whose functions may change with any
release; tested with jax 0.7.2 and 0.10.2.

A kernel visits tiles of 128 rows, only those with rows, once for each group in them. A tile's whole
inner dimension is one product if it fits: then an expert whose rows lie in two tiles is fetched
once, since the kernel keeps a matrix while its index stays the same. A row's sum is accumulated in
float32 in an order that no other row changes.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from rlvr_jax.ops.row_blocks import TILE
from rlvr_jax.types import Array

# The largest tile of a matrix, [inner, outer]: 4 MiB in bfloat16, of which the kernel holds two.
_INNER, _OUTER = 2048, 1024


def multiply(
  rows: Array, kernels: Array, sizes: Array, *, transposed: bool, interpret: bool = False
) -> Array:
  """Multiplies each row by the matrix of its group; groups lie one after the other.

  Float32 products have the precision of `jax.default_matmul_precision`; the kernel takes none.

  Args:
    rows: [M, D], or [M, F] if transposed; M is a multiple of `TILE`.
    kernels: [E, D, F].
    sizes: i32[E], rows of each group; rows behind the last group belong to none.
    transposed: whether to multiply by the transposed matrices.
    interpret: whether to emulate the kernel without a TPU; slow, for tests.
  Returns:
    [M, F], or [M, D] if transposed, in the rows' dtype; 0 in rows of no group.
  """
  inner, outer = kernels.shape[1:][:: -1 if transposed else 1]
  out = gmm(
    rows,
    kernels,
    sizes,
    preferred_element_type=rows.dtype,
    tiling=_tiling(inner, outer),
    transpose_rhs=transposed,
    interpret=interpret,
  )
  # Tiles that the kernel does not visit are not written.
  return jnp.where(jnp.arange(len(rows))[:, None] < jnp.sum(sizes), out, 0)


def multiply_outer(
  rows: Array, columns: Array, sizes: Array, *, dtype: jnp.dtype, interpret: bool = False
) -> Array:
  """The sum of the outer products of two sets of rows, by group: [E, D, F] in `dtype`.

  Args:
    rows: [M, D].
    columns: [M, F].
    sizes, interpret: as for `multiply`.
    dtype: of the sums.
  """
  return tgmm(
    rows.T,
    columns,
    sizes,
    preferred_element_type=dtype,
    tiling=_tiling(rows.shape[1], columns.shape[1]),
    interpret=interpret,
  )


def _tiling(inner: int, outer: int) -> tuple[int, int, int]:
  return TILE, min(inner, _INNER), min(outer, _OUTER)
