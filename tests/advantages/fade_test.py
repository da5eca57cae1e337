"""FADE's state: what enters when, its schedules and its ablations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import make_batch, metric_value

from rlvr_jax import advantages

REWARDS = np.array([[1.0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], np.float32)


def _batch(rewards=REWARDS):
  return make_batch(np.ones((*rewards.shape, 1), np.float32), np.zeros((1, 1, 1)), rewards)


def _exponents(estimator, state):
  metrics = estimator.metrics(state, _batch())
  return [metric_value(metrics[f"advantage/fade_{name}"]) for name in ("alpha", "delta")]


def test_a_run_follows_the_equations():
  """Ten updates against plain Python."""
  rng = np.random.default_rng(0)
  estimator = advantages.fade(target_entropy=0.9, smoothing=0.3)
  state = estimator.init(jnp.float32(1.2))
  solve_rate, entropy, target = 0.5, 1.2, 0.9 * 1.2
  for _ in range(10):
    rewards = (rng.random((3, 4)) < 0.2).astype(np.float32)
    new_entropy = rng.random()
    alpha = min(max(3 * (1 - solve_rate) / (2 * solve_rate), 1.0), 3.0)
    delta = min(max(1 + entropy - target, 0.3), 1.0)
    mean = rewards.mean(axis=1, keepdims=True)
    expected = (1 - mean) ** (alpha - 1) * np.where(
      rewards >= mean, rewards - mean, (rewards - mean) / delta
    )
    result = estimator.apply(state, _batch(rewards))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert _exponents(estimator, state) == pytest.approx([alpha, delta], rel=1e-5)
    state = estimator.update(state, _batch(rewards), jnp.float32(new_entropy))
    solve_rate = 0.7 * solve_rate + 0.3 * rewards.mean()
    entropy = 0.7 * entropy + 0.3 * new_entropy


def test_an_unfiltered_solve_rate_replaces_the_batch_s():
  estimator = advantages.fade(smoothing=0.5)
  state = estimator.init(jnp.float32(1.0))
  state = estimator.update(state, _batch(), jnp.float32(1.0), solve_rate=jnp.float32(0.1))
  assert float(state.solve_rate) == pytest.approx(0.3)
  state = estimator.update(state, _batch(), jnp.float32(1.0), solve_rate=jnp.float32(np.nan))
  assert float(state.solve_rate) == pytest.approx(0.3)  # no rollout had a grade


def test_an_update_without_a_loss_token_leaves_the_averages():
  """Its entropy is NaN. Entered as 0, thirty of them would take Ĥ from 1.2 to 0.65 nats."""
  estimator = advantages.fade()
  state = estimator.init(jnp.float32(1.2))
  for _ in range(30):
    state = estimator.update(state, _batch(), jnp.float32(np.nan), solve_rate=jnp.float32(np.nan))
  assert float(state.entropy) == pytest.approx(1.2) and float(state.solve_rate) == 0.5
  assert int(state.updates) == 30


def test_target_entropy_relative_and_absolute():
  relative = advantages.fade().init(jnp.float32(3.0))
  absolute = advantages.fade(target_entropy=1.3, target_is_relative=False).init(jnp.float32(3.0))
  assert float(relative.target_entropy) == pytest.approx(1.5)
  assert float(absolute.target_entropy) == pytest.approx(1.3)


@pytest.mark.parametrize("solve_rate, alpha", [(0.0, 3.0), (0.4, 2.25), (0.6, 1.0), (1.0, 1.0)])
def test_alpha_is_clipped(solve_rate, alpha):
  estimator = advantages.fade()
  state = estimator.init(jnp.float32(1.0))._replace(solve_rate=jnp.float32(solve_rate))
  assert _exponents(estimator, state)[0] == pytest.approx(alpha)
  assert np.all(np.isfinite(estimator.apply(state, _batch())))


def test_the_entropy_schedule_drives_both_exponents():
  estimator = advantages.fade(schedule="entropy")
  state = estimator.init(jnp.float32(2.0))  # H* = 1
  for entropy, expected in [(2.0, [3.0, 1.0]), (1.5, [2.0, 1.0]), (1.0, [1, 1]), (0.5, [1, 0.5])]:
    assert _exponents(estimator, state._replace(entropy=jnp.float32(entropy))) == pytest.approx(
      expected
    )


def test_the_entropy_schedule_with_a_target_above_the_start():
  estimator = advantages.fade(schedule="entropy", target_entropy=2.0, target_is_relative=False)
  assert _exponents(estimator, estimator.init(jnp.float32(1.0)))[0] == 1.0


def test_the_logarithmic_schedule_ignores_what_is_measured():
  estimator = advantages.fade(schedule="logarithmic", decay_updates=8)
  state = estimator.init(jnp.float32(2.0))
  assert _exponents(estimator, state) == pytest.approx([3.0, 1.0])
  for _ in range(2):
    state = estimator.update(state, _batch(), jnp.float32(0.0))
  assert _exponents(estimator, state) == pytest.approx([2.0, 0.65])  # log 3 / log 9 = 1/2
  for _ in range(20):
    state = estimator.update(state, _batch(), jnp.float32(0.0))
  assert _exponents(estimator, state) == pytest.approx([1.0, 0.3])


def test_state_keeps_its_dtypes_through_an_update():
  """A state of another dtype would compile the train step again."""
  estimator = advantages.fade()
  with jax.enable_x64(True):
    for initial, later in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float64)):
      state = estimator.init(initial(1.0))
      updated = estimator.update(state, _batch(REWARDS.astype(later)), later(0.5))
      assert [x.dtype for x in updated] == [x.dtype for x in state]
      assert all(x.shape == () for x in updated)
