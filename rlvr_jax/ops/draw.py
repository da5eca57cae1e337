"""Draws each token by exact integer sums, with 64 random bits and one pass over the logits.

A token v is drawn by inverting the distribution function. Its weight is exp(z_v − max z), rounded
down to a multiple of 2⁻⁴⁴. Weights are added as integers, so that splitting the vocabulary into
blocks or over devices changes no bit of the sums. The returned log-probability is computed from the
same weights, so it belongs to the very distribution that the token is drawn from.

Integers of 64 bits are pairs (high, low) of uint32, since jax has no 64-bit integers by default.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from rlvr_jax.ops.logprobs import smallest_kept
from rlvr_jax.types import Array, Sampling

_HALF_BITS = 22  # a weight has two such halves; a block's sum of halves fits in 31 bits
_BLOCK = 256  # tokens whose weights are added before any are compared
_LANES = 32  # of a block, added last: XLA on CPU then vectorizes the sum over the others
_LARGEST_VOCABULARY = 1 << (64 - 2 * _HALF_BITS)  # the sum of all weights fits in 64 bits

_Pair = tuple[Array, Array]  # u32, u32: high · 2³² + low


def draw_tokens(
  logits: Array, sampling: Sampling, bits: Array, *, shards: int = 1
) -> tuple[Array, Array]:
  """Draws a token from each row's distribution.

  Of the 2⁶⁴ values of `bits`, the fraction that gives a token equals the token's returned
  probability, up to a relative error of 1e-5 for probabilities above 1e-7. A token is never drawn
  if its probability is below 2⁻⁴⁴ times the largest probability, or if top-k, top-p or min-p
  excludes it.

  Args:
    logits: f32[R, V], V at most 2²⁰; or of another float type.
    sampling: the distribution; at temperature 0 the first token with the largest logit is taken.
    bits: u32[R, 2], random.
    shards: number of devices over which V is split, each of which sums its own part; no effect on
      results.
  Returns:
    tokens i32[R], and their log-probabilities under the distribution, in the dtype of `logits`.
    A row with NaN has a NaN log-probability.
  """
  vocabulary = logits.shape[-1]
  if vocabulary > _LARGEST_VOCABULARY:
    raise ValueError(
      f"a vocabulary of {vocabulary} tokens is too large to sample from; at most"
      f" {_LARGEST_VOCABULARY} tokens are allowed"
    )
  if sampling.temperature == 0:
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    largest = jnp.max(logits, axis=-1)
    return tokens, jnp.where(jnp.isnan(largest), largest, 0.0)
  scaled = logits / sampling.temperature
  least = smallest_kept(scaled, sampling)
  if least is not None:
    scaled = jnp.where(scaled >= least[:, None], scaled, -jnp.inf)
  # The barrier has these computed once, so that the search within a block uses the very weights of
  # its sum.
  relative = jax.lax.optimization_barrier(jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True)))

  in_blocks = _to_blocks(relative, shards)
  lanes = in_blocks.reshape(*in_blocks.shape[:2], -1, _LANES)
  add = functools.partial(jnp.sum, dtype=jnp.uint32)
  sums = _cumulative(_join(*(add(add(half, axis=-2), axis=-1) for half in _halves(lanes))))
  total = (sums[0][:, -1], sums[1][:, -1])
  target = _multiply_high((bits[:, 0], bits[:, 1]), total)
  block, before = _first_above(sums, target)
  chosen = jnp.take_along_axis(in_blocks, block[:, None, None], axis=1)[:, 0]
  member, _ = _first_above(_cumulative(_join(*_halves(chosen))), _subtract(target, before))

  weight = jnp.take_along_axis(chosen, member[:, None], axis=1)[:, 0]
  of_all = _to_float(total, weight.dtype) * 2.0 ** (-2 * _HALF_BITS)
  shard, own_block = jnp.divmod(block, in_blocks.shape[1] // shards)
  tokens = shard * (vocabulary // shards) + own_block * _BLOCK + member
  # If all weights are 0, as with NaN, the search ends in the padding of the last block.
  return jnp.minimum(tokens, vocabulary - 1), jnp.log(weight) - jnp.log(of_all)


def random_bits(keys: Array, counters: Array) -> Array:
  """u32[R, 2], random bits of each row.

  Args:
    keys: u32[R, 2], data of a PRNG key per row.
    counters: i32[R]; equal keys and counters give equal bits, whatever the other rows are.
  """
  draw = lambda key, t: jax.random.bits(jax.random.fold_in(key, t), (2,), jnp.uint32)
  return jax.vmap(draw)(jax.random.wrap_key_data(keys), counters)


def _to_blocks(weights: Array, shards: int) -> Array:
  """[R, V] → [R, blocks, _BLOCK] in the order of the vocabulary, padded with zeros."""
  rows, vocabulary = weights.shape
  own = weights.reshape(rows, shards, vocabulary // shards)
  if padding := -own.shape[-1] % _BLOCK:
    own = jnp.pad(own, [(0, 0), (0, 0), (0, padding)])
  return own.reshape(rows, -1, _BLOCK)


def _halves(weights: Array) -> tuple[Array, Array]:
  """High and low half (u32, u32) of ⌊w · 2⁴⁴⌋ = high · 2²² + low, for w in [0, 1]; 0 for NaN."""
  scale = 2.0**_HALF_BITS
  exact = jnp.where(weights >= 0, weights, 0) * scale
  high = jnp.floor(exact)
  # By way of signed integers, to which CPUs convert in one instruction.
  to_integer = lambda x: x.astype(jnp.int32).astype(jnp.uint32)
  return to_integer(high), to_integer((exact - high) * scale)


# --- integers of 64 bits --------------------------------------------------------------------------


def _join(high: Array, low: Array) -> _Pair:
  """high · 2²² + low, for u32 arrays of numbers below 2³¹."""
  upper = (high >> (32 - _HALF_BITS), high << _HALF_BITS)
  return _add(upper, (jnp.zeros_like(low), low))


def _add(a: _Pair, b: _Pair) -> _Pair:
  low = a[1] + b[1]
  return a[0] + b[0] + (low < a[1]), low


def _subtract(a: _Pair, b: _Pair) -> _Pair:
  return a[0] - b[0] - (a[1] < b[1]), a[1] - b[1]


def _cumulative(values: _Pair) -> _Pair:
  """The cumulative sums of values [R, n], in runs of √n, for which a GPU launches few kernels."""
  count = values[0].shape[-1]
  run = math.isqrt(count - 1) + 1
  in_runs = lambda x: jnp.pad(x, [(0, 0), (0, -count % run)]).reshape(len(x), -1, run)
  high, low = _sums_until((in_runs(values[0]), in_runs(values[1])), include=True)
  before = _sums_until((high[..., -1], low[..., -1]), include=False)
  high, low = _add((before[0][..., None], before[1][..., None]), (high, low))
  whole = lambda x: x.reshape(len(x), -1)[:, :count]
  return whole(high), whole(low)


def _sums_until(values: _Pair, *, include: bool) -> _Pair:
  """Sums along the last axis of the values before each index, and at the index if `include`."""
  index = jnp.arange(values[0].shape[-1])
  counts = index[:, None] >= index + (not include)
  mask = lambda x: jnp.where(counts, x[..., None, :], 0)
  masked = mask(values[0]), mask(values[1])
  return jax.lax.reduce(masked, (jnp.uint32(0),) * 2, _add, (masked[0].ndim - 1,))


def _first_above(sums: _Pair, target: _Pair) -> tuple[Array, _Pair]:
  """Finds the first of ascending sums [R, n] that is above a target [R].

  Returns:
    The index i32[R] of this sum, or n − 1 if no sum is above the target; and the preceding sum, 0
    for index 0.
  """
  high, low = target[0][:, None], target[1][:, None]
  is_above = (sums[0] > high) | ((sums[0] == high) & (sums[1] > low))
  number = jnp.sum(~is_above, axis=-1, dtype=jnp.int32)
  number = jnp.minimum(number, is_above.shape[-1] - 1)
  take = lambda x: jnp.take_along_axis(x, jnp.maximum(number - 1, 0)[:, None], axis=-1)[:, 0]
  before = lambda x: jnp.where(number > 0, take(x), 0).astype(jnp.uint32)
  return number, (before(sums[0]), before(sums[1]))


def _multiply_high(a: _Pair, b: _Pair) -> _Pair:
  """⌊a · b / 2⁶⁴⌋ of 64-bit integers."""
  high, middle = _product(a[0], b[0]), (_product(a[0], b[1]), _product(a[1], b[0]))
  carried, _ = _product(a[1], b[1])
  zero = jnp.zeros_like(carried)
  below = _add(_add((zero, middle[0][1]), (zero, middle[1][1])), (zero, carried))
  above = _add((zero, middle[0][0]), (zero, middle[1][0]))
  return _add(_add(high, above), (zero, below[0]))


def _product(a: Array, b: Array) -> _Pair:
  """The 64-bit product a · b of u32 arrays."""
  mask = jnp.uint32(0xFFFF)
  lowest = (a & mask) * (b & mask)
  one = (a >> 16) * (b & mask) + (lowest >> 16)
  other = (a & mask) * (b >> 16) + (one & mask)
  return (a >> 16) * (b >> 16) + (one >> 16) + (other >> 16), (other << 16) | (lowest & mask)


def _to_float(value: _Pair, dtype: jnp.dtype) -> Array:
  return value[0].astype(dtype) * 2.0**32 + value[1].astype(dtype)
