"""Responses of full length, by a small network: the sampler against updates, and on a mesh."""

import functools

import jax
import numpy as np
import pytest
from oracles import updates
from oracles.batches import make_host_batch, random_prompts
from oracles.sampling import sample
from oracles.updates import relative_distance

from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Prompts, Sampling
from rlvr_jax.update.agreement import behavior_gap

S, V = 6, updates.V


def sampled(length, prompts, group_size):
  """(parameters, batch) of responses that nothing stops before `length` tokens."""
  model = updates.make_method().model
  params = model.init(jax.random.key(0))
  tokens = np.random.default_rng(0).integers(0, V, (prompts, S)).astype(np.int32)
  asked = Prompts(tokens, np.full(prompts, S, np.int32))
  settings = dict(max_prompt_length=S, max_new_tokens=length, stop_tokens=(), pad_token=0)
  engine = EnginePrograms(
    model, Sampling(), slots=prompts * group_size, prefill_rows=prompts, **settings
  )
  rollouts = sample(engine, params, {}, asked, jax.random.key(1), group_size)
  assert np.all(rollouts.lengths == length)
  batch = make_host_batch(
    np.ones(rollouts.tokens.shape, np.float32),
    rewards=(rollouts.tokens[..., 0] < V // 2).astype(np.float32),
    prompts=asked,
    tokens=rollouts.tokens,
    behavior_logprobs=rollouts.behavior_logprobs,
    reference_logprobs=rollouts.behavior_logprobs,
  )
  return params, batch


@pytest.mark.soak
@pytest.mark.parametrize(("length", "group_size"), [(2**14, 4), (2**16, 1)])
def test_the_sampler_agrees_with_updates_at_full_length(length, group_size, capsys):
  params, batch = sampled(length, 1, group_size)
  gap = functools.partial(behavior_gap, method=updates.make_method(), sampling=Sampling())
  rows = updates.in_rows(batch, rows=1, length=length + 512, several=group_size > 1)
  mean, largest, _ = jax.jit(gap)(params, {}, rows)
  with capsys.disabled():
    print(f"\n{length} tokens: gaps of {mean:.1e} on average, at most {largest:.1e} nats")
  assert 0 < mean < 1e-4  # what a run allows


def drawn(length, prompts, group_size):
  """A batch of random tokens; responses have different lengths, up to `length`."""
  rng = np.random.default_rng(0)
  lengths = rng.integers(length // 2 + 1, length + 1, (prompts, group_size))  # a row for each
  lengths[0, 0] = length
  tokens = rng.integers(0, V, (prompts, group_size, length)).astype(np.int32)
  logprobs = np.log(rng.uniform(0.8, 1.25, tokens.shape) / V).astype(np.float32)
  correct = (tokens[..., 0] < V // 2).astype(np.float32)
  correct[:, 0], correct[:, 1] = 0, 1
  return make_host_batch(
    (np.arange(length) < lengths[..., None]).astype(np.float32),
    rewards=correct,
    prompts=random_prompts(rng, prompts, S, V),
    tokens=tokens,
    behavior_logprobs=logprobs,
    reference_logprobs=logprobs,
  )


@pytest.mark.soak
def test_an_update_on_16384_tokens_is_the_same_on_a_mesh():
  """Rows over data and fsdp, tokens of the residual stream and heads over tensor."""
  params = updates.make_method().model.init(jax.random.key(0))
  batch = drawn(2**14, 4, 2)
  in_rows = functools.partial(updates.in_rows, batch, rows=1, length=2**14 + 512)
  expected = updates.gradient_of(updates.make_method(), in_rows(), params)
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  placed = jax.device_put(params, sharding.state_shardings(params, mesh))
  found = updates.gradient_of(updates.make_method(mesh=mesh), in_rows(mesh=mesh), placed)
  found = sharding.to_host(found)
  np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-4)
  assert relative_distance(found[1], expected[1]) < 1e-4
