"""The negative-advantage veto: scopes by hand, an oracle, and its company with every loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import evaluate, make_batch, metric_value, random_case

from rlvr_jax import advantages, losses
from rlvr_jax.ops.veto import SCOPES, negative_advantage_veto

# One rollout of five tokens, A < 0, ρ small at 1 and 3; the last position is padding.
RATIOS = np.array([1.0, 0.001, 1.0, 0.002, 1.0, 1e-9])
MASK = np.array([1.0, 1, 1, 1, 1, 0])


def _case(ratios=RATIOS, mask=MASK, coefficient=-1.0):
  batch = make_batch(mask[None, None], np.zeros((1, 1, mask.size)))
  return jnp.log(jnp.asarray(ratios))[None, None], batch, jnp.full((1, 1), coefficient)


def _kept(case, **hyper):
  policy, batch, coefficients = case
  kept, _, metrics = negative_advantage_veto(**hyper)(
    jnp.ones_like(policy), policy, batch, coefficients
  )
  return np.asarray(kept)[0, 0], metrics


@pytest.mark.parametrize(
  "scope, expected",
  [
    ("suffix", [1, 1, 0, 1, 0, 1]),
    ("trigger", [1, 0, 1, 0, 1, 1]),
    ("trigger_and_suffix", [1, 0, 0, 0, 0, 1]),
    ("response", [0, 0, 0, 0, 0, 1]),
  ],
)
def test_scopes(scope, expected):
  kept, metrics = _kept(_case(), scope=scope)
  np.testing.assert_array_equal(kept, expected)
  assert metric_value(metrics["veto/token_fraction"]) == pytest.approx(np.mean(1 - kept[:5]))
  assert metric_value(metrics["veto/trigger_rate"]) == pytest.approx(2 / 5)


def test_coefficients_of_tokens_trigger_where_they_are_negative():
  policy, batch, _ = _case()
  coefficients = jnp.asarray([-1.0, 1, -1, -1, -1, -1])[None, None]  # not at the first small ratio
  kept, metrics = _kept((policy, batch, coefficients))
  np.testing.assert_array_equal(kept, [1, 1, 1, 1, 0, 1])
  assert metric_value(metrics["veto/trigger_rate"]) == pytest.approx(1 / 4)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_turn_with_a_positive_coefficient_of_its_own_is_never_vetoed(scope):
  """`mt_grpo` with rewards (1, 0), scores (0, 1) and λ = 2: turn 1 of the first dialogue fails."""
  ratios = np.array([0.001, 1, 1, 1, 1, 1, 1, 1])
  rewards, turn_scores = np.array([[1.0, 0.0]]), np.full((1, 2, 8), np.nan)
  turn_scores[0, :, 2] = 0, 1  # of turn 1; turn 2 has none
  batch = make_batch(
    np.tile(np.array([1.0, 1, 1, 0, 0, 1, 1, 1]), (1, 2, 1)),
    rewards=rewards,
    turns=np.tile(np.array([0, 0, 0, 1, 1, 2, 2, 2]), (1, 2, 1)),
    turn_scores=turn_scores,
  )
  estimator = advantages.mt_grpo(turn_weight=2.0)
  A = jax.jit(lambda batch: estimator.in_loss((), batch, estimator.apply((), batch)))(batch)
  assert A[0, 0, 0] < 0 < A[0, 0, 5]
  policy = np.log(np.tile(ratios, (1, 2, 1)), dtype=np.float32)
  veto = jax.jit(negative_advantage_veto(scope=scope))
  kept, *_ = jax.device_get(veto(np.ones(A.shape, np.float32), policy, batch, A))
  assert np.all(kept[0, 0, 5:] == 1)
  assert np.array_equal(
    kept[0, 0, :3], dict(suffix=[1, 0, 0], trigger=[0, 1, 1]).get(scope, [0] * 3)
  )


def test_threshold_and_direction():
  assert _kept(_case(), threshold=0.0015)[0].sum() == 3  # position 1 only: 2, 3 and 4 go
  assert _kept(_case(), threshold=1e-4)[0].sum() == 6
  above = _kept(_case(ratios=1 / RATIOS), trigger="above", threshold=100.0)[0]
  np.testing.assert_array_equal(above, _kept(_case())[0])


@pytest.mark.parametrize("coefficient", [0.0, 2.0])
def test_only_negative_advantages_are_vetoed(coefficient):
  kept, metrics = _kept(_case(coefficient=coefficient))
  assert np.all(kept == 1)
  assert metric_value(metrics["veto/token_fraction"]) == 0
  assert np.isnan(metric_value(metrics["veto/trigger_rate"]))  # of no token


@pytest.mark.parametrize(
  ("scope", "trigger"), [*((scope, "below") for scope in SCOPES), ("suffix", "above")]
)
def test_random_cases_against_loops(scope, trigger):
  policy, batch, coefficients = random_case(5, (4, 4, 8), spread=1.0)
  kept, mask, _ = negative_advantage_veto(scope=scope, threshold=0.7, trigger=trigger)(
    jnp.ones_like(policy), policy, batch, coefficients
  )
  ratio = np.exp(np.asarray(policy - batch.behavior_logprobs))
  for i, j, t in np.ndindex(kept.shape):
    crossed = ratio[i, j] < 0.7 if trigger == "below" else ratio[i, j] > 0.7
    triggers = crossed & (np.asarray(batch.mask)[i, j] > 0) & (float(coefficients[i, j]) < 0)
    after = any(triggers[:t])
    vetoed = {
      "suffix": after and not triggers[t],
      "trigger": triggers[t],
      "trigger_and_suffix": after or triggers[t],
      "response": any(triggers),
    }[scope] and batch.mask[i, j, t] > 0
    assert kept[i, j, t] == (not vetoed)
  np.testing.assert_array_equal(mask, batch.mask)


def test_renormalize_takes_vetoed_tokens_out_of_the_denominator():
  policy, batch, coefficients = _case()
  loss = losses.reinforce()
  value = lambda **hyper: evaluate(
    loss, policy, batch, coefficients, veto=negative_advantage_veto(**hyper)
  )[0][0]
  np.testing.assert_allclose(5 * value(), 3 * value(renormalize=True), rtol=1e-6)


# One loss of tokens, one of responses, and one with a statistic of the batch; the others are slow.
QUICK = ("ppo_clip", "gspo", "p3o")


@pytest.mark.parametrize(
  "name",
  [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in losses.__all__],
)
def test_a_vetoed_token_loses_its_gradient_and_no_other_changes(name):
  case = random_case(6, (4, 4, 8), spread=1.0)
  policy, loss = case[0], getattr(losses, name)()
  veto = negative_advantage_veto(threshold=0.6)
  kept, _, _ = veto(jnp.ones_like(policy), *case)
  (value, metrics), gradient = evaluate(loss, *case, veto=veto)
  _, plain = evaluate(loss, *case)
  assert 0 < metric_value(metrics["veto/token_fraction"]) < 1
  assert np.isfinite(value)
  np.testing.assert_allclose(gradient, plain * kept, rtol=1e-5, atol=1e-8)


def test_metrics_without_a_token_have_no_value():
  policy, batch, coefficients = random_case(7)
  batch = dataclasses.replace(batch, mask=jnp.zeros_like(batch.mask))
  *_, metrics = negative_advantage_veto()(policy, policy, batch, coefficients)
  assert all(np.isnan(metric_value(m)) for m in metrics.values())
