"""The paged kernel for TPUs: interpreted it equals XLA's blocks; where it is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rlvr_jax.ops.decoding import Cache, Pages, Reach, cached_attention, choose_cache

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
  "heads", [2, 8]
)  # of queries per key/value head: less than a tile, and one
def test_pages_equal_blocks(heads):
  rng, slots = np.random.default_rng(0), len(PROMPT)
  parts = [[rounded(rng, K, count, slots, BLOCK, H) for _ in range(2)] for count in (2, 3)]
  staged = Cache(rounded(rng, K, slots, H, STEPS), rounded(rng, K, slots, STEPS, H))
  queries = jnp.asarray(rng.normal(size=(slots, K * heads, H)), jnp.float32)
  reach = Reach(jnp.asarray(PROMPT), jnp.asarray(RESPONSE), jnp.int32(2), jnp.int32(3))
  attend = lambda kind: cached_attention(
    queries, *caches(kind, parts), staged, reach, jnp.int32(5), scale=0.1, window=2**30
  )
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
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(
      jnp.shape, kind.zeros((K, 2, 3), BLOCK, H, jnp.float32)
    )
    found.append(cache.flushed(jax.tree.map(jnp.float32, staged), jnp.int32(1), jnp.int32(48)))
  blocks, pages = found
  np.testing.assert_array_equal(pages.keys, jnp.swapaxes(blocks.keys, 3, 4))
  np.testing.assert_array_equal(pages.values, blocks.values)


ABLE = dict(platform="tpu", head_dim=128, dtype="bfloat16", plain=True)


@pytest.mark.parametrize(
  ("other", "message"),
  [
    (dict(platform="cpu"), "a TPU"),
    (dict(dtype="float32"), "compute_dtype bfloat16"),
    (dict(head_dim=64), "a multiple of 128"),
    (dict(plain=False), "without sliding window"),
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
