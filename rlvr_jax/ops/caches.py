"""KV caches for decoding, one row per slot; `choose_cache` chooses the kind of cache for a device.

A slot is one row of the batch that the sampler decodes. The cache of a slot has three parts: the
prompt, the response, and the tokens staged since the current burst of decoding steps began. After
the burst, staged tokens are written to the response's part. `Cache` is for XLA: a burst reads the
same number of blocks (`Read`) for all slots. This number is fixed at compile time, so that no layer
needs a loop over blocks. `Pages` is for a TPU kernel that reads only the blocks that each slot has
filled.

A `Cache` may keep 8-bit integers, with one scale per token and head. Keys and values are rounded as
soon as they are computed, even while their token is only staged. So the values that later tokens
read do not depend on where bursts end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from rlvr_jax.types import Array

KINDS = ("auto", "blocks", "pages")
FORMATS = ("", "int8")  # of cached keys and values; "": the dtype that the network computes in

_LARGEST = 127  # of int8, so that a sign changes no magnitude
_LANES = 128  # the width of a TPU's registers
_STEPS = 16  # the most decoding steps of a burst; divides _TILE
_TILE = 32  # keys; XLA on CPU multiplies with 48 as slowly as with 96
_BLOCKS = 4  # at most, in each part of a `Cache`; a burst reads one, two or all of them


class Blocks(NamedTuple):
  """Sizes of a part of a slot's cache; static."""

  size: int  # tokens per block
  number: int

  @classmethod
  def of(cls, tokens: int, block_size: int, steps: int) -> Blocks:
    """The blocks that hold `tokens` tokens: one small block, or blocks of `block_size` tokens."""
    multiple = _TILE if tokens > _TILE else steps
    size = block_size if tokens > 2 * _TILE else -(-max(tokens, 1) // multiple) * multiple
    return cls(size, -(-tokens // size))

  @property
  def tokens(self) -> int:
    return self.size * self.number

  def read_for(self, tokens: int) -> int:
    """The number of blocks to read for the first `tokens` tokens: a quarter, half or all."""
    numbers = (-(-self.number // 4), -(-self.number // 2), self.number)
    return next(number for number in numbers if number * self.size >= min(tokens, self.tokens))


class Read(NamedTuple):
  """How many blocks of every slot a burst reads, from the first block on; static."""

  prompt: int
  response: int


class CacheShape(NamedTuple):
  """Sizes of a slot's cache; static.

  Attributes:
    prompt: blocks for all tokens of the prompt but the last, which the first decoding step reads.
    response: blocks for the response without the tokens of its last burst.
    steps: decoding steps of one burst; divides the size of the response's blocks.
  """

  prompt: Blocks
  response: Blocks
  steps: int

  @classmethod
  def of(
    cls,
    max_prompt_length: int,
    max_new_tokens: int,
    *,
    has_replies: bool = False,
    pages: bool = False,
  ) -> CacheShape:
    """The cache for S prompt and T response tokens.

    Up to 64 cached tokens of a prompt or response are one block. More tokens are split into at most
    four blocks of at least 32 tokens; with `pages`, into pages of about (S + T) / 16 tokens, but at
    least 32 and at most 512. In dialogues (`has_replies`) turns begin and end within bursts. Steps
    of a burst are lost if they come before a turn's first token or after a turn's last token. So in
    dialogues a burst has at most T / 8 tokens, but at least one.
    """
    steps = min(_STEPS, max_new_tokens)
    if has_replies:  # a power of two, as _STEPS
      steps = min(_STEPS, 1 << max(max_new_tokens // 8, 1).bit_length() - 1)
    page = min(max((max_prompt_length + max_new_tokens) // 16 // _TILE, 1) * _TILE, 512)
    block_size = lambda tokens: page if pages else -(-tokens // (_BLOCKS * _TILE)) * _TILE
    cached_prompt = max(max_prompt_length - 1, 1)
    cached_response = (max_new_tokens - 1) // steps * steps  # the last burst stays staged
    return cls(
      Blocks.of(cached_prompt, block_size(cached_prompt), steps),
      Blocks.of(cached_response, block_size(cached_response), steps),
      steps,
    )

  @property
  def tokens(self) -> int:
    """The number of keys that a slot has room for, including staged keys."""
    return self.prompt.tokens + self.response.tokens + self.steps

  @property
  def everything(self) -> Read:
    """A `Read` of all blocks."""
    return Read(self.prompt.number, self.response.number)

  @property
  def copied_tokens(self) -> int:
    """The largest number of keys per slot that a burst copies.

    A burst that reads only some blocks of the prompt copies the blocks that it reads. The same
    holds for the response.
    """
    parts = (self.prompt, self.response)
    return sum(-(-part.number // 2) * part.size for part in parts if part.number > 1)


def round_to_int8(x: Array) -> tuple[Array, Array]:
  """Rounds each vector along the last axis: x ≈ s·q with s = max |x| / 127 and q = round(x / s).

  Args:
    x: [..., H].
  Returns:
    q, int8 [..., H], and s, f32 [...]; both are 0 for a vector of zeros.
  Source: absmax rounding, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale"
    (arXiv:2208.07339), §2.
  """
  x = x.astype(jnp.float32)
  largest = jnp.max(jnp.abs(x), axis=-1)
  # One quotient per vector, then products: XLA does not rewrite this, so all programs round alike.
  factors = jnp.where(largest == 0, 0, _LARGEST / largest)
  return jnp.rint(x * factors[..., None]).astype(jnp.int8), largest * (1 / _LARGEST)


def read_back(x: Array) -> Array:
  """The values s·q that attention reads from an int8 cache of vectors x[..., H], in x's dtype."""
  rounded, scales = round_to_int8(x)
  return (rounded * scales[..., None]).astype(x.dtype)


class Cache(NamedTuple):
  """Keys and values of one layer, as the matrix products need them.

  For each head, the i-th blocks of all slots are contiguous. So reading some blocks does not copy
  the other blocks. With dtype int8, keys and values are rounded by `round_to_int8`. K is the number
  of key heads, and H their width.
  """

  keys: Array  # [K, blocks, slots, H, block]; staged keys [K, slots, H, steps]
  values: Array  # [K, blocks, slots, block, H]; staged values [K, slots, steps, H]
  key_scales: Array | None = None  # f32 [K, blocks, slots, block], or [K, slots, steps]; for int8
  value_scales: Array | None = None  # as `key_scales`

  @classmethod
  def of(cls, keys: Array, values: Array, dtype: Any) -> Cache:
    """Makes a cache of keys and values [..., tokens, H]."""
    if jnp.dtype(dtype) != jnp.int8:
      return cls(jnp.swapaxes(keys, -1, -2).astype(dtype), values.astype(dtype))
    (keys, key_scales), (values, value_scales) = round_to_int8(keys), round_to_int8(values)
    return cls(jnp.swapaxes(keys, -1, -2), values, key_scales, value_scales)

  @classmethod
  def zeros(cls, axes: tuple[int, ...], tokens: int, head_dim: int, dtype: Any) -> Cache:
    """A cache of zeros: keys [*axes, H, tokens] and values [*axes, tokens, H]."""
    empty = jnp.zeros((*axes, tokens, head_dim), jnp.float32)
    return cls.of(empty, empty, dtype)

  @classmethod
  def of_prompts(cls, keys: Array, values: Array, block: int, dtype: Any) -> Cache:
    """Makes a cache [K, blocks, R, ...] of the keys and values [R, S, K, H] of R prompts."""
    R, S, K, H = keys.shape
    by_block = lambda x: jnp.transpose(x.reshape(R, S // block, block, K, H), (3, 1, 0, 2, 4))
    return cls.of(by_block(keys), by_block(values), dtype)

  def stage(self, key: Array, value: Array, step: Array) -> Cache:
    """A copy of a staged cache, with one token's key and value, [slots, K, H] each, at `step`."""
    by_head = lambda x: jnp.swapaxes(x, 0, 1)[:, :, None]
    token = Cache.of(by_head(key), by_head(value), self.keys.dtype)
    put = lambda x, new, axis: jax.lax.dynamic_update_slice_in_dim(x, new, step, axis)
    return self._put(put, token, (3, 2, 2, 2))

  def first(self, blocks: int) -> Cache:
    """The first `blocks` blocks of every slot."""
    return jax.tree.map(lambda x: x[:, :blocks], self)

  def flush(self, staged: Cache, start: Array, flushed: Array | None = None) -> Cache:
    """Copies the cache, writing each slot's staged tokens behind its cached response.

    Args:
      staged: the staged keys and values of a burst.
      start: i32[slots], cached tokens of each response.
      flushed: bool[slots], the slots to write; None: all slots.
    """
    write = functools.partial(_write_tokens, start=start, flushed=flushed)
    return self._put(write, staged, (4, 3, 3, 3))

  def flush_slot(self, staged: Cache, slot: Array, start: Array) -> Cache:
    """Copies the cache, writing one slot's staged tokens behind `start` tokens of its response."""
    # One integer dtype, also under x64.
    at = lambda *index: [jnp.asarray(i, jnp.int32) for i in index]
    size = self.values.shape[3]
    block, offset = start // size, start % size
    of_slot = lambda x: jax.lax.dynamic_index_in_dim(x, slot, 1)[:, None]
    put = lambda x, new, index: jax.lax.dynamic_update_slice(x, of_slot(new), index)
    scales = at(0, block, slot, offset)
    places = at(0, block, slot, 0, offset), at(0, block, slot, offset, 0), scales, scales
    return self._put(put, staged, places)

  def _put(self, put: Callable[..., Array], new: Cache, places: Sequence[Any]) -> Cache:
    """Applies `put` to (array of the cache, new part of the array, position of the new part)."""
    arrays: Any = zip(self, new, places, strict=True)
    updated: Any = (x if x is None else put(x, *rest) for x, *rest in arrays)
    return Cache(*updated)


class Pages(NamedTuple):
  """Keys and values of one layer in the paged kernel's layout; otherwise like `Cache`."""

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

  def first(self, blocks: int) -> Pages:
    """All pages, since the kernel itself stops at the last page that a slot has filled."""
    del blocks
    return self

  def flush(self, staged: Cache, start: Array, flushed: Array | None = None) -> Pages:
    """See `Cache.flush`."""
    new = jnp.swapaxes(staged.keys, 2, 3), staged.values
    write = functools.partial(_write_tokens, axis=3, start=start, flushed=flushed)
    return Pages(*(write(x, part) for x, part in zip(self, new, strict=True)))

  def flush_slot(self, staged: Cache, slot: Array, start: Array) -> Pages:
    """See `Cache.flush_slot`."""
    size = self.values.shape[3]
    at = [jnp.asarray(i, jnp.int32) for i in (0, start // size, slot, start % size, 0)]
    of_slot = lambda x: jax.lax.dynamic_index_in_dim(x, slot, 1)[:, None]
    new = jnp.swapaxes(of_slot(staged.keys), 3, 4), of_slot(staged.values)
    put = jax.lax.dynamic_update_slice
    return Pages(*(put(x, part, at) for x, part in zip(self, new, strict=True)))


def _write_tokens(
  cached: Array, staged: Array, axis: int, *, start: Array, flushed: Array | None
) -> Array:
  """Copies an array of a cache, writing each slot's staged tokens into it by one scatter.

  Args:
    cached: [K, blocks, slots, …], with the tokens of a block along `axis`.
    staged: [K, slots, …], with tokens along `axis` − 1.
    start, flushed: see `Cache.flush`.
  """
  blocks, slots, size = cached.shape[1], cached.shape[2], cached.shape[axis]
  block = start // size
  if flushed is not None:
    block = jnp.where(flushed, block, blocks)  # behind the last block, where nothing is written
  places = jnp.stack([block, jnp.arange(slots, dtype=start.dtype), start % size], axis=1)
  return jax.lax.scatter(
    cached,
    places,
    jnp.moveaxis(staged, 1, 0),
    jax.lax.ScatterDimensionNumbers(
      update_window_dims=tuple(range(1, staged.ndim)),
      inserted_window_dims=(1, 2),
      scatter_dims_to_operand_dims=(1, 2, axis),
    ),
    unique_indices=True,
    mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
  )


Part = Cache | Pages  # the cached prompts, or the cached responses, of one layer


class Reach(NamedTuple):
  """Lengths of the slots' caches at the start of a burst."""

  prompt: Array  # i32[slots], cached tokens of the prompt
  response: Array  # i32[slots], cached tokens of the response

  @classmethod
  def of(cls, prompt: Array, response: Array, running: Array) -> Reach:
    """The lengths to read; slots that are not running count as empty."""
    return cls(*(jnp.where(running, lengths, 0) for lengths in (prompt, response)))


def choose_cache(
  wanted: str,
  *,
  platform: str,
  head_dims: Sequence[int],
  dtype: str,
  plain: bool,
  cache_format: str = "",
) -> str:
  """Chooses how keys are cached and read.

  `auto` chooses pages on a TPU if the network allows pages, and blocks otherwise. On a TPU it warns
  if it chooses blocks.

  Args:
    wanted: one of `KINDS`, from config.sampling.cache.
    platform: the platform of the devices that will run the network: "tpu", "gpu" or "cpu".
    head_dims: the head widths in the network's layers, each width once.
    dtype: the dtype that the network computes in.
    plain: True if no layer has a sliding window or a soft cap.
    cache_format: one of `FORMATS`.
  Returns:
    "blocks", which are read up to the length of the longest slot, or "pages", which are read up to
    each slot's own length.
  Raises:
    ValueError: the requested kind does not support this network or platform.
  """
  if wanted not in KINDS:
    raise ValueError(f"config.sampling.cache={wanted!r}; allowed: {list(KINDS)}")
  if cache_format not in FORMATS:
    raise ValueError(f"config.sampling.cache_format={cache_format!r}; allowed: {list(FORMATS)}")
  obstacle = _pages_obstacle(platform, head_dims, dtype, plain, cache_format)
  if wanted == "pages" and obstacle:
    raise ValueError(
      f"config.sampling.cache={wanted!r} needs {obstacle}; meet this requirement, or choose one"
      " of ['auto', 'blocks']"
    )
  if wanted == "auto" and obstacle and platform == "tpu":
    message = "config.sampling.cache=auto uses the slower blocks: pages need %s"
    logging.log_first_n(logging.WARNING, message, 1, obstacle)
  return "blocks" if wanted == "blocks" or obstacle else "pages"


def _pages_obstacle(
  platform: str, head_dims: Sequence[int], dtype: str, plain: bool, cache_format: str
) -> str | None:
  """A requirement of pages that is not met, with the actual value; None if pages can be used."""
  if platform != "tpu":
    return f"a TPU (here: platform={platform!r})"
  if dtype != "bfloat16":
    return f"compute_dtype bfloat16, to which the kernel rounds (here: compute_dtype={dtype!r})"
  for head_dim in head_dims:
    if head_dim % _LANES:
      return f"a head_dim that is a multiple of {_LANES} (here: head_dim={head_dim})"
  if cache_format:
    scales = "since its kernel reads a float32 scale beside every 8-bit number"
    return f"config.sampling.cache_format='', {scales} (here: cache_format={cache_format!r})"
  return None if plain else "layers without sliding window and soft cap"
