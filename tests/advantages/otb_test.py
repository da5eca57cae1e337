"""The baselines of tokens against the oracle, and where they begin and end."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.advantage_oracles import opob_of, otb_tokens
from oracles.batches import make_batch, metric_value

from rlvr_jax import advantages, parts
from rlvr_jax.advantages.otb import token_energies

pytestmark = pytest.mark.usefixtures("x64")
P, G, T, V = 6, 4, 9, 5


def _case(seed=0):
  """A batch with holes in its masks, and the policy's whole distributions f64[P, G, T, V]."""
  rng = np.random.default_rng(seed)
  mask = np.arange(T) < rng.integers(1, T + 1, (P, G))[..., None]
  mask &= rng.random((P, G, T)) < 0.8
  rewards = rng.normal(size=(P, G))
  rewards[0] = 0.7
  distributions = rng.dirichlet(np.ones(V), (P, G, T))
  tokens = rng.integers(0, V, (P, G, T))
  chosen = np.take_along_axis(distributions, tokens[..., None], -1)[..., 0]
  behavior = np.log(chosen) + 0.5 * rng.normal(size=(P, G, T))
  batch = make_batch(
    mask.astype(float),
    behavior,
    rewards,
    policy_logprobs=np.log(chosen),
    squared_probabilities=np.square(distributions).sum(-1),
    squared_norms=rng.uniform(0.1, 9.0, (P, G)),
  )
  return batch, distributions, tokens


def test_a_level_without_weights_is_refused():
  with pytest.raises(ValueError, match="level = 'sequence' has no effect with truncation = None"):
    advantages.otb(level="sequence")


def test_energies_are_the_squared_norms_of_the_gradient_by_the_logits():
  batch, distributions, tokens = _case()
  expected = np.square(np.eye(V)[tokens] - distributions).sum(-1)
  found = token_energies(batch.policy_logprobs, batch.squared_probabilities)
  np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_coefficients_equal_the_oracle(level, zero_tail):
  batch, distributions, tokens = _case()
  how = {} if level is None else dict(truncation=1.3, level=level)
  estimator = advantages.otb(zero_tail=zero_tail, zero_constant=False, **how)
  found = np.asarray(estimator.per_token((), batch, None))
  energies = np.square(np.eye(V)[tokens] - distributions).sum(-1)
  mask = np.asarray(batch.mask) > 0
  for p in range(P):
    of_group = []
    for g in range(G):
      ratios = np.exp(batch.policy_logprobs - batch.behavior_logprobs)[p, g][mask[p, g]]
      if level == "sequence":
        ratios = np.full_like(ratios, np.prod(ratios))
      weights = np.minimum(ratios, 1.3) if level else 1.0
      of_group.append((weights**2 * energies[p, g][mask[p, g]]).tolist())
    expected = otb_tokens(np.asarray(batch.rewards[p]).tolist(), of_group, zero_tail, False)
    for g in range(G):
      np.testing.assert_allclose(found[p, g][mask[p, g]], expected[g], rtol=1e-10, atol=1e-12)
  assert np.all(found[~mask] == 0)
  mean = np.where(mask, found, 0).sum(-1) / np.maximum(mask.sum(-1), 1)
  np.testing.assert_allclose(estimator.apply((), batch), mean, rtol=1e-10, atol=1e-12)


def test_a_constant_group_is_zero_in_its_tail_too_unless_told_otherwise():
  batch, *_ = _case()
  of = lambda **how: np.asarray(advantages.otb(**how).per_token((), batch, None))[0]
  assert np.all(of() == 0)
  tail = of(zero_constant=False)
  assert np.isclose(tail, 0.7).any() and np.all(np.isclose(tail, 0.7) | (np.abs(tail) < 1e-6))
  np.testing.assert_allclose(of(zero_constant=False, zero_tail=False), 0, atol=1e-6)


def test_metrics_are_means_over_loss_tokens():
  mask = np.arange(5) < np.array([[5, 3, 1]])[..., None]
  batch = make_batch(mask.astype(float), rewards=np.array([[1.0, 0, 0]]))
  batch = dataclasses.replace(
    batch,
    policy_logprobs=jnp.full(mask.shape, jnp.log(0.5)),
    squared_probabilities=jnp.full(mask.shape, 0.3),
  )
  metrics = advantages.otb().metrics((), batch)
  assert metric_value(metrics["advantage/tail"]) == pytest.approx(2 / 9)
  assert metric_value(metrics["advantage/energy"]) == pytest.approx(0.3)


def test_the_parts_take_what_is_measured():
  batch, *_ = _case()
  names = ("policy_logprobs", "behavior_logprobs", "squared_probabilities", "squared_norms")
  fields = {name: getattr(batch, name) for name in names} | dict(mask=batch.mask)
  otb = advantages.otb(truncation=2.0)
  found = parts.advantages_of(otb, batch.rewards, **fields)
  np.testing.assert_array_equal(found, otb.per_token((), batch, None))
  with pytest.raises(ValueError, match=r"'otb' needs batch\.policy_logprobs, got None"):
    parts.advantages_of(otb, batch.rewards)
  found = parts.advantages_of(advantages.opob(), batch.rewards, **fields)
  np.testing.assert_array_equal(found, advantages.opob().apply((), batch))


@pytest.mark.parametrize("by_deviation", [True, False])
def test_opob_equals_the_oracle_however_large_the_weights_are(by_deviation):
  batch, *_ = _case()
  estimator = advantages.opob(by_deviation=by_deviation)
  found = np.asarray(estimator.apply((), batch))
  log_ratios = np.where(batch.mask > 0, batch.policy_logprobs - batch.behavior_logprobs, 0)
  W = np.exp(log_ratios.sum(-1))
  for p in range(P):
    rows = (np.asarray(x[p]).tolist() for x in (batch.rewards, W, batch.squared_norms))
    np.testing.assert_allclose(found[p], opob_of(*rows, by_deviation), rtol=1e-9, atol=1e-12)
  ess = metric_value(estimator.metrics((), batch)["advantage/sequence_ess"])
  assert ess == pytest.approx(W.sum() ** 2 / (W.size * (W**2).sum()), rel=1e-6)
  far = dataclasses.replace(batch, policy_logprobs=batch.policy_logprobs + 900.0)
  assert np.all(np.isfinite(estimator.apply((), far)))
  gone = dataclasses.replace(batch, policy_logprobs=batch.policy_logprobs - 900.0)
  plain = np.asarray(advantages.opob().apply((), gone))  # W = 0 leaves no baseline
  np.testing.assert_allclose(plain[1:], batch.rewards[1:], rtol=1e-12)
