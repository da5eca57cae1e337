"""A KV cache in int8: the rounding itself, and an engine that samples with it, by NumPy oracles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.sampling import sample

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.layout import ONE_DEVICE
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.caches import Cache, read_back, round_to_int8
from rlvr_jax.ops.logprobs import head_logits, token_logprobs
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Prompts, Sampling

V, P, G, S, T = 24, 3, 2, 40, 40
CONFIG = TransformerConfig(
  vocab_size=V, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=48,
  attention_soft_cap=20.0, sliding_window=24, sliding_layers=(True, False),
)  # fmt: skip


def _no_delta(layer, inputs):
  raise AssertionError(f"{layer} is no gated DeltaNet: {inputs}")


def _by_steps(x):
  """s·q of vectors x[..., H] in float32, as the docstring of `round_to_int8` says."""
  x = np.asarray(x, np.float32)
  largest = np.abs(x).max(-1, keepdims=True)
  factors = np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0)
  return np.rint(x * factors) * (largest * np.float32(1 / 127))


@functools.cache
def _params():
  params = transformer(CONFIG).init(jax.random.key(0))
  return {**params, "embedding": params["embedding"] * 2.5}


@functools.cache
def _prompts():
  tokens = np.random.default_rng(0).integers(0, V, (P, S)).astype(np.int32)
  return Prompts(tokens=tokens, lengths=np.asarray([40, 3, 35], np.int32))


def _engine(layout=ONE_DEVICE, cache_format="int8"):
  return EnginePrograms(
    transformer(CONFIG, layout), Sampling(), slots=4, prefill_rows=P, max_prompt_length=S,
    max_new_tokens=T, stop_tokens=(3,), pad_token=0, cache_format=cache_format,
  )  # fmt: skip


@functools.cache
def _rollouts():
  return sample(_engine(), _params(), {}, _prompts(), jax.random.key(1), G)


# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_are_rounded_by_their_largest_magnitude(dtype):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(50, 3, 16)) * 10.0 ** rng.integers(-6, 6, (50, 3, 1))
  x[0, 0] = 0
  x = jnp.asarray(x, dtype)
  q, scales = round_to_int8(x)
  assert q.dtype == jnp.int8 and scales.dtype == jnp.float32 and scales.shape == (50, 3)
  largest = np.abs(np.asarray(q, int)).max(-1)
  assert largest[0, 0] == scales[0, 0] == 0 and (np.delete(largest.ravel(), 0) == 127).all()
  expected = _by_steps(x)
  np.testing.assert_array_equal(np.asarray(q) * np.asarray(scales)[..., None], expected)
  # Half a step at most; bfloat16 numbers may lie in the middle of two.
  error = np.abs(expected - np.asarray(x, np.float32))
  assert (error <= 0.5001 * np.asarray(scales)[..., None]).all() and error.any()
  assert read_back(x).dtype == dtype
  np.testing.assert_array_equal(read_back(x), jnp.asarray(expected, dtype))


def test_a_token_is_rounded_alike_wherever_it_enters():
  """Staged and flushed at any time, or prefilled: so no later token sees where a burst ended."""
  K, H, slots, steps, tokens = 2, 16, 3, 4, 8
  keys, values = np.random.default_rng(0).normal(size=(2, slots, tokens, K, H)).astype(np.float32)
  prefilled = Cache.of_prompts(jnp.asarray(keys), jnp.asarray(values), tokens, jnp.int8)
  decoded = Cache.zeros((K, 1, slots), tokens, H, jnp.int8)
  assert decoded.keys.dtype == decoded.values.dtype == jnp.int8
  for start in range(0, tokens, steps):
    staged = Cache.zeros((K, slots), steps, H, jnp.int8)
    for step in range(steps):
      staged = staged.stage(keys[:, start + step], values[:, start + step], jnp.int32(step))
    for slot in range(slots):
      decoded = decoded.flush_slot(staged, jnp.int32(slot), jnp.int32(start))
  assert len(jax.tree.leaves(decoded)) == 4
  jax.tree.map(np.testing.assert_array_equal, decoded, prefilled)
  shown = np.asarray(prefilled.values) * np.asarray(prefilled.value_scales)[..., None]
  np.testing.assert_allclose(shown[:, 0], np.moveaxis(_by_steps(values), 2, 0), rtol=1e-6)


# --- engines --------------------------------------------------------------------------------------


def _decode_one_by_one(prompt, response):
  """Log-probabilities f32[V] of each place of a response, by attention over NumPy's s·q."""
  model = transformer(CONFIG)
  params = model.decoding_params(_params())
  kept = [[] for _ in range(CONFIG.num_layers)]  # keys and values [K, H] of each token

  def attend(layer, query, key, value, settings):
    kept[layer].append((_by_steps(key[0]), _by_steps(value[0])))
    keys, values = (np.stack(x) for x in zip(*kept[layer][-settings["window"] :], strict=True))
    out = np.zeros(query.shape, np.float32)
    for head in range(CONFIG.num_heads):
      of_head = head // (CONFIG.num_heads // CONFIG.num_kv_heads)
      scores = keys[:, of_head] @ np.asarray(query[0, head]) * settings["scale"]
      scores = settings["soft_cap"] * np.tanh(scores / settings["soft_cap"])
      weights = np.exp(scores - scores.max())
      out[0, head] = weights / weights.sum() @ values[:, of_head]
    return jnp.asarray(out), None

  found = []
  for position, token in enumerate([*prompt, *response[:-1]]):
    tables = model.rotary(jnp.full((1, 1), position))
    hidden, *_ = model.decode(params, jnp.asarray([token]), tables, attend, _no_delta)
    found.append(jax.nn.log_softmax(head_logits(hidden, model.head(params))[0]))
  return np.stack(found[len(prompt) - 1 :])


def test_logprobs_are_those_of_the_network_with_the_rounded_cache():
  """Prompts of several lengths, and responses of several bursts in slots that are refilled."""
  rollouts = _rollouts()
  assert rollouts.lengths.max() > 32
  p, g, n = 1, 1, 30  # tokens of two bursts, and more than the sliding window
  assert rollouts.lengths[p, g] >= n
  tokens = rollouts.tokens[p, g, :n]
  logprobs = _decode_one_by_one(_prompts().tokens[p, S - _prompts().lengths[p] :], tokens)
  expected = logprobs[np.arange(n), tokens]
  np.testing.assert_allclose(rollouts.behavior_logprobs[p, g, :n], expected, atol=2e-5)


def test_the_trainer_differs_by_rounding_within_its_bound():
  rollouts, model = _rollouts(), transformer(CONFIG)
  hidden = jax.jit(model.response_hidden)(_params(), _prompts(), rollouts.tokens)
  trainer, _ = token_logprobs(hidden, model.head(_params()), rollouts.tokens)
  mask = np.arange(T) < rollouts.lengths[..., None]
  difference = np.abs(np.asarray(trainer) - rollouts.behavior_logprobs)[mask]
  assert 1e-4 < difference.mean() < 5e-3  # 2e-6 with a cache in float32; see `MAX_GAP`


@pytest.mark.parametrize(
  "axes",
  [
    dict(data=2, tensor=2),
    pytest.param(dict(data=2), marks=pytest.mark.slow),
    pytest.param(dict(tensor=4), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_caches_are_split_over_devices(axes):
  """On a mesh the samples are those of one device; a head may be copied."""
  engine = _engine(sharding.make_layout(sharding.make_mesh(**axes)))
  rollouts = sample(engine, _params(), {}, _prompts(), jax.random.key(1), G)
  np.testing.assert_array_equal(rollouts.tokens, _rollouts().tokens)
  expected = _rollouts().behavior_logprobs
  np.testing.assert_allclose(rollouts.behavior_logprobs, expected, atol=1e-3)
