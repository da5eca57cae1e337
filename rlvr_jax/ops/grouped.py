"""Products of rows with the matrix of their group: one function, three implementations.

Rows are sorted by group, so that a matrix is read for its group's rows only. `reference` is
`jax.lax.ragged_dot`. `blocks` is for CPUs: it splits the rows into blocks of equal size, each of
which holds rows of one group only. A loop multiplies each block by the matrix of the block's group.
At most one block per group is partly filled. On CPUs `ragged_dot` would multiply every row by every
matrix, and copy the rows once for each matrix. `megablox` is a kernel for TPUs.

Every implementation computes a row's product from the row and its matrix alone. In `blocks` the
number of rows in a product is fixed, so that neighboring rows and the sizes of groups do not change
the rounding of a row.

A row that belongs to no group may hold any value, also NaN, and no result depends on it. Rows
without a group are not cleared, since clearing takes a pass over all rows each time, which on TPUs
costs nearly as much as a product. Rows without a group are 0 only in `blocks`, where they also lie
between groups.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from absl import logging
from jax.custom_batching import sequential_vmap

from rlvr_jax.ops.row_blocks import TILE
from rlvr_jax.types import Array

KINDS = ("auto", "reference", "blocks", "megablox")

BLOCK = 32  # rows of a product on CPUs


class Groups(NamedTuple):
  """The rows of each group among M rows; rows between and after the groups are unused.

  E is the number of groups.
  """

  sizes: Array  # i32[E], number of rows
  starts: Array  # i32[E], index of the first row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Order:
  """The assignment of N tokens' choices, k per token, to M rows that are sorted by group."""

  groups: Groups
  rows: Array  # i32[N, k], the row of each choice; M: the token chose no group
  choices: Array  # i32[M], the choice of each row, as token·k + j; N·k: the row is unused
  # Whether groups begin at multiples of a block, so that unused rows lie between them.
  aligned: bool = dataclasses.field(metadata={"static": True})

  @property
  def chosen(self) -> Array:
    """Whether each choice is a group, bool[N, k]; False where the token chose no group."""
    return self.rows < len(self.choices)


def choose_products(wanted: str, *, platform: str, dtype: str) -> str:
  """Chooses the implementation of grouped products; `auto` chooses by platform.

  Args:
    wanted: one of `KINDS`, from config.model.overrides.expert_products.
    platform: "tpu", "gpu" or "cpu", of the devices that will run the network.
    dtype: the dtype that the network computes in.
  Returns:
    "reference", "blocks" or "megablox".
  Raises:
    ValueError: the requested implementation does not support this network or platform.
  """
  if wanted not in KINDS:
    raise ValueError(f"config.model.overrides.expert_products={wanted!r}; allowed: {list(KINDS)}")
  obstacle = None
  if platform != "tpu":
    obstacle = f"a TPU (here: platform={platform!r})"
  elif dtype not in ("bfloat16", "float32"):
    obstacle = f"compute_dtype bfloat16 or float32 (here: compute_dtype={dtype!r})"
  if wanted == "megablox" and obstacle:
    raise ValueError(
      f"config.model.overrides.expert_products='megablox' needs {obstacle}; meet this"
      " requirement, or choose one of ['auto', 'reference', 'blocks']"
    )
  if wanted != "auto":
    return wanted
  if not obstacle:
    return "megablox"
  if platform == "tpu":
    logging.warning("expert_products=auto takes the slower reference: megablox needs %s", obstacle)
  return "blocks" if platform == "cpu" else "reference"


def order_by_group(choices: Array, num_groups: int, *, kind: str) -> Order:
  """Sorts the choices of tokens by group, and within a group by token.

  Args:
    choices: i32[N, k], the distinct groups that each token has chosen; `num_groups` for no group.
    num_groups: E, the number of groups.
    kind: the result of `choose_products`.
  """
  chex.assert_rank(choices, 2)
  N, k = choices.shape
  M, alignment = _num_rows(N, k, num_groups, kind)
  flat = choices.reshape(-1).astype(jnp.int32)
  by_group = jnp.argsort(flat, stable=True).astype(jnp.int32)
  sorted_groups = flat[by_group]
  firsts = jnp.searchsorted(sorted_groups, jnp.arange(num_groups + 1)).astype(jnp.int32)
  sizes = jnp.diff(firsts)
  aligned = -(-sizes // alignment) * alignment
  starts = jnp.cumsum(aligned, dtype=jnp.int32) - aligned
  group = jnp.minimum(sorted_groups, num_groups - 1)
  row = starts[group] + jnp.arange(N * k, dtype=jnp.int32) - firsts[group]
  row = jnp.where(sorted_groups < num_groups, row, M)
  rows = jnp.zeros(N * k, jnp.int32).at[by_group].set(row, unique_indices=True)
  inverse = jnp.full(M, N * k, jnp.int32).at[row].set(by_group, mode="drop")
  return Order(Groups(sizes, starts), rows.reshape(N, k), inverse, aligned=alignment > 1)


def _num_rows(tokens: int, k: int, num_groups: int, kind: str) -> tuple[int, int]:
  """M, and the alignment of each group's first row; both static."""
  pairs = tokens * k
  if kind == "megablox":
    return -(-pairs // TILE) * TILE, 1
  if kind == "reference":
    return pairs, 1
  # A group has at most all tokens, and only its last block may be partly filled.
  blocks = min((pairs + num_groups * (BLOCK - 1)) // BLOCK, num_groups * -(-tokens // BLOCK))
  return blocks * BLOCK, BLOCK


@jax.custom_vjp
def to_rows(x: Array, order: Order) -> Array:
  """Copies tokens x[N, D] to the rows of their choices, [M, D]."""
  return _fill_rows(x, order.choices // order.rows.shape[1], order)


def _to_rows_backward(order: Order, gradient: Array) -> tuple[Array, None]:
  parts = from_rows(gradient, order)  # gathered: scattering would be slower
  parts = jnp.where(order.chosen[..., None], parts, 0)
  wide = jnp.promote_types(gradient.dtype, jnp.float32)
  return jnp.sum(parts, axis=1, dtype=wide).astype(gradient.dtype), None


to_rows.defvjp(lambda x, order: (to_rows(x, order), order), _to_rows_backward)


@jax.custom_vjp
def from_rows(rows: Array, order: Order) -> Array:
  """Gathers the rows [M, F] of each token's choices, [N, k, F]; arbitrary where not `chosen`."""
  return rows.at[order.rows].get(mode="clip")


def _from_rows_backward(order: Order, gradient: Array) -> tuple[Array, None]:
  flat = gradient.reshape(-1, gradient.shape[-1])
  return _fill_rows(flat, order.choices, order), None  # a row has one choice


from_rows.defvjp(lambda rows, order: (from_rows(rows, order), order), _from_rows_backward)


def _fill_rows(x: Array, indices: Array, order: Order) -> Array:
  """x[indices]; unused rows, whose indices are out of bounds, get 0 if the order is aligned."""
  return x.at[indices].get(mode="fill" if order.aligned else "clip", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(rows: Array, kernels: Array, groups: Groups, kind: str) -> Array:
  """Multiplies each row by the matrix of its group, in the rows' dtype.

  The gradient of the kernels has the kernels' dtype, so that devices add up float32 terms if the
  kernels are float32. Under `vmap`, products are computed one after the other.

  Args:
    rows: [M, D].
    kernels: [E, D, F], of any dtype; cast to the dtype of the rows.
    groups: the groups of the rows.
    kind: the result of `choose_products`.
  Returns:
    [M, F].
  """
  multiply = sequential_vmap(functools.partial(_PRODUCTS[kind].multiply, transposed=False))
  return multiply(rows, kernels, groups)


def _differentiate(
  kind: str, saved: tuple[Array, Array, Groups], gradient: Array
) -> tuple[Array, Array, None]:
  rows, kernels, groups = saved
  multiply, multiply_outer = _PRODUCTS[kind]
  multiply = sequential_vmap(functools.partial(multiply, transposed=True))
  multiply_outer = sequential_vmap(functools.partial(multiply_outer, dtype=kernels.dtype))
  return multiply(gradient, kernels, groups), multiply_outer(rows, gradient, groups), None


grouped_product.defvjp(
  lambda rows, kernels, groups, kind: (
    grouped_product(rows, kernels, groups, kind),
    (rows, kernels, groups),
  ),
  _differentiate,
)


class _Products(NamedTuple):
  """An implementation's functions for the products and for the gradient of the kernels."""

  # (rows [M, D], kernels [E, D, F], groups, transposed) → [M, F]. If `transposed`, the kernels are
  # transposed, and rows [M, F] give [M, D].
  multiply: Callable[..., Array]
  multiply_outer: Callable[..., Array]  # (rows [M, D], [M, F], groups, dtype) → [E, D, F]


# --- jax.lax.ragged_dot ---------------------------------------------------------------------------


def _ragged(rows: Array, kernels: Array, groups: Groups, transposed: bool) -> Array:
  kernels = kernels.astype(rows.dtype)
  kernels = kernels.mT if transposed else kernels
  return jax.lax.ragged_dot(rows, kernels, groups.sizes)


def _ragged_outer(rows: Array, columns: Array, groups: Groups, dtype: jnp.dtype) -> Array:
  numbers = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
  )
  return jax.lax.ragged_dot_general(
    rows, columns, groups.sizes, numbers, preferred_element_type=dtype
  )


# --- blocks ---------------------------------------------------------------------------------------


def _plan_blocks(groups: Groups, num_rows: int) -> tuple[Array, Array]:
  """The group of each block, and the number of blocks that have rows."""
  ends = groups.starts + -(-groups.sizes // BLOCK) * BLOCK
  first_rows = jnp.arange(0, num_rows, BLOCK)
  return jnp.searchsorted(ends, first_rows, side="right"), ends[-1] // BLOCK


def _block(x: Array, index: Array) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, index * BLOCK, BLOCK)


def _blocks(rows: Array, kernels: Array, groups: Groups, transposed: bool) -> Array:
  group_of, number = _plan_blocks(groups, len(rows))

  def multiply(index: Array, out: Array) -> Array:
    kernel = kernels[group_of[index]].astype(rows.dtype)
    product = _block(rows, index) @ (kernel.T if transposed else kernel)
    return jax.lax.dynamic_update_slice_in_dim(out, product, index * BLOCK, axis=0)

  width = kernels.shape[1 if transposed else 2]
  return jax.lax.fori_loop(0, number, multiply, jnp.zeros((len(rows), width), rows.dtype))


def _blocks_outer(rows: Array, columns: Array, groups: Groups, dtype: jnp.dtype) -> Array:
  group_of, number = _plan_blocks(groups, len(rows))

  def add(index: Array, out: Array) -> Array:
    product = jnp.matmul(
      _block(rows, index).T, _block(columns, index), preferred_element_type=dtype
    )
    return out.at[group_of[index]].add(product)

  shape = (len(groups.sizes), rows.shape[1], columns.shape[1])
  return jax.lax.fori_loop(0, number, add, jnp.zeros(shape, dtype))


# --- the kernel for TPUs --------------------------------------------------------------------------


def _megablox(rows: Array, kernels: Array, groups: Groups, transposed: bool) -> Array:
  from rlvr_jax.ops.megablox import multiply  # experimental in jax, so imported only on use

  return multiply(rows, kernels.astype(rows.dtype), groups.sizes, transposed=transposed)


def _megablox_outer(rows: Array, columns: Array, groups: Groups, dtype: jnp.dtype) -> Array:
  from rlvr_jax.ops.megablox import multiply_outer

  return multiply_outer(rows, columns, groups.sizes, dtype=dtype)


_PRODUCTS = {
  "reference": _Products(_ragged, _ragged_outer),
  "blocks": _Products(_blocks, _blocks_outer),
  "megablox": _Products(_megablox, _megablox_outer),
}
