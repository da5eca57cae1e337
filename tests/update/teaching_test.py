"""Updates with a teacher: statistics, veto; without a weight bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.updates import (
  CONFIG,
  G,
  P,
  T,
  gradient_of,
  in_rows,
  make_batch,
  make_method,
  relative_distance,
  small_model,
)

from rlvr_jax import distillation, losses
from rlvr_jax.ops.reductions import values
from rlvr_jax.ops.veto import negative_advantage_veto
from rlvr_jax.update.objective import Constants, Estimate, Scores, surrogate
from rlvr_jax.update.teaching import Teaching

slow = pytest.mark.slow


@functools.cache
def taught(name, *, weight=0.5, reward_weight=1.0):
  made = getattr(distillation, name)()
  return Teaching(made, weight, reward_weight, temperature=1.0, names=("teacher",))


def scored(batch, seed=1):
  """The batch with a teacher's log-probabilities."""
  rng, dtype = np.random.default_rng(seed), batch.mask.dtype
  return dataclasses.replace(
    batch,
    teacher_logprobs=(rng.normal(size=(P, G, T)) * 0.3 - 3.4).astype(dtype),
    teacher_entropy=np.full((P, G, T), 0.7, dtype),
  )


def test_a_vetoed_token_has_no_gradient_of_its_teacher_either():
  """Whether or not it stays in the denominator, which is all that `renormalize` changes."""
  batch = scored(make_batch())
  rng = np.random.default_rng(3)
  policy = batch.behavior_logprobs + rng.normal(size=(P, G, T)).astype(np.float32)
  signs = jnp.where(jnp.arange(G) % 2, 1.0, -1.0) * jnp.ones((P, 1))
  constants = Constants(signs, None, {}, Estimate(signs, signs, {}))
  found = {}
  for renormalize in (False, True):
    veto = negative_advantage_veto(scope="response", threshold=0.5, renormalize=renormalize)
    method = make_method(teaching=taught("opd_score"), veto=veto, aggregation="token_mean")

    def total(policy, method=method):
      scores = Scores(policy, jnp.zeros_like(policy))
      return surrogate(scores, batch, constants, method=method)[0]

    found[renormalize] = jax.jit(jax.grad(total))(policy)
  assert 0 < np.sum(found[True] != 0) < np.sum(batch.mask > 0)
  np.testing.assert_array_equal(found[False], found[True])


@functools.cache
def case():
  """(batch with a teacher's log-probabilities in rows, parameters)."""
  return in_rows(scored(make_batch()), rows=4), make_method().model.init(jax.random.key(0))


@pytest.mark.parametrize("name", ["opd", pytest.param("opd_score", marks=slow)])
def test_without_a_weight_the_update_is_that_of_the_reward_bit_for_bit(name):
  """In all that a step takes of it. The teacher is measured all the same."""
  (loss, plain), gradient = gradient_of(make_method(), *case())
  method = make_method(teaching=taught(name, weight=0.0))
  (found, metrics), other = gradient_of(method, *case())
  jax.tree.map(np.testing.assert_array_equal, (found, other), (loss, gradient))
  plain, metrics = values(plain), values(metrics)
  assert metrics["policy/entropy"] == plain["policy/entropy"]
  np.testing.assert_allclose(metrics["teacher/entropy"], 0.7, rtol=1e-6)
  assert metrics["teacher/kl_k3"] > 0


def test_alone_rewards_change_nothing():
  method, (batch, params) = make_method(teaching=taught("opd", reward_weight=0.0)), case()
  (_, _), gradient = gradient_of(method, batch, params)
  others = dataclasses.replace(batch, rewards=1 - batch.rewards, correct=1 - batch.correct)
  (_, _), of_others = gradient_of(method, others, params)
  assert relative_distance(of_others, gradient) == 0


def test_a_teacher_that_is_the_student_has_no_divergence():
  """Its forward pass is a part of the update, in the same rows."""
  teaching = taught("kl")._replace(model=small_model(CONFIG))
  method, (batch, params) = make_method(teaching=teaching), case()
  (_, metrics), _ = gradient_of(method, batch, params, teacher=(params, {}))
  assert abs(values(metrics)["teacher/divergence"]) < 1e-6


@slow
@pytest.mark.parametrize("loss", [losses.ppo_clip(), losses.kl_cov(share=0.3)], ids=str)
def test_a_teacher_s_advantages_are_coefficients_by_token(x64, loss):
  """In the loss and in its statistics; with the sampler in the difference they are known before."""
  made = distillation.opd(student="behavior")
  teaching = Teaching(made, 0.5, 2.0, temperature=1.0, names=("teacher",))
  method = make_method("float64", loss=loss)
  params = method.model.init(jax.random.key(0))
  batch = in_rows(scored(make_batch(np.float64)), rows=4)
  coefficients = method.advantage.apply((), batch)
  by_token = 2.0 * coefficients[..., None] + 0.5 * made.advantage(batch.behavior_logprobs, batch)
  (_, _), expected = gradient_of(method, batch, params, by_token)
  (_, _), found = gradient_of(method._replace(teaching=teaching), batch, params, coefficients)
  assert relative_distance(found, expected) < 1e-12
