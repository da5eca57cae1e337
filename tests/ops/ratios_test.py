"""Ratios, effective sample size and the distance to the behavior policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.batches import metric_value, poison, random_case

from rlvr_jax.ops import ratios


def test_behavior_metrics_equal_numpy():
  policy, batch, _ = random_case(0)
  kept = np.asarray(batch.mask) > 0
  d = np.asarray(policy, np.float64)[kept] - np.asarray(batch.behavior_logprobs)[kept]
  rho = np.exp(d)
  metrics = {k: metric_value(v) for k, v in ratios.behavior_metrics(policy, batch).items()}
  assert metrics == pytest.approx(
    {
      "behavior/ratio_mean": rho.mean(),
      "behavior/ratio_max": rho.max(),
      "behavior/ess": rho.sum() ** 2 / (rho.size * (rho**2).sum()),
      "behavior/kl_k1": -d.mean(),
      "behavior/kl_k3": (rho - 1 - d).mean(),
    },
    rel=1e-5,
  )


@pytest.mark.parametrize("fill", [np.nan, -np.inf])
def test_behavior_metrics_ignore_what_is_masked(fill):
  policy, batch, _ = random_case(1)
  clean = ratios.behavior_metrics(policy, batch)
  spoilt = ratios.behavior_metrics(*poison(policy, batch, fill))
  jax.tree.map(np.testing.assert_array_equal, clean, spoilt)


def test_behavior_metrics_without_a_token_have_no_value():
  policy, batch, _ = random_case(1)
  batch = dataclasses.replace(batch, mask=jnp.zeros_like(batch.mask))
  metrics = ratios.behavior_metrics(policy, batch)
  metrics |= ratios.ratios_by_sign(policy, batch, jnp.ones(batch.rewards.shape))
  assert all(np.isnan(metric_value(m)) for m in metrics.values())


def test_sequence_ratios_of_hand_sized_numbers():
  mask = jnp.array([[1.0, 1, 0], [0, 0, 0]])
  log_ratio = ratios.log_ratios(
    jnp.log(jnp.array([[2.0, 8, 5], [3, 3, 3]])), jnp.zeros((2, 3)), mask
  )
  np.testing.assert_allclose(
    np.exp(ratios.sequence_log_ratios(log_ratio, mask)), [[16.0], [1.0]], rtol=1e-6
  )
  np.testing.assert_allclose(
    np.exp(ratios.mean_log_ratios(log_ratio, mask)), [[4.0], [1.0]], rtol=1e-6
  )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
  st.lists(st.floats(-30, 30, width=32), min_size=8, max_size=8),
  st.lists(st.booleans(), min_size=8, max_size=8),
  st.floats(-20, 20, width=32),
)
def test_normalized_ess_is_bounded_and_ignores_a_common_factor(log_weights, kept, shift):
  log_weights, mask = jnp.asarray(log_weights), jnp.asarray(kept, jnp.float32)
  count = sum(kept)
  ess = ratios.normalized_ess(log_weights, mask)
  if count == 0:
    assert ess == 1
    return
  assert 1 / count - 1e-6 <= ess <= 1 + 1e-6
  np.testing.assert_allclose(ratios.normalized_ess(log_weights + shift, mask), ess, rtol=1e-4)


def test_normalized_ess_per_response_has_ones_for_empty_responses():
  log_weights = jnp.log(jnp.array([[1.0, 3.0], [jnp.nan, jnp.inf]]))
  ess = ratios.normalized_ess(log_weights, jnp.array([[1.0, 1], [0, 0]]), axis=-1)
  np.testing.assert_allclose(ess, [[0.8], [1.0]], rtol=1e-6)


def test_metrics_by_sign_by_lag_and_by_source():
  mask = np.array([[[1, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 1]]], np.float32)
  policy, batch, _ = random_case(11, mask.shape, spread=1.0)
  batch = dataclasses.replace(
    batch,
    mask=jnp.asarray(mask),
    lags=jnp.array([[3, 3], [-1, -1]])[..., None] * jnp.ones(mask.shape, jnp.int32),
    sources=jnp.array([0, 1]),
    correct=jnp.array([[1.0, 0.0], [1.0, 1.0]]),
  )
  coefficients = jnp.array([[1.0, -2.0], [0.0, -1.0]])
  ratio = np.exp(np.asarray(policy - batch.behavior_logprobs))
  value = lambda metrics, name: float(metric_value(metrics[name]))

  signed = ratios.ratios_by_sign(policy, batch, coefficients)
  negative = np.concatenate([ratio[0, 1], ratio[1, 1]])
  assert value(signed, "behavior/ratio_mean_negative") == pytest.approx(negative.mean(), rel=1e-5)
  assert value(signed, "behavior/ratio_max_negative") == pytest.approx(negative.max(), rel=1e-6)
  assert value(signed, "behavior/ratio_min_negative") == pytest.approx(negative.min(), rel=1e-6)
  assert value(signed, "behavior/ratio_mean_positive") == pytest.approx(
    ratio[0, 0, :2].mean(), rel=1e-5
  )

  # The coefficients of tokens: the first one alone is positive.
  of_tokens = jnp.where(jnp.arange(ratio.shape[-1]) == 0, 1.0, -1.0) * jnp.ones(ratio.shape)
  signed = ratios.ratios_by_sign(policy, batch, of_tokens)
  first = ratio[..., 0][np.asarray(batch.mask)[..., 0] > 0]
  assert value(signed, "behavior/ratio_mean_positive") == pytest.approx(first.mean(), rel=1e-5)

  lags = ratios.lag_metrics(batch)  # rollouts of no policy of this run do not count
  assert value(lags, "staleness/mean") == value(lags, "staleness/max") == 3
  of_tokens = np.array([[[0, 0, 9], [3, 2, 2]], [[-1, 9, 9], [1, 1, 0]]])
  fresh = ratios.lag_metrics(dataclasses.replace(batch, lags=jnp.asarray(of_tokens)))
  assert value(fresh, "staleness/mean") == pytest.approx((0 + 0 + 3 + 2 + 2 + 1 + 1 + 0) / 8)
  assert value(fresh, "staleness/max") == 3

  found = ratios.source_metrics(policy, batch, ["a", "b"])
  theirs = np.concatenate([ratio[1, 0, :1], ratio[1, 1]])
  assert value(found, "source/a/token_share") == pytest.approx(5 / 9)
  assert value(found, "source/b/ratio_mean") == pytest.approx(theirs.mean(), rel=1e-5)
  expected = theirs.sum() ** 2 / (4 * (theirs**2).sum())
  assert value(found, "source/b/ess") == pytest.approx(expected, rel=1e-5)
  assert value(found, "source/a/pass_rate") == 0.5 and value(found, "source/b/pass_rate") == 1
  k3 = theirs - 1 - np.log(theirs)
  assert value(found, "source/b/kl_k3") == pytest.approx(k3.mean(), rel=1e-4)
