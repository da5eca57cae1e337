"""Flash attention on TPUs: the splash kernel that ships with jax, over rows of packed sequences.

It builds on `jax.experimental.pallas.ops.tpu.splash_attention`, whose constructors may change with
any release; tested with jax 0.7.2 and 0.10.2.

The kernel's own segment ids test equality only, which hides a prompt from its rollouts. So a
segment is a prompt with all its rollouts, and a mask computed in the kernel from the query's
`q_sequence` (its index, its rollout's start and its prompt's end, packed into 31 bits) admits the
own rollout and the prompt. Which blocks run is data: the tables that the kernel prefetches are
traced arrays.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from rlvr_jax.ops.row_blocks import TILE, sees, visible_blocks
from rlvr_jax.types import Array, Rows

_INDEX_BITS, _TILE_BITS = 15, 8  # of rows of at most `LONGEST_ROW` tokens

# Tokens of queries and of keys per block, at most. Small blocks skip more where rollouts are short;
# large ones fetch less often, and of keys, in the backward pass, they write fewer partial gradients
# of the queries. A block divides the row, so that some lengths get smaller ones.
_FORWARD, _BACKWARD = (512, 512), (512, 768)


@dataclasses.dataclass(frozen=True)
class _Mask:
  """The mask that the kernel computes; hashed by its window, so that equal ones compile once."""

  window: int | None

  def __call__(self, q_sequence: Array, key: Array) -> Array:
    field = lambda shift, bits: (q_sequence >> shift) & ((1 << bits) - 1)
    starts = field(_INDEX_BITS, _TILE_BITS) * TILE
    prompt_ends = field(_INDEX_BITS + _TILE_BITS, _TILE_BITS) * TILE
    return sees(field(0, _INDEX_BITS), starts, prompt_ends, key, self.window)


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
  """softmax(q·kᵀ) v within one row, for keys that `row_blocks.sees` admits.

  Args:
    queries: [N, L, H], times the scale of the scores.
    keys, values: [K, L, H].
    row: arrays [L].
    window, soft_cap: static; None where the layer has none.
    residual_name: `checkpoint_name` of the output and of the softmax's normalisers.
    interpret: computes as the kernel does without a TPU; slow, for tests.
  Returns:
    [N, L, H]; of padding a mean of padding.
  """
  forward, backward = _forward_plan(row, window), _backward_plan(row, window)
  q_sequence = _q_sequence(row)
  kernel = kernels.SplashAttentionKernel(
    forward.mask_info(q_sequence),
    None,  # of a backward kernel for the queries alone; the fused one does all three
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
    mask_function=_Mask(window),
    interpret=interpret,
  )
  segments = kernels.SegmentIds(row.prompts, row.prompts)
  return kernel(queries, keys, values, segment_ids=segments)  # type: ignore[return-value]


def _q_sequence(row: Rows) -> Array:
  """i32[L]; a padding query sees the padding of its tile: no row of the softmax may be empty."""
  index = jnp.arange(row.prompts.shape[0], dtype=jnp.int32)
  padding = row.prompts < 0
  starts = jnp.where(padding, index, row.starts) // TILE
  prompt_ends = jnp.where(padding, 0, row.prompt_ends) // TILE
  return index | (starts << _INDEX_BITS) | (prompt_ends << (_INDEX_BITS + _TILE_BITS))


class _Plan(NamedTuple):
  """Work of a kernel for each pair of a block of queries and a block of keys."""

  q: int  # tokens per block of queries
  kv: int  # of keys
  runs: Array  # bool[L/q, L/kv]
  fetched: Array  # i32[L/q, L/kv], forward the block of keys in memory then, backward of queries

  def mask_info(self, q_sequence: Array) -> MaskInfo:
    return MaskInfo(
      data_next=self.fetched[None],
      mask_next=None,
      block_mask=self.runs.astype(jnp.int32)[None],
      partial_mask_blocks=None,
      q_sequence=q_sequence,  # type: ignore[arg-type]  # annotated for static masks alone
    )


def _forward_plan(row: Rows, window: int | None) -> _Plan:
  """Plans steps by blocks of keys; a skipped step prefetches for the next one that runs."""
  q, kv, runs = _runs(row, window, *_FORWARD)
  step = jnp.arange(runs.size, dtype=jnp.int32)
  following = jax.lax.cummin(jnp.where(runs.ravel(), step, runs.size - 1), reverse=True)
  return _Plan(q, kv, runs, (following % runs.shape[1]).reshape(runs.shape))


def _backward_plan(row: Rows, window: int | None) -> _Plan:
  """Plans steps by blocks of queries; steps after the last one that runs keep its blocks."""
  q, kv, runs = _runs(row, window, *_BACKWARD)
  index = jnp.arange(runs.shape[0], dtype=jnp.int32)[:, None]
  following = jax.lax.cummin(jnp.where(runs, index, runs.shape[0]), axis=0, reverse=True)
  return _Plan(q, kv, runs, jnp.minimum(following, jnp.max(jnp.where(runs, index, 0), axis=0)))


def _runs(row: Rows, window: int | None, most_q: int, most_kv: int) -> tuple[int, int, Array]:
  """Pairs of blocks with a visible key, and the diagonal, where padding sees itself."""
  L = row.prompts.shape[0]
  q, kv = _block(L, most_q), _block(L, most_kv)
  first_query, first_key = jnp.arange(0, L, q)[:, None], jnp.arange(0, L, kv)
  diagonal = (first_query < first_key + kv) & (first_key < first_query + q)
  return q, kv, visible_blocks(row, q, kv, window) | diagonal


def _block(length: int, most: int) -> int:
  """The largest multiple of 128 up to `most` that divides `length`, itself a multiple of 128."""
  return max(size for size in range(TILE, most + 1, TILE) if length % size == 0)


class SplashCost(NamedTuple):
  """Cost of one layer's attention over some rows, in the forward and in the backward pass."""

  forward_flops: float
  backward_flops: float
  forward_bytes: float  # of HBM, blocks fetched again included
  backward_bytes: float
  operand_bytes: float  # queries, keys, values, the output and their gradients, once


def splash_cost(
  rows: Rows,
  *,
  num_heads: int,
  num_kv_heads: int,
  head_dim: int,
  window: int | None = None,
  item_bytes: int = 2,
) -> SplashCost:
  """Counts what the kernels compute and move for these rows, from the steps of their grids.

  A block is fetched where its index differs from the step before, and written once per visit. The
  conversions around the kernels count where they are as large as an operand: the output's layout
  of the normalisers, and the sum of the partial gradients of the queries.

  Args:
    rows: arrays i32[R, L].
    num_heads, num_kv_heads, head_dim: N, K and H, of one device.
    window: of the layer.
    item_bytes: of an element of queries, keys and values.
  """
  plans = [jax.jit(jax.vmap(lambda row, f=f: f(row, window)[2:])) for f in _PLANS]
  forward, backward = (jax.device_get(plan(rows)) for plan in plans)
  R, L = rows.prompts.shape
  N, K, H = num_heads, num_kv_heads, head_dim
  of_queries, of_keys = N * L * H * item_bytes, K * L * H * item_bytes
  lanes, sublanes = 128 * 4, 8 * 4  # bytes per token of what kernels read besides the heads
  total = np.zeros(4)
  for runs, fetched in zip(*forward, strict=True):
    q, kv = L // runs.shape[0], L // runs.shape[1]
    head = np.arange(N)[:, None, None] + np.zeros((1, *runs.shape), int)
    moved = 2 * of_queries + 4 * N * L * lanes  # output's normalisers twice, segments, q_sequence
    moved += _changes(head // (N // K), fetched) * 2 * kv * H * item_bytes
    moved += _changes(0 * head, fetched) * kv * sublanes
    total += 4 * N * H * q * kv * runs.sum(), 0, moved, 0
  for runs, fetched in zip(*backward, strict=True):
    q, kv = L // runs.shape[0], L // runs.shape[1]
    head = np.arange(N)[:, None] + np.zeros((runs.shape[1], 1, runs.shape[0]), int)
    moved = _changes(head, fetched.T[:, None]) * 2 * q * (H * item_bytes + sublanes)
    moved += _changes(0 * head, fetched.T[:, None]) * 2 * q * sublanes
    moved += 4 * of_keys + L * lanes  # keys, values and their gradients; segments
    moved += (2 * runs.shape[1] + 1) * of_queries  # partial gradients, their sum
    moved += 2 * of_queries  # the output and its gradient, for their product along H
    total += 0, 10 * N * H * q * kv * runs.sum(), 0, moved
  operands = R * (4 * of_queries + 4 * of_keys)
  return SplashCost._make([*total.tolist(), float(operands)])


_PLANS = _forward_plan, _backward_plan


def _changes(*indices: np.ndarray) -> int:
  """Steps at which a block differs from that of the step before, the first included."""
  steps = np.stack([x.ravel() for x in np.broadcast_arrays(*indices)])
  return 1 + int(np.any(np.diff(steps, axis=1) != 0, axis=0).sum())
