"""The network against `transformers`: every folder under golden/hf, through the loader."""

from __future__ import annotations

import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface import load_params
from rlvr_jax.models.huggingface_config import checkpoint_config
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.rollouts.sampler import generate
from rlvr_jax.train.sharding import make_mesh, placed
from rlvr_jax.types import Prompts, Sampling

_SHARED = os.environ.get("RLVR_SHARED")
_FOLDERS = sorted(pathlib.Path(_SHARED, "golden", "hf").iterdir()) if _SHARED else []

pytestmark = pytest.mark.skipif(not _SHARED, reason="RLVR_SHARED is not set")


@pytest.fixture(params=_FOLDERS, ids=lambda folder: folder.name)
def case(request):
  model = transformer(checkpoint_config(request.param))
  model = model._replace(response_hidden=jax.jit(model.response_hidden))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  params = load_params(request.param, placed(shapes, make_mesh()))
  return model, params, np.load(request.param / "expected.npz")


def test_logits_of_a_prompt_and_its_response_equal_the_published_models(case):
  model, params, expected = case
  ids, mask = expected["input_ids"], expected["attention_mask"]
  longest_padding = int((mask == 0).sum(axis=1).max())
  for split in (longest_padding + 1, (longest_padding + ids.shape[1]) // 2):
    prompts = Prompts(
      tokens=jnp.asarray(ids[:, :split], jnp.int32),
      lengths=jnp.asarray(mask[:, :split].sum(axis=1), jnp.int32),
    )
    responses = jnp.asarray(np.pad(ids[:, split:], [(0, 0), (0, 1)]), jnp.int32)[:, None]
    hidden = model.response_hidden(params, prompts, responses)[:, 0]
    logits = head_logits(hidden, model.head(params))
    np.testing.assert_allclose(logits, expected["logits"][:, split - 1 :], atol=1e-4, rtol=1e-4)


def test_logits_of_cached_decoding_equal_the_published_models(case):
  model, params, expected = case
  ids, mask = jnp.asarray(expected["input_ids"], jnp.int32), expected["attention_mask"]
  split = int((mask == 0).sum(axis=1).max()) + 1
  lengths = jnp.asarray(mask[:, :split].sum(axis=1), jnp.int32)
  prompts = Prompts(tokens=ids[:, :split], lengths=lengths)
  rest = ids[:, split:]

  @jax.jit
  def decoded(params):
    hidden, cache, step = model.start_decoding(params, prompts, 1, rest.shape[1])

    def one(cache, inputs):
      t, tokens = inputs
      hidden, cache = step(cache, tokens[:, None], t)
      return cache, hidden[:, 0]

    _, later = jax.lax.scan(one, cache, (jnp.arange(rest.shape[1]), rest.T))
    hidden = jnp.concatenate([hidden[:, None], jnp.swapaxes(later, 0, 1)], axis=1)
    return head_logits(hidden, model.head(params))

  logits = decoded(params)
  np.testing.assert_allclose(logits, expected["logits"][:, split - 1 :], atol=1e-4, rtol=1e-4)


def test_greedy_cached_decoding_gives_the_published_models_tokens(case):
  model, params, expected = case
  ids, mask, greedy = (expected[k] for k in ("input_ids", "attention_mask", "greedy_tokens"))
  new = greedy[:, ids.shape[1] :] if greedy.shape[1] > ids.shape[1] else greedy
  prompts = Prompts(tokens=jnp.asarray(ids, jnp.int32), lengths=jnp.asarray(mask.sum(1), jnp.int32))
  run = functools.partial(
    generate,
    model=model,
    group_size=1,
    max_new_tokens=new.shape[1],
    sampling=Sampling(temperature=0.0),
    stop_tokens=(),
    pad_token=0,
  )
  rollouts = jax.jit(run)(params, {}, prompts, jax.random.key(0))
  np.testing.assert_array_equal(rollouts.tokens[:, 0], new)
