"""The paged kernel for TPUs: interpreted it equals XLA's blocks; where it is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from oracles.sampling import sample

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.layout import ONE_DEVICE
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.caches import Cache, Pages, Reach, choose_cache
from rlvr_jax.ops.decoding import cached_attention
from rlvr_jax.ops.logprobs import token_logprobs
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Prompts, Sampling

K, H, BLOCK, STEPS = 2, 128, 32, 16
PROMPT, RESPONSE = np.array([40, 64, 0, 7], np.int32), np.array([16, 0, 48, 96], np.int32)


def rounded(rng, *shape):
  """float32 values that bfloat16 has: to it the kernel rounds keys and values."""
  return jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32)


def caches(kind, parts):
  """The same keys and values as `Cache` or as `Pages`."""
  swap = kind is Cache
  return [kind(jnp.swapaxes(keys, 3, 4) if swap else keys, values) for keys, values in parts]


@pytest.mark.parametrize(
  "heads", [2, pytest.param(8, marks=pytest.mark.slow)]
)  # of queries per key/value head: less than a tile, and one
def test_pages_equal_blocks(heads):
  rng, slots = np.random.default_rng(0), len(PROMPT)
  parts = [[rounded(rng, K, count, slots, BLOCK, H) for _ in range(2)] for count in (2, 3)]
  staged = Cache(rounded(rng, K, slots, H, STEPS), rounded(rng, K, slots, STEPS, H))
  queries = jnp.asarray(rng.normal(size=(slots, K * heads, H)), jnp.float32)
  reach = Reach(jnp.asarray(PROMPT), jnp.asarray(RESPONSE))
  run = jax.jit(functools.partial(cached_attention, scale=0.1, window=2**30))
  attend = lambda kind: run(queries, *caches(kind, parts), staged, reach, jnp.int32(5))
  with pltpu.force_tpu_interpret_mode():
    ours = attend(Pages)
  np.testing.assert_allclose(ours, attend(Cache), atol=1e-5)


def test_what_is_flushed_and_prefilled_lies_in_pages_as_in_blocks():
  rng = np.random.default_rng(0)
  prompts = rng.normal(size=(2, 3, 2 * BLOCK, K, H))
  staged = Cache(rng.normal(size=(K, 3, H, STEPS)), rng.normal(size=(K, 3, STEPS, H)))
  found = []
  for kind in (Cache, Pages):
    cache = kind.of_prompts(*prompts, BLOCK, jnp.float32)
    empty = kind.zeros((K, 2, 3), BLOCK, H, jnp.float32)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, empty)
    assert not any(map(np.any, empty))
    tokens = jax.tree.map(jnp.float32, staged)
    found.append(cache.flush(tokens, jnp.array([0, 48, 16])))
    one = cache.flush_slot(tokens, jnp.int32(1), jnp.int32(48))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:, :, 1], y[:, :, 1]), found[-1], one)
  blocks, pages = found
  np.testing.assert_array_equal(pages.keys, jnp.swapaxes(blocks.keys, 3, 4))
  np.testing.assert_array_equal(pages.values, blocks.values)


@pytest.mark.slow
@pytest.mark.parametrize("data", [None, 2])
def test_an_engine_with_pages_records_the_trainers_logprobs(data):
  """Several pages, refilled slots; on a mesh every device has its own. Keys are rounded."""
  network = TransformerConfig(
    vocab_size=24, width=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=H, mlp_width=16
  )
  layout = ONE_DEVICE if data is None else sharding.make_layout(sharding.make_mesh(data=data))
  S, T, model = 40, 40, transformer(network, layout)
  engine = EnginePrograms(
    model, Sampling(), slots=2, prefill_rows=2, max_prompt_length=S, max_new_tokens=T,
    stop_tokens=(3,), pad_token=0, cache="pages",
  )  # fmt: skip
  params = model.init(jax.random.key(0))
  params["embedding"] *= 2.5
  rng = np.random.default_rng(0)
  prompts = Prompts(rng.integers(4, 24, (3, S)).astype(np.int32), np.array([40, 3, 35], np.int32))
  with pltpu.force_tpu_interpret_mode():
    rollouts = sample(engine, params, {}, prompts, jax.random.key(1), 1)
  assert rollouts.lengths.max() > 32
  trainer_model = transformer(network)
  hidden = trainer_model.response_hidden(params, prompts, rollouts.tokens)
  trainer, _ = token_logprobs(hidden, trainer_model.head(params), rollouts.tokens)
  mask = np.arange(T) < rollouts.lengths[..., None]
  difference = np.where(mask, trainer, 0) - rollouts.behavior_logprobs
  assert np.abs(difference).max() < 0.03


ABLE = dict(platform="tpu", head_dims=(128,), dtype="bfloat16", plain=True)


@pytest.mark.parametrize(
  ("other", "message"),
  [
    (dict(platform="cpu"), "a TPU"),
    (dict(dtype="float32"), "compute_dtype bfloat16"),
    (dict(head_dims=(128, 64)), "a multiple of 128"),
    (dict(plain=False), "without sliding window"),
    (
      dict(cache_format="int8"),
      r"cache_format='', since its kernel .*\(here: cache_format='int8'\)",
    ),
  ],
)
def test_a_kernel_is_chosen_where_it_can_serve(other, message):
  assert choose_cache("auto", **ABLE) == choose_cache("pages", **ABLE) == "pages"
  assert choose_cache("blocks", **ABLE) == "blocks"
  assert choose_cache("auto", **ABLE | other) == "blocks"
  with pytest.raises(ValueError, match=rf"config\.sampling\.cache='pages' needs .*{message}"):
    choose_cache("pages", **ABLE | other)


def test_an_unknown_kind_is_refused():
  with pytest.raises(ValueError, match=r"config\.sampling\.cache='page'; allowed: .*'pages'"):
    choose_cache("page", **ABLE)
  with pytest.raises(ValueError, match=r"config\.sampling\.cache_format='int4'; allowed: .*'int8'"):
    choose_cache("auto", **ABLE, cache_format="int4")
