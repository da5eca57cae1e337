"""A cache filled one token at a time, and attention over it against a direct softmax."""

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


def filled(found):
  """A cache of these tokens: prompts at once, responses in bursts of `steps`."""
  prompts = np.zeros((2, len(found), SHAPE.prompt.tokens, K, H))
  for slot, length in enumerate(PROMPT):
    prompts[:, slot, :length] = found[slot][:, :length]
  prompt = Cache.of_prompts(*map(jnp.asarray, prompts), SHAPE.prompt.size, jnp.float64)
  axes = (K, SHAPE.response.number, len(found))
  response = Cache.zeros(axes, SHAPE.response.size, H, jnp.float64)
  for start in range(0, max(RESPONSE), SHAPE.steps):
    staged = Cache.zeros((K, len(found)), SHAPE.steps, H, jnp.float64)
    for step in range(SHAPE.steps):
      at = np.minimum(PROMPT + start + step, [x.shape[1] - 1 for x in found])
      one = np.stack([x[:, i] for x, i in zip(found, at, strict=True)], axis=1)
      staged = staged.stage(*map(jnp.asarray, one), jnp.int32(step))
    for slot in np.flatnonzero(RESPONSE > start):
      response = response.flush(staged, jnp.int32(slot), jnp.int32(start))
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
    staged = staged.stage(*map(jnp.asarray, one), jnp.int32(t))
  queries = np.random.default_rng(1).normal(size=(3, N, H))
  reach = Reach.of(SHAPE, *map(jnp.asarray, (PROMPT, RESPONSE, np.ones(3, bool))))
  ours = cached_attention(
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


def test_blocks_that_other_slots_need_change_no_bit():
  found = tokens(PROMPT + RESPONSE)
  cache = jax.tree.map(lambda x: x.astype(jnp.float32), filled(found))
  staged = Cache.zeros((K, 3), SHAPE.steps, H, jnp.float32)
  queries = jnp.asarray(np.random.default_rng(1).normal(size=(3, N, H)), jnp.float32)

  def of_first(running):
    reach = Reach.of(SHAPE, jnp.asarray(PROMPT), jnp.asarray(RESPONSE), jnp.asarray(running))
    settings = dict(scale=0.4, window=2**30)
    out = cached_attention(queries, *cache, staged, reach, jnp.int32(0), **settings)
    return np.asarray(out[0]), int(reach.response_blocks)

  (alone, blocks), (together, more) = of_first([True, False, False]), of_first([True] * 3)
  assert more > blocks
  np.testing.assert_array_equal(alone, together)
