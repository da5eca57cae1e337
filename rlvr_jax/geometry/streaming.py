"""The exact Gram matrix of the output head's per-rollout gradients, without a [B, D·V] array.

Rollout i's gradient with respect to the head's kernel is g_i = Σ_t h[i,t] ⊗ d[i,t], where h are the
hidden states. d is the derivative of −log π[y] with respect to the product of h and the kernel,
where y is the sampled token. The vocabulary is processed in blocks. A block computes its columns of
every g_i, and adds the B×B inner products of these columns to the sum. Hidden states stay in the
rows of the forward pass, and a position of a row is multiplied once for each block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlvr_jax.geometry import sampled
from rlvr_jax.geometry.base import FEATURES, GramContext, GramFn
from rlvr_jax.geometry.by_rollout import Spans, choose_tile, find_places, outer_sums
from rlvr_jax.ops.checks import check_choice, check_integer
from rlvr_jax.ops.logprobs import head_logits, product_gradient
from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array, Forward, Head, Mean, Metrics, Params, Sum, TrainBatch

_LANES = 128  # columns that an accelerator multiplies at once
_WIDEST = 512  # columns; in wider blocks, reading the hidden states is not the bottleneck
_BATCH_AXES = ("data", "fsdp")
# The kernel is split along `tensor`. With this axis first, a device's columns lie within the
# device's part of the kernel.
_COLUMN_AXES = ("tensor", "data")
_VOCABULARY_AXES = (*_COLUMN_AXES, "fsdp")


class _Tokens(NamedTuple):
  """Tokens of M micro-batches of R rows; tokens of one micro-batch are flat, [R·L, ...]."""

  hidden: Array  # [M, R, L, D]
  log_normalizers: Array  # f32[M, R, L]
  targets: Array  # i32[M, R, L]
  in_loss: Array  # bool[M, R, L]


class _Columns(NamedTuple):
  """Columns of the output head that one device processes."""

  head: Callable[[], Head]  # gives the head with only these columns of its kernel
  first: Array | int  # vocabulary index of the first column
  vocabulary: int  # V; columns from V on are padding


def streaming(*, feature: str = "score", block_elements: int = 2**22) -> GramFn:
  """The exact output-head Gram matrix, at the cost of 2 + B²/n head products.

  A head product is the product h·W of all hidden states h and the head's kernel W. n is the number
  of positions of the rows, B·T if each rollout is a row. g_i = Σ_t h ⊗ d, with derivatives d of
  −log π[y] with respect to h·W. For each block of the vocabulary, one product recomputes the
  logits, whose normalizer is known, and another product forms the block of every g_i. The inner
  products g_i · g_j cost B²/n head products. All products accumulate in float32 (float64 for
  float64 models); operands, including g_i, are in the model's compute dtype. The feature "sampled"
  costs about 2B/V head products, see `geometry.sampled`.

  On a mesh, the vocabulary is split over all devices. The hidden states are gathered over the data
  axes in the compute dtype, one micro-batch at a time. The [B, B] results are summed over devices;
  see `bytes_moved`.

  Args:
    feature: "score": g_i as above; "sampled": g_i = Σ_t h ⊗ (−onehot(y)), without the softmax.
    block_elements: number of elements that a block's largest array, [B, v, D] or [R·L, v], should
      not exceed. It sets the block's width v, of 128 to 512 columns. Each block reads the hidden
      states; with several micro-batches on a mesh, each block gathers them again. Wide blocks are
      faster on accelerators, and blocks that fit the caches are faster on CPUs. Blocks of "sampled"
      are columns of the hidden states, [n, d].
  Raises:
    ValueError: block_elements is below 1, or the feature is unknown.
  Source: methods of "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How
    to Make Them Matter" (arXiv:2606.05800), §3, without its [B, D·V] matrix.
  """
  check_integer("streaming", "block_elements", block_elements, low=1)
  check_choice("streaming", "feature", feature, FEATURES)
  return {"score": _make_score, "sampled": _make_sampled}[feature](block_elements)


def _make_score(block_elements: int) -> GramFn:
  def gram(
    trained: Params,
    frozen: Params,
    batch: TrainBatch,
    forward: Forward | None,
    context: GramContext,
  ) -> Array:
    assert forward is not None
    places = find_places(batch)
    tokens = _Tokens(forward.hidden, forward.log_normalizers, places.targets, places.in_loss)
    head = lambda: context.model.head(context.model.combine(trained, frozen))
    sums = functools.partial(
      _sum_over_blocks,
      tile=choose_tile(batch),
      temperature=context.temperature,
      block_elements=block_elements,
    )
    count = jnp.asarray(places.num_micro_batches)
    if context.mesh is None or context.mesh.size == 1:
      columns = _Columns(head, 0, head().kernel.shape[1])
      return sums(tokens, places.spans, count, columns, lambda x: x)
    return _on_mesh(sums, tokens, places.spans, count, head(), context.mesh)

  def cost(batch: TrainBatch, hidden: Array, kernel: Array, context: GramContext) -> Metrics:
    used = jnp.float32(1 if batch.packed is None else batch.packed.num_micro_batches)
    rollouts, one = batch.mask.shape[0] * batch.mask.shape[1], jnp.float32(1)
    moved = bytes_moved(
      hidden, kernel, context.mesh, rollouts=rollouts, block_elements=block_elements, used=used
    )
    products = 2 + rollouts**2 / (used * hidden[0, ..., 0].size)
    return {
      "gram/head_products": Mean(total=jnp.float32(products), weight=one),
      "gram/megabytes_moved": Sum(jnp.float32(moved / 1e6)),
    }

  return GramFn(gram, cost=cost)


def _make_sampled(block_elements: int) -> GramFn:
  def gram(
    trained: Params,
    frozen: Params,
    batch: TrainBatch,
    forward: Forward | None,
    context: GramContext,
  ) -> Array:
    assert forward is not None
    head = context.model.head(context.model.combine(trained, frozen))
    return sampled.sampled_gram(batch, forward, head, context, block_elements)

  def cost(batch: TrainBatch, hidden: Array, kernel: Array, context: GramContext) -> Metrics:
    products = sampled.head_products(batch, hidden, kernel, context.mesh, block_elements)
    moved = sampled.bytes_moved(hidden, context.mesh, rollouts=batch.rewards.size)
    return {
      "gram/head_products": Mean(total=jnp.float32(products), weight=jnp.float32(1)),
      "gram/megabytes_moved": Sum(jnp.float32(moved / 1e6)),
    }

  return GramFn(gram, cost=cost, feature="sampled")


def bytes_moved(
  hidden: Any,
  kernel: Any,
  mesh: Any,
  *,
  rollouts: int,
  block_elements: int = 2**22,
  used: Array | int = 1,
) -> Any:
  """Bytes that each device receives for one Gram matrix of `streaming`.

  A device receives the hidden states, log-normalizers, tokens and masks of the other devices; the
  rows of the head's kernel that other devices along `fsdp` hold; and the data of the final sum.
  This sum is a ring all-reduce of two rounds. With several micro-batches, hidden states,
  log-normalizers, tokens and masks are received again for each block of the vocabulary.

  Args:
    hidden: shape [M, R, L, D] and dtype of the final hidden states of the full batch.
    kernel: shape [D, V] of the head's kernel, split over (fsdp, tensor).
    mesh: None or a mesh with axes (data, fsdp, tensor).
    rollouts: B.
    block_elements: the value given to `streaming`.
    used: number of micro-batches that are not empty.
  """
  if mesh is None or mesh.size == 1:
    return 0
  M, R, L, D = hidden.shape
  itemsize = jnp.dtype(hidden.dtype).itemsize
  accumulator = jnp.promote_types(hidden.dtype, jnp.float32).itemsize
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  bytes_per_place = D * itemsize + accumulator + 4 + 1  # hidden, log-normalizer, token, mask
  columns = -(-kernel.shape[1] // mesh.size)
  width = _block_width(rollouts, R * L, D, columns, block_elements)
  times = 1 if M == 1 else used * -(-columns // width)
  gathered = times * float(R * L * bytes_per_place * (shards - 1) // shards)  # may exceed int32
  rows = D * (mesh.shape["fsdp"] - 1) // mesh.shape["fsdp"]
  sum_bytes = 2 * rollouts**2 * accumulator * (mesh.size - 1) // mesh.size
  return gathered + float(columns * rows * itemsize + sum_bytes)


def _on_mesh(sums, tokens, spans, count, head, mesh):
  """Splits the vocabulary over all devices; each device gathers the tokens."""
  vocabulary = head.kernel.shape[1]
  kernel = head.kernel.astype(tokens.hidden.dtype)
  kernel = jnp.pad(kernel, [(0, 0), (0, -vocabulary % mesh.size)])
  rows_split = kernel.shape[0] % mesh.shape["fsdp"] == 0

  def on_device(tokens, spans, count, kernel):
    if rows_split:  # reshards from some rows of many columns to all rows of fewer columns
      kernel = jax.lax.all_to_all(kernel, "fsdp", split_axis=1, concat_axis=0, tiled=True)
    first = jax.lax.axis_index(_VOCABULARY_AXES) * kernel.shape[1]
    columns = _Columns(lambda: head._replace(kernel=kernel), first, vocabulary)
    gather = lambda x: jax.lax.all_gather(x, _BATCH_AXES, tiled=True)
    partial = sums(tokens, spans, count, columns, gather)
    return jax.lax.psum(partial, _VOCABULARY_AXES)

  kernel_axes = ("fsdp", _COLUMN_AXES) if rows_split else (None, _VOCABULARY_AXES)
  kernel_spec = PartitionSpec(*kernel_axes)
  replicated = PartitionSpec()
  return jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(PartitionSpec(None, _BATCH_AXES), replicated, replicated, kernel_spec),
    out_specs=replicated,
    check_vma=False,  # a loop that starts from zeros on every device counts as replicated
  )(tokens, spans, count, kernel)


def _sum_over_blocks(
  tokens: _Tokens,
  spans: Spans,
  count: Array,
  columns: _Columns,
  gather: Callable[[Array], Array],
  *,
  tile: tuple[int, int | None],
  temperature: float,
  block_elements: int,
) -> Array:
  """Inner products of all rollouts over these columns, [B, B].

  Args:
    count: number of micro-batches that are not empty.
    gather: one device's rows → all devices' rows.
  """
  M, _, _, D = tokens.hidden.shape
  B = spans.firsts.shape[0]
  dtype = jnp.promote_types(tokens.hidden.dtype, jnp.float32)

  def load(index):
    flat = lambda x: gather(x[index]).reshape(-1, *x.shape[3:])
    loaded = jax.tree.map(flat, tokens)
    hidden = jnp.where(loaded.in_loss[:, None], loaded.hidden, jnp.zeros((), loaded.hidden.dtype))
    return loaded._replace(hidden=hidden)

  only_batch = load(0) if M == 1 else None  # gathered once
  size = (jax.eval_shape(load, 0) if only_batch is None else only_batch).in_loss.shape[0]
  num_columns = columns.head().kernel.shape[1]
  width = _block_width(B, size, D, num_columns, block_elements)

  def block(start, width):
    head = columns.head()  # inside the loop, so that a tied head transposes only the block
    part = jax.lax.dynamic_slice_in_dim(head.kernel, start, width, axis=1)
    head = head._replace(kernel=part)
    indices = columns.first + start + jnp.arange(width)

    def add(index, g):
      micro_batch = load(index) if only_batch is None else only_batch
      d = _derivatives(micro_batch, head, indices, columns.vocabulary, temperature)
      return outer_sums(g, d, micro_batch.hidden, spans, index, tile)

    g = jnp.zeros((B, width, D), dtype)
    g = add(0, g) if M == 1 else jax.lax.fori_loop(0, count, add, g)
    g = g.astype(tokens.hidden.dtype)
    return jnp.einsum("ivd,jvd->ij", g, g, precision=EXACT, preferred_element_type=dtype)

  num_blocks, rest = divmod(num_columns, width)
  add_block = lambda number, total: total + block(number * width, width)
  total = jax.lax.fori_loop(0, num_blocks, add_block, jnp.zeros((B, B), dtype))
  return total + block(num_blocks * width, rest) if rest else total


def _block_width(rollouts: int, places: int, width: int, columns: int, block_elements: int) -> int:
  """The columns per block: its largest array has at most `block_elements` numbers, if possible."""
  fitting = block_elements // max(rollouts * width, places) // _LANES * _LANES
  return min(max(fitting, _LANES), _WIDEST, columns)


def _derivatives(
  tokens: _Tokens, head: Head, indices: Array, vocabulary: int, temperature: float
) -> Array:
  """The derivatives d at every position for the columns `indices` of the vocabulary, [R·L, v].

  d = scale/τ · (1 − (z/c)²) · (softmax(z/τ) − onehot(y)) for logits z, soft cap c, temperature τ.
  """
  logits = head_logits(tokens.hidden, head)
  d = jnp.exp(logits / temperature - tokens.log_normalizers[:, None])
  d = product_gradient(d - (indices == tokens.targets[:, None]), logits, head, temperature)
  d = jnp.where(tokens.in_loss[:, None] & (indices < vocabulary), d, 0.0)
  return d.astype(tokens.hidden.dtype)
