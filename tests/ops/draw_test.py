"""Draws of tokens: the share of random bits that gives a token is its recorded probability."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlvr_jax.ops import draw
from rlvr_jax.ops.draw import draw_tokens, random_bits
from rlvr_jax.ops.logprobs import distribution, token_statistics
from rlvr_jax.sampling import Sampling
from rlvr_jax.types import Head
from rlvr_jax.update.agreement import count_draws, draw_z

PLAIN = Sampling()
ALL_BITS = 1 << 64
one_program = jax.jit(draw_tokens, static_argnums=1)
# Other tests compile without optimization; these draw millions of tokens.
optimized = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})


def _bits(values):
  """u32[n, 2] of integers below 2⁶⁴."""
  return jnp.asarray([[value >> 32, value & 0xFFFFFFFF] for value in values], jnp.uint32)


@functools.cache
def _program(sampling):
  return optimized(lambda logits, bits: draw_tokens(logits, sampling, bits))


ROWS = 128  # drawn at a time, so that a vocabulary has one program for a sampling


def _drawing(logits, sampling):
  """A function from integers of 64 bits to the tokens and log-probabilities drawn."""
  logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (ROWS, len(logits)))

  def draw(values):
    parts = []
    for start in range(0, len(values), ROWS):
      some = values[start : start + ROWS]
      drawn = _program(sampling)(logits, _bits(some + [0] * (ROWS - len(some))))
      parts.append([np.asarray(x)[: len(some)] for x in drawn])
    return [np.concatenate(x) for x in zip(*parts, strict=True)]

  return draw


def _first_bits(logits, tokens, sampling=PLAIN):
  """The least integers whose bits draw a token at or behind each of `tokens`, by bisection.

  The drawn token grows with its bits, so that these are all that there is to know of a draw.
  """
  draw, wanted = _drawing(logits, sampling), np.asarray(tokens)
  low, high = [0] * len(wanted), [ALL_BITS] * len(wanted)
  for _ in range(65):
    middle = [min((a + b) // 2, ALL_BITS - 1) for a, b in zip(low, high, strict=True)]
    for i, reached in enumerate(draw(middle)[0] >= wanted):
      if low[i] < high[i]:
        low[i], high[i] = (low[i], middle[i]) if reached else (middle[i] + 1, high[i])
  return high


def _shares(logits, tokens, sampling=PLAIN):
  """Of each token, the share of all bits that draw it."""
  edges = np.unique([[token, token + 1] for token in tokens])
  first = dict(zip(edges.tolist(), _first_bits(logits, edges, sampling), strict=True))
  vocabulary = len(logits)
  end = lambda token: ALL_BITS if token + 1 == vocabulary else first[token + 1]
  return np.array([(end(token) - first[token]) / ALL_BITS for token in tokens])


def _recorded(logits, tokens, sampling=PLAIN):
  """exp of the log-probability that is recorded with each of some tokens."""
  drawn, logprobs = _drawing(logits, sampling)(_first_bits(logits, tokens, sampling))
  np.testing.assert_array_equal(drawn, tokens)
  return np.exp(logprobs.astype(np.float64))


@pytest.mark.parametrize(
  "temperature", [1.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.2, 5.0))]
)
def test_the_share_of_bits_is_the_recorded_probability(temperature):
  """Every token of a vocabulary that is no multiple of a block, down to p = 1e-7."""
  rng = np.random.default_rng(0)
  logits = temperature * rng.normal(size=700) * 3.5
  logits[-40:] = temperature * np.linspace(-9, 0, 40)  # rare ones at the end too
  sampling = Sampling(temperature=temperature)
  exact = np.exp(np.asarray(distribution(jnp.asarray(logits, jnp.float32), sampling), np.float64))
  tokens = np.flatnonzero(exact >= 1e-7)
  assert exact.min() < 1e-6 and len(tokens) > 600
  np.testing.assert_allclose(_shares(logits, tokens, sampling), exact[tokens], rtol=1e-4)
  few = tokens[:: len(tokens) // 40]
  np.testing.assert_allclose(_recorded(logits, few, sampling), exact[few], rtol=1e-5)


def _long_tail(vocabulary):
  """Logits of 100 probable tokens, and of others, each below 1e-6 and with 0.1 to 1 % in all."""
  rng = np.random.default_rng(1)
  tail = rng.normal(size=vocabulary) / 2 - 7
  tail[rng.choice(vocabulary, 100, replace=False)] = rng.normal(size=100) * 2 + 2
  tail[-1000:] = -7
  return tail


LARGE = [4099, pytest.param(49_152, marks=pytest.mark.slow)]


@pytest.mark.parametrize("vocabulary", LARGE)
def test_sets_of_rare_tokens_have_their_mass(vocabulary):
  """The last 1,000 tokens, one of each block, and all below 1e-6."""
  logits = _long_tail(vocabulary)
  exact = np.exp(np.asarray(distribution(jnp.asarray(logits, jnp.float32), PLAIN), np.float64))
  (first_of_last,) = _first_bits(logits, [vocabulary - 1000])
  assert exact[-1000:].max() < 1e-6 < exact[-1000:].sum()
  share = (ALL_BITS - first_of_last) / ALL_BITS
  assert share == pytest.approx(exact[-1000:].sum(), rel=1e-4)
  one_of_each = np.arange(17, vocabulary, 256)
  np.testing.assert_allclose(_shares(logits, one_of_each), exact[one_of_each], rtol=1e-3)

  descending = np.sort(logits)[::-1]  # so that the rare ones are one set of bits
  exact = np.sort(exact)[::-1]
  first = int(np.argmax(exact < 1e-6))
  assert 1e-4 < exact[first:].sum() < 0.02
  (start,) = _first_bits(descending, [first])
  assert (ALL_BITS - start) / ALL_BITS == pytest.approx(exact[first:].sum(), rel=1e-4)


@pytest.mark.parametrize(
  "rare, logit", [(2_000, 17.0), pytest.param(100_000, 18.0, marks=pytest.mark.slow)]
)
def test_one_probable_token_beside_many_rare_ones(rare, logit):
  """Float32 Gumbel noise, which ends at 15.9, would never draw the many."""
  for probable in (0, rare):
    logits = np.zeros(rare + 1)
    logits[probable] = logit
    exact = np.exp(-logit) / (1 + rare * np.exp(-logit))
    some = [t for t in (0, 1, 255, 256, rare - 1, rare) if t != probable]
    np.testing.assert_allclose(_shares(logits, some), exact, rtol=1e-4)


@pytest.mark.parametrize(
  ("sampling", "vocabulary"),
  [
    *((x, 300) for x in (Sampling(top_k=3), Sampling(min_p=0.2))),
    pytest.param(Sampling(top_p=0.6), 300, marks=pytest.mark.slow),
    pytest.param(PLAIN, 300, marks=pytest.mark.slow),
    pytest.param(PLAIN, 512, marks=pytest.mark.slow),  # whole blocks
  ],
)
def test_excluded_tokens_are_never_drawn(sampling, vocabulary):
  """By the least bits, the greatest, and those at the edges between two tokens."""
  rng = np.random.default_rng(2)
  logits = jnp.asarray(rng.normal(size=vocabulary) * 2, jnp.float32)
  logits = logits.at[jnp.asarray([0, 1, 255, 256, -2, -1])].set(-jnp.inf)
  kept = np.flatnonzero(np.asarray(distribution(logits, sampling)) > -np.inf)
  edges = _first_bits(logits, kept.tolist(), sampling)
  assert edges[0] == 0
  values = sorted({0, ALL_BITS - 1, *edges, *[edge - 1 for edge in edges[1:]]})
  drawn, logprobs = _drawing(logits, sampling)(values)
  assert set(drawn.tolist()) == set(kept.tolist())
  assert int(drawn[0]) == kept[0] and int(drawn[-1]) == kept[-1]
  expected = np.asarray(distribution(logits, sampling))[drawn]
  np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_greedy_decoding_takes_the_first_largest():
  logits = jnp.asarray([[0.0, 2, 1, 2], [-jnp.inf, -jnp.inf, 3, -jnp.inf], [jnp.nan, 1, 2, 0]])
  tokens, logprobs = one_program(logits, Sampling(temperature=0.0), _bits([0, 1, 2]))
  np.testing.assert_array_equal(tokens[:2], [1, 2])
  np.testing.assert_array_equal(logprobs, [0, 0, np.nan])


def test_logits_that_are_not_finite_are_seen_in_the_log_probability():
  logits = jnp.zeros((4, 300)).at[0, 3].set(jnp.nan).at[1, 3].set(jnp.inf).at[2].set(-jnp.inf)
  tokens, logprobs = one_program(logits, PLAIN, _bits([0, 5, 7, 9]))
  assert not np.isfinite(logprobs[:3]).any() and np.isfinite(logprobs[3])
  assert (np.asarray(tokens) >= 0).all() and (np.asarray(tokens) < 300).all()


def test_double_precision_logits(x64):
  logits = jax.random.normal(jax.random.key(0), (64, 515), jnp.float64) * 4
  bits = jax.jit(random_bits)(jnp.zeros((64, 2), jnp.uint32), jnp.arange(64))
  double, logprobs = one_program(logits, PLAIN, bits)
  assert logprobs.dtype == jnp.float64
  expected = jnp.take_along_axis(distribution(logits, PLAIN), double[:, None], axis=-1)[:, 0]
  np.testing.assert_allclose(logprobs, expected, atol=1e-9)
  single, _ = one_program(logits.astype(jnp.float32), PLAIN, bits)
  assert (single == double).mean() > 0.98


def test_a_split_vocabulary_changes_no_bit():
  """4,096 and 12,168 tokens over 8 devices: equal tokens, and no device gathers the logits."""
  mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(8), ("tensor",))
  split = NamedSharding(mesh, PartitionSpec(None, "tensor"))
  for vocabulary in (4096, 12_168):
    logits = jax.random.normal(jax.random.key(1), (16, vocabulary)) * 3
    bits = jax.jit(random_bits)(jnp.ones((16, 2), jnp.uint32), jnp.arange(16))
    one = one_program(logits, PLAIN, bits)
    program = jax.jit(lambda x, b: draw_tokens(x, PLAIN, b, shards=8), in_shardings=(split, None))
    compiled = program.lower(logits, bits).compile()
    several = compiled(jax.device_put(logits, split), bits)
    jax.tree.map(np.testing.assert_array_equal, one, several)
    collectives = re.findall(
      r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute)\(",
      compiled.as_text(),
    )
    sizes = [np.prod([int(n) for n in shape.split(",") if n] or [1]) for shape in collectives]
    assert sizes and max(sizes) <= 16 * max(256, vocabulary // 256 + 8)


def test_random_bits_depend_on_key_and_counter_alone():
  keys = jax.random.key_data(jax.random.split(jax.random.key(0), 5))
  counters = jnp.asarray([0, 7, 7, 9, 2])
  bits = jax.jit(random_bits)(keys, counters)
  np.testing.assert_array_equal(bits[3:4], jax.jit(random_bits)(keys[3:4], counters[3:4]))
  assert bits.dtype == jnp.uint32 and len({row.tobytes() for row in np.asarray(bits)}) == 5


def test_a_vocabulary_that_is_too_large_is_refused():
  shape = jax.ShapeDtypeStruct((1, (1 << 20) + 1), jnp.float32)
  bits = jax.ShapeDtypeStruct((1, 2), jnp.uint32)
  with pytest.raises(ValueError, match="1048577"):
    jax.eval_shape(lambda x, b: draw_tokens(x, PLAIN, b), shape, bits)


@pytest.mark.parametrize("count", [1, 2, 3, 192, 594])
def test_cumulative_sums_are_exact(count):
  values = np.random.default_rng(0).integers(0, 2**52, (3, count), dtype=np.uint64)
  halves = (values >> 32).astype(np.uint32), values.astype(np.uint32)
  high, low = jax.jit(draw._cumulative)(tuple(map(jnp.asarray, halves)))
  found = (np.asarray(high).astype(np.uint64) << 32) | np.asarray(low)
  np.testing.assert_array_equal(found, np.cumsum(values, axis=-1))


def _gumbel_tokens(logits, rows):
  """The largest of logits + Gumbel noise of uniform numbers of 23 bits, which ends at 15.9.

  Of the equal logits, all but one, the one with the largest number: it is drawn as such.
  """
  rng, largest = np.random.default_rng(0), int(np.argmax(logits))
  numbers = rng.random((2, rows)) ** np.array([[1.0], [1 / (logits.size - 1)]])
  grid = np.maximum(np.floor(numbers * 2**23), 1e-30) / 2**23
  one, best = -np.log(-np.log(grid))
  return jnp.where(np.max(logits) + one >= np.min(logits) + best, largest, 0)


def _inverted_tokens(logits, rows):
  draw = lambda bits: draw_tokens(jnp.broadcast_to(logits, (100, logits.size)), PLAIN, bits)[0]
  bits = jax.random.bits(jax.random.key(0), (rows // 100, 100, 2), jnp.uint32)
  return optimized(lambda bits: jax.lax.map(draw, bits))(bits).reshape(-1)


@pytest.mark.parametrize(
  ("sampler", "rare"),
  [(_gumbel_tokens, False), pytest.param(_inverted_tokens, True, marks=pytest.mark.slow)],
)
def test_rare_tokens_are_drawn_as_often_as_they_should_be(sampler, rare):
  """One logit of 18 and 100,000 of 0: 0.15 % of the mass is in tokens of 1.5e-8 each.

  The metric of the bins sees that a sampler never draws them; the log-probabilities of the tokens
  that it does draw are exact.
  """
  logits = jnp.zeros(100_001).at[70_000].set(18.0)
  tokens = sampler(logits, 16_000)
  head = Head(logits[None])

  @jax.jit
  def count(logits, tokens):
    one = token_statistics(jnp.ones((1, 1, 1)), head, jnp.zeros((1, 1), int), masses=True)
    masses = tuple(jnp.broadcast_to(mass[0], tokens.shape) for mass in one.masses)
    return count_draws(distribution(logits, PLAIN)[tokens], masses, jnp.ones(tokens.shape, bool))

  draws = count(logits, tokens)
  np.testing.assert_allclose(draws.expected[-1], 16_000 * 0.00152, rtol=0.01)
  assert (draws.drawn[-1] > 0) == rare
  assert (draw_z(draws) < 4) == rare
