"""GDPO of several rewards against the oracle, and what it needs."""

import numpy as np
import pytest
from oracles.advantage_oracles import gdpo_of_several
from oracles.batches import make_batch, metric_value

from rlvr_jax import advantages, parts

pytestmark = pytest.mark.usefixtures("x64")
WEIGHTS = (1.0, 0.5, -0.25)


def _batch(seed=0):
  """Six groups of five rollouts with three rewards; the first is constant, in another one is."""
  rng = np.random.default_rng(seed)
  rewards = rng.normal(size=(6, 5, 3))
  rewards[..., 0] = rng.integers(0, 2, (6, 5))
  rewards[0], rewards[1, :, 2] = 0.1, 0.3
  mask = np.arange(7) < rng.integers(1, 8, (6, 5))[..., None]
  return make_batch(mask.astype(float), rewards=rewards[..., 0], rewards_by_name=rewards)


@pytest.mark.parametrize("over", ["rollouts", "tokens"])
def test_coefficients_of_several_rewards_equal_the_oracle(over):
  batch = _batch()
  lengths = np.asarray(batch.mask).sum(-1).astype(int).tolist()
  hyper = dict(weights=WEIGHTS, epsilon=1e-3, batch_epsilon=0.1, over=over)
  expected = gdpo_of_several(np.asarray(batch.rewards_by_name).tolist(), lengths, **hyper)
  found = np.asarray(advantages.gdpo(**hyper).apply((), batch))
  np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
  assert np.all(found[0] == 0) == (over == "rollouts")


def test_rewards_of_other_scales_count_alike():
  """Which the weights of a sum do not achieve."""
  batch = _batch()
  scaled = batch.rewards_by_name * np.array([1.0, 1e3, 1e-2])
  of = lambda rewards: parts.advantages_of(
    advantages.gdpo(epsilon=0.0), batch.rewards, rewards_by_name=rewards
  )
  np.testing.assert_allclose(of(scaled), of(batch.rewards_by_name), rtol=1e-10, atol=1e-12)


def test_metrics_are_of_each_reward():
  batch = _batch()
  metrics = advantages.gdpo().metrics((), batch)
  found = {name.removeprefix("advantage/"): metric_value(x) for name, x in metrics.items()}
  np.testing.assert_allclose(
    [found[f"reward_mean_{k}"] for k in range(3)], batch.rewards_by_name.mean((0, 1)), rtol=1e-6
  )
  assert [found[f"reward_varies_{k}"] for k in (1, 2)] == pytest.approx([5 / 6, 4 / 6])


def test_what_is_missing_is_said():
  batch = _batch()
  with pytest.raises(ValueError, match=r"'gdpo' needs batch\.rewards_by_name, got None"):
    parts.advantages_of(advantages.gdpo(), batch.rewards)
  message = r"weights = \(1\.0, 2\.0\) has length 2, but there are K = 3 rewards: the main grader's"
  with pytest.raises(ValueError, match=message):
    advantages.gdpo(weights=(1.0, 2.0)).apply((), batch)
  with pytest.raises(ValueError, match=r"rewards_by_name is .* it must be \[P, G, K\]"):
    parts.advantages_of(advantages.gdpo(), batch.rewards, rewards_by_name=batch.rewards)
