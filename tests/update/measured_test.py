"""Advantages that need to know the policy: what they get of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
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

from rlvr_jax import advantages, geometry, reweighting
from rlvr_jax.geometry import GramContext, per_rollout_features
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.update.accumulate import first_phase
from rlvr_jax.update.objective import Estimate, estimate_coefficients
from rlvr_jax.update.step import initial_state, train_step

pytestmark = pytest.mark.usefixtures("x64")
TEMPERATURE = 0.8
ADVANTAGES = {
  "otb": advantages.otb(truncation=2.0),
  "opob": advantages.opob(),
}


@functools.cache
def _method(name, mesh=None, **changes):
  model = make_method("float64", mesh=mesh).model
  return make_method(
    "float64",
    mesh=mesh,
    advantage=ADVANTAGES[name],
    temperature=TEMPERATURE,
    gram=geometry.streaming() if name == "opob" else None,
    gram_context=GramContext(model, TEMPERATURE, mesh),
    **changes,
  )


@functools.cache
def _params():
  # Far enough from uniform that energies and norms differ.
  params = make_method("float64").model.init(jax.random.key(0))
  return jax.tree.map(lambda x: 3 * x, params)


def test_the_advantage_gets_what_the_model_says():
  """Of all tokens in the loss: log π, Σ π², and ‖g‖² of each rollout, from the full logits."""
  method, batch, params = _method("otb"), make_batch(np.float64), _params()
  everything = method._replace(
    advantage=method.advantage._replace(
      needs=("policy_logprobs", "squared_probabilities", "squared_norms")
    ),
    gram=geometry.streaming(),
  )

  @jax.jit
  def measured(params, batch):
    seen = []

    def estimate(batch):
      seen.append((batch.policy_logprobs, batch.squared_probabilities, batch.squared_norms))
      return Estimate(batch.rewards, batch.rewards, {})

    first_phase(params, {}, batch, estimate, jax.random.key(0), method=everything)
    ((logprobs, squares, norms),) = seen
    hidden = method.model.response_hidden(params, batch.prompts, batch.tokens)
    policy = jax.nn.softmax(head_logits(hidden, method.model.head(params)) / TEMPERATURE)
    features = per_rollout_features(params, {}, batch, everything.gram_context)
    return logprobs, squares, norms, policy, features

  logprobs, squares, norms, policy, features = measured(params, batch)
  chosen = jnp.take_along_axis(policy, jnp.asarray(batch.tokens)[..., None], -1)[..., 0]
  mask = batch.mask > 0
  np.testing.assert_allclose(np.exp(logprobs)[mask], chosen[mask], rtol=1e-9)
  np.testing.assert_allclose(squares[mask], jnp.sum(policy**2, -1)[mask], rtol=1e-9)
  np.testing.assert_allclose(norms.ravel(), jnp.sum(features**2, -1), rtol=1e-9)
  assert norms.shape == (P, G) and squares.shape == (P, G, T)
  assert np.ptp(squares[mask]) > 0.01


@pytest.mark.slow
def test_a_reweighting_beside_it_reads_the_same_gram_matrix():
  """SALT of OPOB's coefficients is SALT of these coefficients."""
  plain, batch, params = _method("opob"), make_batch(np.float64), _params()
  salted = plain._replace(reweighting=reweighting.salt())
  estimate = functools.partial(estimate_coefficients, (), method=plain)
  coefficients = first_phase(
    params, {}, batch, estimate, jax.random.key(0), method=plain
  ).coefficients
  (loss, _), gradient = gradient_of(salted, batch, params)
  given = salted._replace(advantage=advantages.grpo())
  (expected, _), other = gradient_of(given, batch, params, coefficients)
  np.testing.assert_allclose(loss, expected, rtol=1e-10)
  assert relative_distance(gradient, other) < 1e-10


@pytest.mark.slow
def test_a_step_reports_the_estimator_s_metrics():
  method, batch = _method("otb"), make_batch(np.float64)
  state = initial_state(method, _params(), jnp.float64(1.0))
  step = jax.jit(functools.partial(train_step, method=method))
  _, metrics = step(state, {}, batch)
  assert 0 < metrics["advantage/energy"] < 2 and 0 < metrics["advantage/tail"] < 1
  assert metrics["update/skipped"] == 0 and metrics["advantage/mass_success"] > 0
