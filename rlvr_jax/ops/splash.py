"""Flash attention on TPUs: the splash kernel that ships with jax, over rows of packed sequences.

It builds on `jax.experimental.pallas.ops.tpu.splash_attention`, whose constructors may change with
any release; tested with jax 0.7.2 and 0.10.2.

The kernel compares segment ids for equality only, which would hide a prompt from its rollouts. So a
segment is a prompt with all its rollouts, and a mask admits only the query's own rollout and its
prompt. The kernel computes this mask from the query's `q_sequence`: the query's index, its
rollout's start and its prompt's end, packed into 32 bits. The blocks to compute are chosen at run
time: the tables that the kernel prefetches are traced arrays.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from rlvr_jax.ops.row_blocks import (
  LONGEST_ROW,
  TILE,
  is_visible,
  splash_alignment,
  visible_blocks,
)
from rlvr_jax.types import Array, Rows

# The most queries and keys per block. With small blocks, more of them are skipped if rollouts are
# short. Large blocks are fetched less often. In the backward pass each block of keys writes a
# partial gradient of all queries, so that the bytes grow with the square of the row's length, and
# large blocks of keys write less. Blocks divide the row, so some lengths get smaller blocks.
_FORWARD = 512, 512
_BACKWARD = {8192: (512, 512), 32_768: (512, 768), LONGEST_ROW: (512, 2048)}  # for rows up to …


@dataclasses.dataclass(frozen=True)
class _Mask:
  """The mask that the kernel computes; hashed by its fields, so that equal masks compile once."""

  window: int | None
  length: int  # the row's length in tokens

  def __call__(self, q_sequence: Array, key: Array) -> Array:
    index_bits, multiple_bits, alignment = _bits(self.length)
    field = lambda shift, bits: (q_sequence >> shift) & ((1 << bits) - 1)
    starts = field(index_bits, multiple_bits) * alignment
    prompt_ends = field(index_bits + multiple_bits, multiple_bits) * alignment
    return is_visible(field(0, index_bits), starts, prompt_ends, key, self.window)


def _bits(length: int) -> tuple[int, int, int]:
  """The number of bits of an index in the row, that of index / alignment, and the alignment."""
  alignment = splash_alignment(length)
  return (length - 1).bit_length(), ((length - 1) // alignment).bit_length(), alignment


def splash_attention(
  queries: Array,
  keys: Array,
  values: Array,
  row: Rows,
  *,
  window: int | None,
  soft_cap: float | None,
  residual_name: str,
  interpret: bool = False,
) -> Array:
  """softmax(q·kᵀ) v within one row, for keys that are visible by `row_blocks.is_visible`.

  Args:
    queries: [N, L, H], already multiplied by the scale of the scores.
    keys, values: [K, L, H].
    row: arrays [L]; prompts end and rollouts start at multiples of `row_blocks.splash_alignment`.
    window, soft_cap: static; None if the layer has none.
    residual_name: `checkpoint_name` of the output and of the softmax's normalizers.
    interpret: whether to emulate the kernel without a TPU; slow, for tests.
  Returns:
    [N, L, H]; at padding, a mean of the values at padding.
  """
  forward, backward = _plan_forward(row, window), _plan_backward(row, window)
  q_sequence = _q_sequence(row)
  kernel = kernels.SplashAttentionKernel(
    forward.mask_info(q_sequence),
    None,  # unused: the mask of a separate kernel for the gradient of the queries
    backward.mask_info(q_sequence),
    block_sizes=kernels.BlockSizes(
      block_q=forward.q,
      block_kv=forward.kv,
      block_q_dkv=backward.q,
      block_kv_dkv=backward.kv,
      block_kv_dkv_compute=backward.kv,
      use_fused_bwd_kernel=True,
    ),
    is_mqa=False,
    save_residuals=False,
    mask_value=kernels.DEFAULT_MASK_VALUE,
    attn_logits_soft_cap=soft_cap,
    residual_checkpoint_name=residual_name,
    mask_function=_Mask(window, row.prompts.shape[0]),
    interpret=interpret,
  )
  segments = kernels.SegmentIds(row.prompts, row.prompts)
  return kernel(queries, keys, values, segment_ids=segments)  # type: ignore[return-value]


def _q_sequence(row: Rows) -> Array:
  """The kernel's `q_sequence`, i32[L]; padding sees nearby padding, so that no softmax is empty."""
  length = row.prompts.shape[0]
  index_bits, multiple_bits, alignment = _bits(length)
  index = jnp.arange(length, dtype=jnp.int32)
  padding = row.prompts < 0
  starts = jnp.where(padding, index, row.starts) // alignment
  prompt_ends = jnp.where(padding, 0, row.prompt_ends) // alignment
  return index | (starts << index_bits) | (prompt_ends << (index_bits + multiple_bits))


class _Plan(NamedTuple):
  """What a kernel does at each pair of a block of queries and a block of keys."""

  q: int  # tokens per block of queries
  kv: int  # tokens per block of keys
  runs: Array  # bool[L/q, L/kv], whether the pair is computed
  fetched: Array  # i32[L/q, L/kv], the block of keys (forward) or queries (backward) in memory

  def mask_info(self, q_sequence: Array) -> MaskInfo:
    return MaskInfo(
      data_next=self.fetched[None],
      mask_next=None,
      block_mask=self.runs.astype(jnp.int32)[None],
      partial_mask_blocks=None,
      q_sequence=q_sequence,  # type: ignore[arg-type]  # annotated for static masks alone
    )


def _plan_forward(row: Rows, window: int | None) -> _Plan:
  """The plan of the forward pass; a skipped step prefetches the keys of the next step that runs."""
  q, kv, runs = _block_pairs(row, window, *_FORWARD)
  step = jnp.arange(runs.size, dtype=jnp.int32)
  following = jax.lax.cummin(jnp.where(runs.ravel(), step, runs.size - 1), reverse=True)
  return _Plan(q, kv, runs, (following % runs.shape[1]).reshape(runs.shape))


def _plan_backward(row: Rows, window: int | None) -> _Plan:
  """The plan of the backward pass; skipped steps after the last that runs fetch no new block."""
  sizes = next(sizes for longest, sizes in _BACKWARD.items() if row.prompts.shape[0] <= longest)
  q, kv, runs = _block_pairs(row, window, *sizes)
  index = jnp.arange(runs.shape[0], dtype=jnp.int32)[:, None]
  following = jax.lax.cummin(jnp.where(runs, index, runs.shape[0]), axis=0, reverse=True)
  return _Plan(q, kv, runs, jnp.minimum(following, jnp.max(jnp.where(runs, index, 0), axis=0)))


def _block_pairs(row: Rows, window: int | None, max_q: int, max_kv: int) -> tuple[int, int, Array]:
  """The sizes of blocks, and the pairs to compute: pairs with a visible key, or on the diagonal."""
  L = row.prompts.shape[0]
  q, kv = _block_size(L, max_q), _block_size(L, max_kv)
  first_query, first_key = jnp.arange(0, L, q)[:, None], jnp.arange(0, L, kv)
  diagonal = (first_query < first_key + kv) & (first_key < first_query + q)
  return q, kv, visible_blocks(row, q, kv, window) | diagonal


def _block_size(length: int, largest: int) -> int:
  """The largest multiple of 128 up to `largest` that divides `length`, a multiple of 128."""
  return max(size for size in range(TILE, largest + 1, TILE) if length % size == 0)


class SplashCost(NamedTuple):
  """Cost of one layer's attention over some rows, in the forward and in the backward pass."""

  forward_flops: float
  backward_flops: float
  forward_bytes: float  # HBM traffic, including blocks that are fetched again
  backward_bytes: float
  operand_bytes: float  # queries, keys, values, the output and their gradients, counted once


def splash_cost(
  rows: Rows,
  *,
  num_heads: int,
  num_kv_heads: int,
  head_dim: int,
  window: int | None = None,
  item_bytes: int = 2,
) -> SplashCost:
  """The FLOPs and bytes of the kernels for these rows, counted over the steps of their grids.

  A block of an input is fetched if its index differs from the previous step's. A block of an output
  is written once for each run of consecutive steps that use it. The bytes include two
  operations outside the kernels, each of which moves as many bytes as an operand: the conversion of
  the layout of the softmax's log-normalizers, and the sum of the partial gradients of the queries.

  Args:
    rows: arrays i32[R, L].
    num_heads, num_kv_heads, head_dim: N, K and H on one device.
    window: the window of the layer.
    item_bytes: bytes of an element of queries, keys and values.
  """
  plans = [jax.jit(jax.vmap(lambda row, f=f: f(row, window)[2:])) for f in _PLANS]
  forward, backward = (jax.device_get(plan(rows)) for plan in plans)
  R, L = rows.prompts.shape
  N, K, H = num_heads, num_kv_heads, head_dim
  query_bytes, key_bytes = N * L * H * item_bytes, K * L * H * item_bytes
  lanes, sublanes = 128 * 4, 8 * 4  # bytes per token of normalizers, segment ids and the like
  total = np.zeros(4)
  for runs, fetched in zip(*forward, strict=True):
    q, kv = L // runs.shape[0], L // runs.shape[1]
    head = np.arange(N)[:, None, None] + np.zeros((1, *runs.shape), int)
    moved = 2 * query_bytes + 4 * N * L * lanes  # normalizers twice, segments, q_sequence
    moved += _changes(head // (N // K), fetched) * 2 * kv * H * item_bytes
    moved += _changes(0 * head, fetched) * kv * sublanes
    total += 4 * N * H * q * kv * runs.sum(), 0, moved, 0
  for runs, fetched in zip(*backward, strict=True):
    q, kv = L // runs.shape[0], L // runs.shape[1]
    head = np.arange(N)[:, None] + np.zeros((runs.shape[1], 1, runs.shape[0]), int)
    moved = _changes(head, fetched.T[:, None]) * 2 * q * (H * item_bytes + sublanes)
    moved += _changes(0 * head, fetched.T[:, None]) * 2 * q * sublanes
    moved += 4 * key_bytes + L * lanes  # keys, values and their gradients; segments
    moved += (2 * runs.shape[1] + 1) * query_bytes  # partial gradients, their sum
    moved += 2 * query_bytes  # the output and its gradient, for their product along H
    total += 0, 10 * N * H * q * kv * runs.sum(), 0, moved
  operands = R * (4 * query_bytes + 4 * key_bytes)
  return SplashCost._make([*total.tolist(), float(operands)])


_PLANS = _plan_forward, _plan_backward


def _changes(*indices: np.ndarray) -> int:
  """The number of steps that fetch: the first step, and steps with another block than before."""
  steps = np.stack([x.ravel() for x in np.broadcast_arrays(*indices)])
  return 1 + int(np.any(np.diff(steps, axis=1) != 0, axis=0).sum())
