"""A cache filled one token at a time, and attention over it against a direct softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.ops.caches import Blocks, Cache, CacheShape, Reach
from rlvr_jax.ops.decoding import cached_attention

N, K, H = 4, 2, 6
SHAPE = CacheShape(prompt=Blocks(size=3, number=3), response=Blocks(size=4, number=3), steps=2)
PROMPT, RESPONSE = np.array([5, 8, 1]), np.array([2, 8, 0])  # cached tokens of three slots


def tokens(lengths, seed=0):
  """Keys and values [length, K, H] of every slot."""
  rng = np.random.default_rng(seed)
  return [rng.normal(size=(2, length, K, H)) for length in lengths]


# Op by op, each small operation would be a program of its own.
of_prompts = jax.jit(Cache.of_prompts, static_argnums=(2, 3))
stage, flush, flush_slot = map(jax.jit, (Cache.stage, Cache.flush, Cache.flush_slot))
attend = jax.jit(cached_attention, static_argnames=("scale", "window", "soft_cap"))


def filled(found):
  """A cache of these tokens: prompts at once, responses in bursts of `steps`."""
  prompts = np.zeros((2, len(found), SHAPE.prompt.tokens, K, H))
  for slot, length in enumerate(PROMPT):
    prompts[:, slot, :length] = found[slot][:, :length]
  prompt = of_prompts(*map(jnp.asarray, prompts), SHAPE.prompt.size, jnp.float64)
  axes = (K, SHAPE.response.number, len(found))
  response = Cache.zeros(axes, SHAPE.response.size, H, jnp.float64)
  for start in range(0, max(RESPONSE), SHAPE.steps):
    staged = Cache.zeros((K, len(found)), SHAPE.steps, H, jnp.float64)
    for step in range(SHAPE.steps):
      at = np.minimum(PROMPT + start + step, [x.shape[1] - 1 for x in found])
      one = np.stack([x[:, i] for x, i in zip(found, at, strict=True)], axis=1)
      staged = stage(staged, *map(jnp.asarray, one), jnp.int32(step))
    runs = RESPONSE > start
    at_once = flush(response, staged, jnp.full(3, start), jnp.asarray(runs))
    for slot in np.flatnonzero(runs):
      response = flush_slot(response, staged, jnp.int32(slot), jnp.int32(start))
    jax.tree.map(np.testing.assert_array_equal, at_once, response)
  return prompt, response


def test_tokens_lie_where_they_are_read(x64):
  found = tokens(PROMPT + RESPONSE)
  cache = filled(found)
  for slot, prompt in enumerate(PROMPT):
    for part, which in zip(cache, (slice(prompt), slice(prompt, None)), strict=True):
      keys = np.moveaxis(np.asarray(part.keys[:, :, slot]), 3, 2).reshape(K, -1, H)
      values = np.asarray(part.values[:, :, slot]).reshape(K, -1, H)
      for got, expected in zip((keys, values), found[slot][:, which], strict=True):
        np.testing.assert_array_equal(got[:, : len(expected)], np.swapaxes(expected, 0, 1))


@pytest.mark.parametrize(("window", "soft_cap"), [(2**30, None), (3, None), (2**30, 0.5)])
def test_equals_a_direct_softmax(x64, window, soft_cap):
  step = 1  # of the burst, whose token 0 is staged
  found = tokens(PROMPT + RESPONSE + step + 1)
  staged = Cache.zeros((K, 3), SHAPE.steps, H, jnp.float64)
  for t in range(step + 1):
    one = np.stack([x[:, n + t] for x, n in zip(found, PROMPT + RESPONSE, strict=True)], axis=1)
    staged = stage(staged, *map(jnp.asarray, one), jnp.int32(t))
  queries = np.random.default_rng(1).normal(size=(3, N, H))
  reach = Reach(jnp.asarray(PROMPT), jnp.asarray(RESPONSE))
  ours = attend(
    jnp.asarray(queries), *filled(found), staged, reach, jnp.int32(step),
    scale=0.4, window=window, soft_cap=soft_cap,
  )  # fmt: skip
  for slot, (keys, values) in enumerate(found):
    near = slice(max(0, len(keys) - window), None)
    for head in range(N):
      scores = keys[near, head // (N // K)] @ queries[slot, head] * 0.4
      scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
      weights = np.exp(scores) / np.exp(scores).sum()
      expected = weights @ values[near, head // (N // K)]
      np.testing.assert_allclose(ours[slot, head], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_blocks_that_other_slots_need_change_no_bit(dtype):
  found = tokens(PROMPT + RESPONSE)
  cast = lambda x: Cache.of(jnp.swapaxes(x.keys, 3, 4), x.values, dtype)
  prompt, response = map(cast, filled(found))
  staged = Cache.zeros((K, 3), SHAPE.steps, H, dtype)
  computed = jnp.float32 if dtype == jnp.int8 else dtype
  queries = jnp.asarray(np.random.default_rng(1).normal(size=(3, N, H)), computed)

  @functools.partial(jax.jit, static_argnames="blocks")
  def of_first(running, blocks):
    reach = Reach.of(jnp.asarray(PROMPT), jnp.asarray(RESPONSE), running)
    caches = prompt.first(blocks[0]), response.first(blocks[1])
    settings = dict(scale=0.4, window=2**30)
    return cached_attention(queries, *caches, staged, reach, jnp.int32(0), **settings)[0]

  alone = of_first(jnp.array([True, False, False]), (2, 1))
  for blocks in ((2, 3), (3, 1), (3, 3)):
    np.testing.assert_array_equal(alone, of_first(jnp.ones(3, bool), blocks))


@pytest.mark.parametrize(
  ("number", "tokens", "expected"),
  [(4, 0, 1), (4, 8, 1), (4, 9, 2), (4, 17, 4), (4, 33, 4), (3, 9, 2), (3, 17, 3), (1, 9, 1)],
)
def test_a_burst_reads_a_quarter_a_half_or_all(number, tokens, expected):
  assert Blocks(8, number).read_for(tokens) == expected


def test_no_block_is_read_where_there_is_none():
  assert Blocks(8, 0).read_for(3) == 0
