"""The update: shardings, phases, terms, non-finite gradients; `layouts_test` has its layouts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles.updates import (
  G,
  P,
  T,
  gradient_of,
  make_batch,
  make_method,
  relative_distance,
)

from rlvr_jax.ops.reductions import values
from rlvr_jax.train.cluster import sharding
from rlvr_jax.update.accumulate import policy_logprobs
from rlvr_jax.update.step import initial_state, train_step


def test_parameters_are_sharded_by_the_rules():
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  method = make_method()
  state = jax.eval_shape(
    lambda: initial_state(method, method.model.init(jax.random.key(0)), jnp.zeros(()))
  )
  shardings = sharding.state_shardings(state, mesh)
  spec = lambda tree, name: tuple(tree["blocks"][name].spec)
  assert spec(shardings.params, "query") == (None, "fsdp", "tensor")
  assert spec(shardings.params, "down") == (None, "tensor", "fsdp")
  assert tuple(shardings.params["embedding"].spec) == ("tensor", "fsdp")
  moments = shardings.opt_state[0].mu
  assert spec(moments, "query") == spec(shardings.params, "query")
  norm = shardings.params["final_norm"]["scale"]
  assert norm.is_fully_replicated


@pytest.mark.slow
def test_the_gradient_on_policy_is_the_policy_gradient(x64):
  """At ρ = 1 the surrogate's gradient is −Σ m A ∇log π / Σ m, by plain autodiff."""
  method = make_method("float64")
  params = method.model.init(jax.random.key(1))
  batch = make_batch(np.float64)
  logprobs, _ = policy_logprobs(params, {}, batch, method=method)
  batch = dataclasses.replace(batch, behavior_logprobs=logprobs)
  (_, _), gradient = gradient_of(method, batch, params)

  def plain(params):
    logprobs, _ = policy_logprobs(params, {}, batch, method=method)
    rewards = batch.rewards
    deviation = rewards.std(axis=1, keepdims=True, ddof=1)
    coefficients = (rewards - rewards.mean(axis=1, keepdims=True)) / (deviation + 1e-6)
    return -jnp.sum(batch.mask * coefficients[..., None] * logprobs) / batch.mask.sum()

  assert relative_distance(gradient, jax.grad(plain)(params)) < 1e-10


@pytest.mark.slow
def test_terms_add_their_gradients(x64):
  """Loss with KL and entropy terms = surrogate + β·KL − c·H, each from its definition."""
  batch = make_batch(np.float64)
  params = make_method("float64").model.init(jax.random.key(1))
  with_terms = make_method("float64", reference_kl=0.3, entropy_bonus=0.05)
  (loss, metrics), _ = gradient_of(with_terms, batch, params)
  (surrogate, _), _ = gradient_of(make_method("float64"), batch, params)
  logprobs, entropy = policy_logprobs(params, {}, batch, method=with_terms)
  log_ratio = batch.reference_logprobs - logprobs
  mean = lambda x: float(np.sum(batch.mask * x) / batch.mask.sum())
  kl = mean(np.exp(log_ratio) - 1 - log_ratio)
  np.testing.assert_allclose(loss, surrogate + 0.3 * kl - 0.05 * mean(entropy), rtol=1e-10)
  np.testing.assert_allclose(values(metrics)["reference/kl"], kl, rtol=1e-10)


@functools.cache
def stepping():
  """(a jitted step, a state); without a gradient its optimizer leaves the parameters alone."""
  method = make_method(optimizer=optax.adam(1e-2))
  state = initial_state(method, method.model.init(jax.random.key(0)), jnp.zeros(()))
  return jax.jit(functools.partial(train_step, method=method)), state


def test_a_nonfinite_gradient_is_skipped_and_counted():
  (step, state), batch = stepping(), make_batch()
  poisoned = dataclasses.replace(batch, behavior_logprobs=np.full((P, G, T), -np.inf, np.float32))
  after, metrics = step(state, {}, poisoned)
  assert (int(after.step), int(after.skipped), int(after.skipped_in_a_row)) == (1, 1, 1)
  assert float(metrics["update/skipped_in_a_row"]) == 1
  jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
  jax.tree.map(np.testing.assert_array_equal, after.opt_state, state.opt_state)
  again, _ = step(after, {}, batch)
  assert (int(again.step), int(again.skipped), int(again.skipped_in_a_row)) == (2, 1, 0)
  clean, _ = step(state, {}, batch)
  jax.tree.map(np.testing.assert_array_equal, again.params, clean.params)


def test_a_batch_without_loss_tokens_changes_nothing():
  step, state = stepping()
  batch = dataclasses.replace(make_batch(), mask=np.zeros((P, G, T), np.float32))
  after, metrics = step(state, {}, batch)
  assert float(metrics["loss/surrogate"]) == 0 and int(after.skipped) == 0
  jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


@pytest.mark.slow
def test_padding_tokens_and_width_change_nothing(x64):
  method = make_method("float64")
  params = method.model.init(jax.random.key(0))
  batch = make_batch(np.float64)
  (_, _), gradient = gradient_of(method, batch, params)
  wide = lambda x, fill: np.pad(x, [(0, 0), (0, 0), (0, 3)], constant_values=fill)
  other = dataclasses.replace(
    batch,
    tokens=wide(np.where(batch.mask > 0, batch.tokens, 7), 9),
    mask=wide(batch.mask, 0),
    behavior_logprobs=wide(np.where(batch.mask > 0, batch.behavior_logprobs, np.nan), np.inf),
    reference_logprobs=None,
  )
  (_, _), other_gradient = gradient_of(method, other, params)
  assert relative_distance(other_gradient, gradient) < 1e-12


@pytest.mark.slow
def test_the_order_of_prompts_and_rollouts_does_not_matter(x64):
  method = make_method("float64")
  params = method.model.init(jax.random.key(0))
  batch = make_batch(np.float64)
  rng = np.random.default_rng(3)
  prompts, rollouts = rng.permutation(P), rng.permutation(G)
  permuted = jax.tree.map(lambda x: x[prompts][:, rollouts] if x.ndim > 1 else x[prompts], batch)
  permuted = dataclasses.replace(
    permuted, prompts=jax.tree.map(lambda x: x[prompts], batch.prompts)
  )
  (_, _), gradient = gradient_of(method, batch, params)
  (_, _), other = gradient_of(method, permuted, params)
  assert relative_distance(other, gradient) < 1e-11


@pytest.mark.parametrize("prompts", [6, 0])
def test_uneven_batches_are_refused_with_the_remedy(prompts):
  mesh = sharding.make_mesh(data=2, fsdp=2)
  with pytest.raises(ValueError, match="multiple of 4"):
    sharding.check_batch("config.batch.prompts", prompts, mesh)


def test_a_mesh_larger_than_the_machine_is_refused():
  with pytest.raises(ValueError, match="16 devices, but there are 8"):
    sharding.make_mesh(data=4, fsdp=2, tensor=2)
