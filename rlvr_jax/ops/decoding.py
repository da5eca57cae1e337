"""Attention of one query per slot over cached keys, read in blocks up to the longest slot.

A slot is one row of a batch that decodes. Its cache has three parts: the prompt, the response, and
the tokens staged since the burst of decoding steps began, which are written to the cache after it.
Blocks are accumulated in this order. A block in which a slot sees no key leaves its sums as they
are, to the bit, so that a row's result does not depend on how many blocks other rows need. `Cache`
is for XLA, `Pages` for a kernel on TPUs that reads of every slot its own blocks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from absl import logging

from rlvr_jax.types import Array

KINDS = ("auto", "blocks", "pages")

# Far below any score, and the initial peak far above it, so that exp(masked − peak) is exactly 0.
_MASKED, _LOWEST_PEAK = -1e30, -1e20

_LANES = 128  # of a TPU's registers
_STEPS = 16  # of a burst, at most; divides _TILE
_TILE = 32  # keys; XLA on CPU multiplies with 48 as slowly as with 96


class Blocks(NamedTuple):
  """Sizes of a part of a slot's cache; static."""

  size: int  # tokens per block
  number: int

  @classmethod
  def of(cls, tokens: int, wanted: int, steps: int) -> Blocks:
    """Room for so many tokens: one small block, or blocks of `wanted` tokens."""
    multiple = _TILE if tokens > _TILE else steps
    size = wanted if tokens > 2 * _TILE else -(-max(tokens, 1) // multiple) * multiple
    return cls(size, -(-tokens // size))

  @property
  def tokens(self) -> int:
    return self.size * self.number


class CacheShape(NamedTuple):
  """Sizes of a slot's cache; static.

  Attributes:
    prompt: for the prompt without its last token, the first to be decoded.
    response: for the response without the tokens of its last burst.
    steps: tokens of one burst; divides the blocks of the response.
  """

  prompt: Blocks
  response: Blocks
  steps: int

  @classmethod
  def of(cls, max_prompt_length: int, max_new_tokens: int) -> CacheShape:
    """The cache for S prompt and T response tokens: about 16 blocks, of 32 to 512 tokens.

    XLA on CPU copies a block before it reads it, but not where it is the only one of its part.
    """
    steps = min(_STEPS, max_new_tokens)
    wanted = min(max((max_prompt_length + max_new_tokens) // 16 // _TILE, 1) * _TILE, 512)
    cached_response = (max_new_tokens - 1) // steps * steps  # the last burst's are staged only
    prompt = Blocks.of(max(max_prompt_length - 1, 1), wanted, steps)
    return cls(prompt, Blocks.of(cached_response, wanted, steps), steps)

  @property
  def tokens(self) -> int:
    """Keys of a slot, staged ones included."""
    return self.prompt.tokens + self.response.tokens + self.steps


class Cache(NamedTuple):
  """Keys and values of one layer, as the matrix products need them.

  A block of all slots is contiguous for each head, so that reading it copies nothing else.
  """

  keys: Array  # [K, blocks, slots, H, block]; staged ones [K, slots, H, steps]
  values: Array  # [K, blocks, slots, block, H]; staged ones [K, slots, steps, H]

  @classmethod
  def zeros(cls, axes: tuple[int, ...], tokens: int, head_dim: int, dtype: Any) -> Cache:
    """A cache [*axes, H, tokens], [*axes, tokens, H] of zeros."""
    return cls(
      jnp.zeros((*axes, head_dim, tokens), dtype), jnp.zeros((*axes, tokens, head_dim), dtype)
    )

  @classmethod
  def of_prompts(cls, keys: Array, values: Array, block: int, dtype: Any) -> Cache:
    """Makes a cache [K, blocks, R, ...] of the keys and values [R, S, K, H] of R prompts."""
    R, S, K, H = keys.shape
    keys, values = (x.reshape(R, S // block, block, K, H).astype(dtype) for x in (keys, values))
    return cls(jnp.transpose(keys, (3, 1, 0, 4, 2)), jnp.transpose(values, (3, 1, 0, 2, 4)))

  def staged(self, key: Array, value: Array, step: Array) -> Cache:
    """A copy of staged keys and values with those of a token, both [slots, K, H]."""
    put = jax.lax.dynamic_update_slice_in_dim
    one = lambda x, like: jnp.swapaxes(x, 0, 1).astype(like.dtype)
    return Cache(
      put(self.keys, one(key, self.keys)[..., None], step, axis=3),
      put(self.values, one(value, self.values)[:, :, None], step, axis=2),
    )

  def flushed(self, staged: Cache, slot: Array, start: Array) -> Cache:
    """A copy with what a slot has staged written after its `start` tokens of response."""
    at = lambda *index: [jnp.asarray(i, jnp.int32) for i in index]  # of one type, also with x64
    put = jax.lax.dynamic_update_slice
    size = self.values.shape[3]
    block, offset = start // size, start % size
    of_slot = lambda x: jax.lax.dynamic_index_in_dim(x, slot, 1)[:, None]
    return Cache(
      put(self.keys, of_slot(staged.keys), at(0, block, slot, 0, offset)),
      put(self.values, of_slot(staged.values), at(0, block, slot, offset, 0)),
    )


class Pages(NamedTuple):
  """Keys and values of one layer, as the paged kernel reads them; otherwise as `Cache`."""

  keys: Array  # [K, blocks, slots, block, H]
  values: Array  # [K, blocks, slots, block, H]

  @classmethod
  def zeros(cls, axes: tuple[int, ...], tokens: int, head_dim: int, dtype: Any) -> Pages:
    """Pages [*axes, tokens, H] of zeros."""
    return cls(*(jnp.zeros((*axes, tokens, head_dim), dtype) for _ in cls._fields))

  @classmethod
  def of_prompts(cls, keys: Array, values: Array, block: int, dtype: Any) -> Pages:
    """Pages [K, blocks, R, ...] of the keys and values [R, S, K, H] of R prompts."""
    R, S, K, H = keys.shape
    blocks = (x.reshape(R, S // block, block, K, H).astype(dtype) for x in (keys, values))
    return cls(*(jnp.transpose(x, (3, 1, 0, 2, 4)) for x in blocks))

  def flushed(self, staged: Cache, slot: Array, start: Array) -> Pages:
    """A copy with what a slot has staged written after its `start` tokens of response."""
    size = self.values.shape[3]
    at = [jnp.asarray(i, jnp.int32) for i in (0, start // size, slot, start % size, 0)]
    of_slot = lambda x: jax.lax.dynamic_index_in_dim(x, slot, 1)[:, None]
    new = jnp.swapaxes(of_slot(staged.keys), 3, 4), of_slot(staged.values)
    put = jax.lax.dynamic_update_slice
    return Pages(*(put(x, part, at) for x, part in zip(self, new, strict=True)))


Part = Cache | Pages  # of what a layer has cached: of the prompts, or of the responses


class Reach(NamedTuple):
  """How far the slots' caches are filled at the start of a burst."""

  prompt: Array  # i32[slots], cached tokens of the prompt
  response: Array  # i32[slots], cached tokens of the response
  prompt_blocks: Array  # i32[], that some running slot has reached
  response_blocks: Array  # i32[]

  @classmethod
  def of(cls, shape: CacheShape, prompt: Array, response: Array, running: Array) -> Reach:
    """Of a slot that is not running nothing is read."""
    prompt, response = (jnp.where(running, lengths, 0) for lengths in (prompt, response))
    blocks = lambda lengths, part: -(-jnp.max(lengths) // part.size)
    return cls(prompt, response, blocks(prompt, shape.prompt), blocks(response, shape.response))


class _Sums(NamedTuple):
  """A softmax in progress."""

  peak: Array  # [K, slots, n], the largest score
  total: Array  # [K, slots, n], Σ exp(score − peak)
  mixed: Array  # [K, slots, n, H], Σ exp(score − peak)·v

  def add(self, scores: Array, values: Array) -> _Sums:
    """The sums with those of scores [K, slots, n, J] and values [K, slots, J, H]."""
    peak = jnp.maximum(self.peak, jnp.max(scores, axis=-1))
    weights, decay = jnp.exp(scores - peak[..., None]), jnp.exp(self.peak - peak)
    mixed = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=scores.dtype)
    total = self.total * decay + jnp.sum(weights, axis=-1)
    return _Sums(peak, total, self.mixed * decay[..., None] + mixed)

  def join(self, other: _Sums) -> _Sums:
    """The sums over the keys of both."""
    peak = jnp.maximum(self.peak, other.peak)
    mine, others = jnp.exp(self.peak - peak), jnp.exp(other.peak - peak)
    mixed = self.mixed * mine[..., None] + other.mixed * others[..., None]
    return _Sums(peak, self.total * mine + other.total * others, mixed)


def choose_cache(wanted: str, *, platform: str, head_dim: int, dtype: str, plain: bool) -> str:
  """How keys are cached and read; `auto` takes a TPU's kernel where it can, and says where not.

  Args:
    wanted: one of `KINDS`, config.sampling.cache.
    platform: "tpu", "gpu" or "cpu", of the devices that will run it.
    head_dim, dtype: of the network; dtype is the one it computes in.
    plain: whether no layer has a sliding window or a soft cap.
  Returns:
    "blocks", all read up to the longest slot, or "pages", each slot's up to its own length.
  Raises:
    ValueError: the kind named does not support this.
  """
  if wanted not in KINDS:
    raise ValueError(f"config.sampling.cache={wanted!r}; allowed: {list(KINDS)}")
  obstacle = _pages_obstacle(platform, head_dim, dtype, plain)
  if wanted == "pages" and obstacle:
    raise ValueError(
      f"config.sampling.cache={wanted!r} needs {obstacle}; change that, or choose one of"
      " ['auto', 'blocks']"
    )
  if wanted == "auto" and obstacle and platform == "tpu":
    logging.warning("config.sampling.cache=auto takes the slower blocks: pages need %s", obstacle)
  return "blocks" if wanted == "blocks" or obstacle else "pages"


def _pages_obstacle(platform: str, head_dim: int, dtype: str, plain: bool) -> str | None:
  if platform != "tpu":
    return f"a TPU (platform={platform!r})"
  if dtype != "bfloat16":
    return f"compute_dtype bfloat16, to which the kernel rounds (compute_dtype={dtype!r})"
  if head_dim % _LANES:
    return f"a head_dim that is a multiple of {_LANES} (head_dim={head_dim})"
  return None if plain else "layers without sliding window and soft cap"


def cached_attention(
  queries: Array,
  prompt: Part,
  response: Part,
  staged: Cache,
  reach: Reach,
  step: Array,
  *,
  scale: float,
  window: int,
  soft_cap: float | None = None,
) -> Array:
  """softmax(q·kᵀ·scale) v over a slot's prompt, its response, and what it has staged.

  Scores and sums are at least float32.

  Args:
    queries: [slots, N, H].
    prompt, response: of the layer; only blocks that a running slot has reached are read.
    staged: keys and values of the burst's tokens 0 … step.
    reach: of all slots at the start of the burst.
    step: i32[], number of the query's token in the burst.
    scale: factor on the scores, usually 1/√H.
    window: tokens a query looks back, itself included.
    soft_cap: c·tanh(score/c) where given (Gemma 2).
  Returns:
    [slots, N, H] in the queries' dtype.
  """
  chex.assert_rank([queries, prompt.keys, response.keys, staged.keys], [3, 5, 5, 4])
  slots, N, H = queries.shape
  K = staged.keys.shape[0]
  rows = jnp.transpose(queries.reshape(slots, K, N // K, H), (1, 0, 2, 3))
  dtype = jnp.promote_types(queries.dtype, jnp.float32)
  start = reach.prompt + reach.response  # position of the burst's first token

  def scores(keys: Array, positions: Array, exists: Array) -> Array:
    """[K, slots, n, J] of keys [K, slots, H, J] at positions i32[slots, J]."""
    found = jnp.matmul(rows, keys, preferred_element_type=dtype) * scale
    if soft_cap is not None:
      found = soft_cap * jnp.tanh(found / soft_cap)
    visible = exists & ((start + step)[:, None] - positions < window)
    return jnp.where(visible[None, :, None], found, _MASKED)

  zeros = jnp.zeros((K, slots, N // K), dtype)
  sums = _Sums(jnp.full_like(zeros, _LOWEST_PEAK), zeros, jnp.zeros((K, slots, N // K, H), dtype))
  for part, length, blocks, first in (
    (prompt, reach.prompt, reach.prompt_blocks, jnp.zeros_like(reach.prompt)),
    (response, reach.response, reach.response_blocks, reach.prompt),
  ):
    if isinstance(part, Pages):
      sums = _with_pages(sums, queries * scale, part, length)
    else:
      sums = _with_blocks(sums, scores, part, blocks, length, first)
  index = jnp.arange(staged.values.shape[2])
  sums = sums.add(scores(staged.keys, start[:, None] + index, index <= step), staged.values)
  out = sums.mixed / sums.total[..., None]
  return jnp.transpose(out, (1, 0, 2, 3)).reshape(slots, N, H).astype(queries.dtype)


def _with_blocks(
  sums: _Sums,
  scores: Callable[[Array, Array, Array], Array],
  part: Cache,
  blocks: Array,
  length: Array,
  first: Array,
) -> _Sums:
  """The sums with those of a part of the cache, whose first tokens are at positions `first`."""
  size = part.values.shape[3]

  def add_block(j: Array, sums: _Sums) -> _Sums:
    keys, values = (jax.lax.dynamic_index_in_dim(x, j, 1, keepdims=False) for x in part)
    index = j * size + jnp.arange(size)
    positions = first[:, None] + index
    return sums.add(scores(keys, positions, index < length[:, None]), values)

  return jax.lax.fori_loop(0, blocks, add_block, sums) if part.keys.size else sums


def _with_pages(sums: _Sums, queries: Array, part: Pages, length: Array) -> _Sums:
  """The same, of every slot's own pages."""
  from rlvr_jax.ops.paged import paged_sums  # experimental in jax: only where it is used

  return sums.join(_Sums(*paged_sums(queries, part, length))) if part.keys.size else sums
