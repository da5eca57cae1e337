"""Grouped-query attention within rows of packed sequences: one function, four implementations.

`reference` uses XLA's operations on any platform. It computes float32 scores block by block, and in
long rows skips blocks without a visible key. `whole` computes all scores of a row in one product,
for which a GPU launches few kernels. `splash` is the flash kernel for TPUs; `cudnn` is the kernel
for NVIDIA GPUs, which computes a row's full triangle of scores under a mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
from absl import logging
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from rlvr_jax.ops.row_blocks import (
  LONGEST_ROW,
  NO_WINDOW,
  TILE,
  is_visible,
  round_to_blocks,
  splash_alignment,
  visible_blocks,
)
from rlvr_jax.types import Array, Rows

KINDS = ("auto", "reference", "whole", "splash", "cudnn")
RESIDUALS = "attention"  # checkpoint_name of the backward pass's residuals besides its inputs

_BLOCK = TILE  # queries or keys per block, in the reference
DENSE_LENGTH = 1024  # tokens of a row from which the reference skips blocks
_DENSE_BLOCK = 64  # queries per block, in shorter rows
_MASKED = -1e30  # finite, so that no difference of two masked scores is NaN
_SPLASH_HEADS = (32, 64, 80, 96, 128, 256, 512)  # widths that were compiled for a TPU
_LONGEST_WIDE = 2**15  # tokens of a row for which blocks of the widest heads fit in bfloat16
_LONGEST_WHOLE = 2**11  # tokens of a row of `whole` as auto chooses it; scores grow with its square
_LONGEST_MASK = 2**14  # tokens of a row; its mask and the mask's gradient take half a GiB each


def row_attention(
  queries: Array,
  keys: Array,
  values: Array,
  rows: Rows,
  *,
  scale: float,
  window: int | None = None,
  slides: Array | bool = True,
  soft_cap: float | None = None,
  kind: str = "reference",
  mesh: Mesh | None = None,
) -> Array:
  """softmax(q·kᵀ·scale) v of each token over its own sequence, up to itself.

  On a mesh every device works on its own rows and heads; rows are split over (data, fsdp), heads
  over tensor.

  Args:
    queries: [R, L, N, H]: R rows of L tokens, N heads of width H.
    keys, values: [R, L, K, H]; each head is shared by N/K heads of queries, not copied.
    rows: the sequences in the rows.
    scale: factor on the scores, usually 1/√H.
    window: how many tokens of its sequence a query may attend to, including its own; None: all.
    slides: whether this layer has the window; may be traced, as in a scan over layers.
    soft_cap: c of c·tanh(score/c) (Gemma 2); None for no cap.
    kind: the result of `choose_attention`.
    mesh: None, or axes (data, fsdp, tensor); tensor divides K, and data · fsdp divides R.
  Returns:
    [R, L, N, H] in the queries' dtype; at padding, finite values that depend on padding only.
  """
  chex.assert_rank([queries, keys, values, *rows], [4, 4, 4, 2, 2, 2, 2])
  if window is None or slides is False:
    window, slides = None, True
  settings = dict(scale=scale, window=window, soft_cap=soft_cap)
  attend = functools.partial(_BY_KIND[kind], **settings)
  slides = jnp.asarray(slides)
  if mesh is None or mesh.size == 1:
    return attend(queries, keys, values, rows, slides)
  if keys.shape[2] % mesh.shape["tensor"]:
    raise ValueError(
      f"mesh.tensor={mesh.shape['tensor']} does not divide num_kv_heads={keys.shape[2]};"
      f" choose a divisor of {keys.shape[2]}"
    )
  heads = PartitionSpec(("data", "fsdp"), None, "tensor")
  return jax.shard_map(
    attend,
    mesh=mesh,
    in_specs=(heads, heads, heads, PartitionSpec(("data", "fsdp")), PartitionSpec()),
    out_specs=heads,
    check_vma=False,  # a loop that starts from zeros on every device counts as replicated
  )(queries, keys, values, rows, slides)


def choose_attention(
  wanted: str,
  *,
  platform: str,
  row_length: int,
  head_dims: Sequence[int],
  dtype: str,
  soft_cap: float | None = None,
) -> str:
  """Chooses the implementation of attention.

  `auto` chooses the device's kernel if the network allows it, otherwise "whole" in short rows on
  GPUs, otherwise "reference". If it chooses "reference" on an accelerator, it warns.

  Args:
    wanted: one of `KINDS`, from config.model.overrides.attention.
    platform: the platform of the devices that will run the network: "tpu", "gpu" or "cpu".
    row_length: the number of tokens of a row.
    head_dims: the head widths in the network's layers, each width once.
    dtype, soft_cap: compute dtype and soft cap of the network.
  Returns:
    One of `KINDS`, except "auto".
  Raises:
    ValueError: the requested implementation does not support this network or platform.
  """
  if wanted not in KINDS:
    raise ValueError(f"config.model.overrides.attention={wanted!r}; allowed: {list(KINDS)}")
  obstacles = {
    "splash": _splash_obstacle(platform, row_length, head_dims, dtype),
    "cudnn": _cudnn_obstacle(platform, row_length, head_dims, dtype, soft_cap),
  }
  if obstacle := obstacles.get(wanted):
    raise ValueError(
      f"config.model.overrides.attention={wanted!r} needs {obstacle}; meet this requirement, or"
      " choose one of ['auto', 'reference', 'whole']"
    )
  if wanted != "auto":
    return wanted
  for kernel, obstacle in obstacles.items():
    if not obstacle:
      return kernel
  if platform == "gpu" and row_length <= _LONGEST_WHOLE:
    return "whole"
  if platform == "gpu":
    logging.warning(
      "attention=auto takes the slower reference: cudnn needs %s, whole would take memory for all"
      " scores of rows of %d tokens",
      *(obstacles["cudnn"], row_length),
    )
  elif platform != "cpu":
    logging.warning(
      "attention=auto takes the slower reference: splash needs %s", obstacles["splash"]
    )
  return "reference"


def row_alignment(kind: str, length: int) -> int:
  """The alignment of prompts' ends and rollouts' starts in a row of `length` tokens."""
  return splash_alignment(length) if kind == "splash" else 1


def row_length(kind: str, least: int) -> int:
  """`least` tokens, rounded up so that an implementation's preferred blocks divide the row."""
  if kind == "splash":
    return round_to_blocks(least)
  short = _BLOCK if kind == "cudnn" else 1
  multiple = _BLOCK if least >= DENSE_LENGTH else short
  return -(-least // multiple) * multiple


def longest_row(kind: str) -> float:
  """The largest number of tokens that a row may have; ∞ without a limit."""
  limits = {"splash": LONGEST_ROW, "cudnn": _LONGEST_MASK, "whole": _LONGEST_WHOLE}
  return limits.get(kind, math.inf)


def _splash_obstacle(platform, row_length, head_dims, dtype):
  if platform != "tpu":
    return f"a TPU (here: platform={platform!r})"
  if dtype not in ("bfloat16", "float32"):
    return f"compute_dtype bfloat16 or float32 (here: compute_dtype={dtype!r})"
  for head_dim in head_dims:
    if head_dim not in _SPLASH_HEADS:
      return f"head_dim in {_SPLASH_HEADS} (here: head_dim={head_dim})"
  if max(head_dims, default=0) > 256 and (dtype != "bfloat16" or row_length > _LONGEST_WIDE):
    return (
      f"compute_dtype bfloat16 and rows of at most {_LONGEST_WIDE} tokens, for a head_dim above 256"
      f" (here: head_dim={max(head_dims)}, compute_dtype={dtype!r}, row length {row_length})"
    )
  if row_length % TILE or row_length > LONGEST_ROW:
    return (
      f"rows of a multiple of {TILE} tokens, at most {LONGEST_ROW} (here: row length {row_length};"
      " lower config.max_response_length, config.max_prompt_length or"
      " config.batch.tokens_per_row)"
    )
  return None


def _cudnn_obstacle(platform, row_length, head_dims, dtype, soft_cap):
  if platform != "gpu":
    return f"an NVIDIA GPU (here: platform={platform!r})"
  if dtype != "bfloat16":
    return f"compute_dtype bfloat16 (here: compute_dtype={dtype!r})"
  for head_dim in head_dims:
    if head_dim % 8 or head_dim > 128:
      # On newer GPUs jax allows 256 as well.
      return f"a head_dim that is a multiple of 8, at most 128 (here: head_dim={head_dim})"
  if soft_cap is not None:
    return f"scores without a soft cap (here: attention_soft_cap={soft_cap})"
  if row_length > _LONGEST_MASK:
    return f"rows of at most {_LONGEST_MASK} tokens (here: row length {row_length})"
  return None


# --- the flash kernels ----------------------------------------------------------------------------


def _splash(queries, keys, values, rows, slides, *, scale, window, soft_cap):
  from rlvr_jax.ops.splash import splash_attention  # experimental in jax, so imported only on use

  kernel = functools.partial(splash_attention, soft_cap=soft_cap, residual_name=RESIDUALS)

  def attend_row(row):
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in row[:3])
    attend = functools.partial(kernel, (q * scale).astype(q.dtype), k, v, row[3])
    return jnp.swapaxes(_attend_in_window(attend, window, slides), 0, 1)

  return jax.lax.map(attend_row, (queries, keys, values, rows))


def _attend_in_window(attend: Callable, window: int | None, slides: Array) -> Array:
  """Calls one of two kernels, with the window or without it, since a kernel's window is fixed."""
  if window is None:
    return attend(window=None)
  return jax.lax.cond(slides, lambda: attend(window=window), lambda: attend(window=None))


def _cudnn(queries, keys, values, rows, slides, *, scale, window, soft_cap, implementation="cudnn"):
  if soft_cap is not None:
    raise ValueError(f"soft_cap={soft_cap}: cuDNN has no soft cap; choose kind = 'reference'")
  whole = slice(0, queries.shape[1])
  visible = _visible_keys(rows, whole, whole, _layer_window(window, slides))
  visible |= jnp.eye(whole.stop, dtype=bool)  # padding attends to itself
  operands = queries, keys, values
  # The output is not saved under `RESIDUALS`, since cuDNN's backward pass needs more than that.
  return jax.nn.dot_product_attention(
    *operands, mask=visible[:, None], is_causal=True, scale=scale, implementation=implementation
  )


# --- the reference --------------------------------------------------------------------------------


def _reference(queries, keys, values, rows, slides, *, scale, window, soft_cap):
  window = _layer_window(window, slides)
  if queries.shape[1] < DENSE_LENGTH:
    return _attend_densely(queries, keys, values, rows, window, scale, soft_cap)
  # Row by row, since each has its own blocks to work through.
  window = jnp.asarray(NO_WINDOW) if window is None else window
  attend_row = lambda row: _attend(*row, window, scale, soft_cap)
  return jax.lax.map(attend_row, (queries, keys, values, rows))


def _whole(queries, keys, values, rows, slides, *, scale, window, soft_cap):
  window = _layer_window(window, slides)
  length = queries.shape[1]
  return _attend_densely(queries, keys, values, rows, window, scale, soft_cap, block_size=length)


def _attend_densely(queries, keys, values, rows, window, scale, soft_cap, block_size=_DENSE_BLOCK):
  """Attends in all rows at once, by blocks of queries, without scores of keys after the block."""
  R, L, N, H = queries.shape
  K = keys.shape[2]
  # Queries that share a key head become rows of one matrix: [R, K, L·n, H], n = N/K.
  grouped = jnp.swapaxes(queries.reshape(R, L, K, N // K, H), 1, 2)
  keys, values = jnp.transpose(keys, (0, 2, 3, 1)), jnp.swapaxes(values, 1, 2)

  def attend_block(first):
    block, until = slice(first, first + block_size), slice(min(first + block_size, L))
    q = grouped[:, :, block]
    score = _product(q.reshape(R, K, -1, H), keys[..., until]) * scale
    if soft_cap is not None:
      score = soft_cap * jnp.tanh(score / soft_cap)
    score = score.reshape(*q.shape[:-1], -1)
    visible = _visible_keys(rows, block, until, window)
    score = jnp.where(visible[:, None, :, None], score, _MASKED)
    peak = jax.lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
    weights = jnp.exp(score - peak)  # all 1 at padding, which sees no key
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.astype(values.dtype).reshape(R, K, -1, score.shape[-1])
    mixed = _product(weights, values[:, :, until])
    return mixed.reshape(q.shape) / total

  out = jnp.concatenate([attend_block(first) for first in range(0, L, block_size)], axis=2)
  out = jnp.swapaxes(out, 1, 2).reshape(queries.shape).astype(queries.dtype)
  return checkpoint_name(out, RESIDUALS)


def _layer_window(window: int | None, slides: Array) -> Array | None:
  """The window of a layer: `window` if the layer slides, else NO_WINDOW; None if none slides."""
  return None if window is None else jnp.where(slides, window, NO_WINDOW)


def _visible_keys(rows: Rows, queries: slice, keys: slice, window: Array | None) -> Array:
  """Whether keys are visible to queries, bool[R, queries, keys]; padding sees no key."""
  index = jnp.arange(rows.prompts.shape[1])
  prompts, _, starts, ends = (field[:, queries, None] for field in rows)
  visible = is_visible(index[queries, None], starts, ends, index[keys], window)
  return visible & (prompts == rows.prompts[:, None, keys]) & (prompts >= 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(queries, keys, values, row, window, scale, soft_cap):
  """Attends in one row, [L, N, H], by blocks of scores, which the backward pass recomputes."""
  return _attend_forward(queries, keys, values, row, window, scale, soft_cap)[0]


def _attend_forward(queries, keys, values, row, window, scale, soft_cap):
  K = keys.shape[1]
  dtype = jnp.promote_types(queries.dtype, jnp.float32)
  scores = functools.partial(_scores, dtype=dtype, window=window, scale=scale, soft_cap=soft_cap)
  key_blocks, value_blocks, tokens = _split(keys, K), _split(values, K), _split_tokens(row)

  def attend_block(block):
    q, q_tokens, visits, count = block
    n = q.shape[1] // _BLOCK

    def visit(t, carry):
      peak, total, mixed = carry
      j = visits[t]
      score, visible, _ = scores(q, key_blocks[j], q_tokens, _at(tokens, j))
      higher = jnp.maximum(peak, jnp.max(score, axis=-1, keepdims=True))
      weights = jnp.where(visible, jnp.exp(score - higher), 0)
      decay = jnp.exp(peak - higher)
      total = total * decay + jnp.sum(weights, axis=-1, keepdims=True)
      return higher, total, mixed * decay + _product(weights.astype(values.dtype), value_blocks[j])

    shape = (K, n * _BLOCK, 1)
    start = (jnp.full(shape, _MASKED, dtype), jnp.zeros(shape, dtype), jnp.zeros(q.shape, dtype))
    peak, total, mixed = jax.lax.fori_loop(0, count, visit, start)
    total = jnp.where(total > 0, total, 1)  # 0 at padding, which sees no key
    return mixed / total, peak + jnp.log(total)

  blocks = (_split(queries, K), tokens, *_visits(row, window))
  out, normalizers = jax.lax.map(attend_block, blocks)
  out = checkpoint_name(_join(out).astype(queries.dtype), RESIDUALS)
  normalizers = checkpoint_name(normalizers, RESIDUALS)
  return out, (queries, keys, values, row, window, out, normalizers)


def _attend_backward(scale, soft_cap, residuals, gradient):
  queries, keys, values, row, window, out, normalizers = residuals
  K, dtype = keys.shape[1], normalizers.dtype
  scores = functools.partial(_scores, dtype=dtype, window=window, scale=scale, soft_cap=soft_cap)
  key_blocks, value_blocks, tokens = _split(keys, K), _split(values, K), _split_tokens(row)
  along = jnp.sum(gradient.astype(dtype) * out.astype(dtype), axis=-1, keepdims=True)

  def differentiate_block(carry, block):
    q, d_out, along, normalizer, q_tokens, visits, count = block

    def visit(t, carry):
      d_keys, d_values, d_q = carry
      j = visits[t]
      score, visible, slope = scores(q, key_blocks[j], q_tokens, _at(tokens, j))
      weights = jnp.where(visible, jnp.exp(score - normalizer), 0)
      d_weights = _product(d_out, value_blocks[j].mT)
      d_score = (weights * (d_weights - along) * slope * scale).astype(q.dtype)
      d_values = d_values.at[j].add(_product(weights.astype(d_out.dtype).mT, d_out))
      d_keys = d_keys.at[j].add(_product(d_score.mT, q))
      return d_keys, d_values, d_q + _product(d_score, key_blocks[j])

    start = (*carry, jnp.zeros(q.shape, dtype))
    d_keys, d_values, d_q = jax.lax.fori_loop(0, count, visit, start)
    return (d_keys, d_values), d_q

  split = lambda x: _split(x, K)
  blocks = (split(queries), split(gradient), split(along), normalizers, tokens)
  start = (jnp.zeros(key_blocks.shape, dtype),) * 2
  gradients, d_queries = jax.lax.scan(differentiate_block, start, (*blocks, *_visits(row, window)))
  join = lambda x, like: _join(x).astype(like.dtype)
  d_keys, d_values = map(join, gradients, (keys, values))
  return join(d_queries, queries), d_keys, d_values, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _scores(q, k, q_tokens, k_tokens, *, dtype, window, scale, soft_cap):
  """Scores of queries and keys of two blocks, the keys' visibility, and ∂score/∂(q·kᵀ·scale).

  Queries are [K, n·B, H], keys [K, B, H], results [K, n·B, B].
  """
  score, slope = _product(q, k.mT) * scale, 1
  if soft_cap is not None:
    tanh = jnp.tanh(score / soft_cap)
    score, slope = soft_cap * tanh, 1 - tanh**2
  (q_prompt, starts, prompt_ends, i), (k_prompt, _, _, j) = q_tokens, k_tokens
  visible = is_visible(i[:, None], starts[:, None], prompt_ends[:, None], j, window)
  visible &= (q_prompt[:, None] == k_prompt) & (k_prompt >= 0)
  visible = jnp.tile(visible, (q.shape[1] // _BLOCK, 1))
  return jnp.where(visible, score, _MASKED), visible, slope


def _product(x: Array, y: Array) -> Array:
  dtype = jnp.promote_types(x.dtype, jnp.float32)
  return jnp.matmul(x, y, preferred_element_type=dtype)


def _visits(row: Rows, window: Array) -> tuple[Array, Array]:
  """For each block of queries, the key blocks, visible ones first, and how many are visible.

  Returns:
    Indices of key blocks, i32[blocks, blocks], and numbers, i32[blocks].
  """
  visible = visible_blocks(row, _BLOCK, _BLOCK, window)
  return jnp.argsort(~visible, axis=1, stable=True), jnp.sum(visible, axis=1)


def _split_tokens(row: Rows) -> tuple[Array, ...]:
  """The prompt, start, prompt's end and index of each token, in blocks: [blocks, B] each."""
  index = jnp.arange(row.prompts.shape[0], dtype=row.prompts.dtype)
  fields = (row.prompts, row.starts, row.prompt_ends, index)
  return tuple(x.reshape(-1, _BLOCK) for x in fields)


def _at(tree, index):
  return jax.tree.map(lambda x: x[index], tree)


def _split(x: Array, K: int) -> Array:
  """[L, K·n, H] → [blocks, K, n·B, H]: heads that share a key head become rows of one matrix."""
  L, heads, H = x.shape
  x = x.reshape(-1, _BLOCK, K, heads // K, H)
  return jnp.transpose(x, (0, 2, 3, 1, 4)).reshape(L // _BLOCK, K, -1, H)


def _join(x: Array) -> Array:
  """The inverse of `_split`."""
  blocks, K, _, H = x.shape
  x = jnp.transpose(x.reshape(blocks, K, -1, _BLOCK, H), (0, 3, 1, 2, 4))
  return x.reshape(blocks * _BLOCK, -1, H)


_BY_KIND: dict[str, Callable] = {
  "reference": _reference,
  "whole": _whole,
  "splash": _splash,
  "cudnn": _cudnn,
}
