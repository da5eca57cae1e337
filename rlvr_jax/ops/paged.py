"""Attention over cached keys on TPUs by jax's paged kernel: each slot reads up to its own length.

It builds on `jax.experimental.pallas.ops.tpu.paged_attention`, whose functions may change with any
release; tested with jax 0.10.2.

The softmax's peak and total are needed to join the sums over a slot's prompt, response and staged
keys. The library's own wrapper returns normalized outputs without these two arrays. So the kernel
is called directly, for all three of its outputs. A page is a block of the cache, and a slot has its
own pages: the page table is computed from the indices of pages. (experiments/benchmarks/README.md
estimates the savings of sharing a prompt's pages among its rollouts.)

The library's `ragged_paged_attention` has windows and soft caps, but returns only the output. It
keeps peak and total in scratch memory, so that its result cannot be joined with the staged keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as kernels

from rlvr_jax.ops.caches import Pages
from rlvr_jax.types import Array


def paged_sums(
  queries: Array, pages: Pages, lengths: Array, *, cores: int = 1
) -> tuple[Array, Array, Array]:
  """For each slot, the sums of an unnormalized softmax over the first tokens of the slot's pages.

  Keys and values are rounded to bfloat16, without loss for a network that computes in bfloat16.

  Args:
    queries: [slots, N, H], already multiplied by the scale of the scores.
    pages: the pages on this device.
    lengths: i32[slots], number of tokens to read.
    cores: number of cores of the device, which share the slots. One core computes all slots if
      this number does not divide the number of slots.
  Returns:
    The largest scores, f32[K, slots, N/K], −∞ for a slot without tokens; Σ exp(score − largest),
    f32[K, slots, N/K]; and Σ exp(score − largest)·v, f32[K, slots, N/K, H].
  """
  slots, N, H = queries.shape
  K, blocks, _, block, _ = pages.keys.shape
  page_table = jnp.arange(blocks) * slots + jnp.arange(slots)[:, None]
  first_buffer, is_first = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
  # If N/K heads do not fill tiles of 8 rows, each head takes its own tile, as in jax's wrapper.
  rows = (slots, N, H) if N // K % 8 == 0 else (slots, N, 1, H)
  flat = lambda x: x.reshape(K, blocks * slots, block, H)
  results = _make_program(rows, pages, cores if slots % cores == 0 else 1)(
    lengths,
    page_table.reshape(-1).astype(jnp.int32),
    first_buffer,
    is_first,
    queries.astype(jnp.float32).reshape(rows),
    flat(pages.keys),
    None,
    flat(pages.values),
    None,
  )
  by_head = lambda x: jnp.swapaxes(x.reshape(slots, K, N // K, H), 0, 1)
  out, peak, total = map(by_head, results)
  return peak[..., 0], total[..., 0], out * total


def paged_flops(queries: Sequence[int], pages: Sequence[int]) -> float:
  """FLOPs of the kernel if all pages are full: 4·N·H for every cached token of a slot.

  Args:
    queries: the shape [slots, N, …, H].
    pages: the shape [K, pages of all slots, block, H].
  """
  return 4.0 * queries[1] * queries[-1] * pages[1] * pages[2]


def _make_program(rows: tuple[int, ...], pages: Pages, cores: int) -> Callable[..., Any]:
  """Makes the kernel for queries of shape `rows`; it returns f32 outputs, peaks and totals."""
  slots, N, H = rows[0], rows[1], rows[-1]
  K, blocks, _, block, _ = pages.keys.shape
  heads, tile = N // K, [0] * (len(rows) - 2)
  head_spec = pl.BlockSpec(
    (None, heads, *[None] * (len(rows) - 3), H),
    lambda core, slot, head, *_: (slot * cores + core, head, *tile),
  )
  in_hbm = pl.BlockSpec(memory_space=pl.ANY)
  buffers = [pltpu.VMEM((2, 1, block, H), x.dtype) for x in pages]
  semaphores = [pltpu.SemaphoreType.DMA((2,))] * 2
  kernel = functools.partial(
    kernels.paged_flash_attention_kernel_inline_seq_dim,
    batch_size=slots,
    pages_per_sequence=blocks,
    pages_per_compute_block=1,
    mask_value=kernels.DEFAULT_MASK_VALUE,
    attn_logits_soft_cap=None,
    megacore_mode="batch" if cores > 1 else None,
  )
  grid = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=4,
    in_specs=[head_spec, in_hbm, None, in_hbm, None],  # None: scales of quantized pages
    out_specs=[head_spec] * 3,
    grid=(cores, slots // cores, K),
    scratch_shapes=(buffers[0], None, buffers[1], None, *semaphores),
  )
  order = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"))
  return pl.pallas_call(
    kernel,
    grid_spec=grid,
    compiler_params=order,
    out_shape=[jax.ShapeDtypeStruct(rows, jnp.float32)] * 3,
    name="paged_attention",
  )
