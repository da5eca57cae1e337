"""Each estimator against its oracle, its infinite-group masses, and its degenerate groups."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.advantage_oracles import ESTIMATORS, MASSES, OF_BATCH, WITHOUT_GROUP
from oracles.batches import make_batch, metric_value, with_needs
from remedy import remedy

from rlvr_jax import advantages
from rlvr_jax.ops import groups
from rlvr_jax.types import TrainBatch

ZERO_WHEN_CONSTANT = [name for name in advantages.__all__ if name not in WITHOUT_GROUP]
VARIANTS = [
  *((name, {}) for name in ESTIMATORS),
  ("asym", {"delta": 0.3}),
  ("asymmetric_reinforce", {"baseline_shift": -0.4}),
  ("gdpo", {"over": "tokens", "batch_epsilon": 0.0}),
  ("gdpo", {"epsilon": 0.1, "weights": (0.5,)}),
  ("grpo", {"epsilon": 0.1}),
  ("log_mean_exp", {"eta": 3.0}),
  ("opob", {"by_deviation": True}),
  ("otb", {"zero_tail": False}),
  ("otb", {"zero_constant": False}),
  ("pass_at_k", {"k": 1}),
  ("pass_at_k", {"k": 5}),
  ("power", {"alpha": 1.0}),
  ("power_asym", {"alpha": 2.5, "delta": 0.7}),
  ("reinforce_plus_plus", {"baseline": True}),
  ("reinforce_plus_plus", {"baseline": True, "over": "tokens"}),
  ("reinforce_plus_plus", {"over": "tokens"}),
  ("weighted_reinforce", {"success_weight": 0.7}),
]


def _batch(rewards, lengths=None, correct=None) -> TrainBatch:
  rewards = np.asarray(rewards)
  lengths = np.ones(rewards.shape, int) if lengths is None else np.asarray(lengths)
  mask = np.arange(lengths.max()) < lengths[..., None]
  batch = with_needs(make_batch(mask.astype(rewards.dtype), np.zeros(mask.shape), rewards))
  return batch if correct is None else dataclasses.replace(batch, correct=jnp.asarray(correct))


@functools.cache
def _program(name, hyper):
  estimator = getattr(advantages, name)(**dict(hyper))
  return jax.jit(lambda batch: estimator.apply(estimator.init(jnp.float32(1.0)), batch))


def _coefficients(name, batch, **hyper):
  """In one program: op by op, each small operation would be another one."""
  return np.asarray(_program(name, tuple(hyper.items()))(batch))


def test_every_estimator_has_an_oracle_and_masses():
  """FADE has a state, and tests of its own."""
  file, names = "tests/oracles/advantage_oracles.py", {*advantages.__all__} - {"fade"}
  unknown = {*ESTIMATORS, *MASSES} - names
  assert not unknown, f"{file} has {unknown}, which advantages/__init__.py lacks"
  missing = names - {*ESTIMATORS}
  assert not missing, f"write the formulas of {missing} in plain Python under ESTIMATORS of {file}"
  missing = names - {*MASSES}
  assert not missing, f"write the gradient masses of {missing}, or None, under MASSES of {file}"


@pytest.mark.parametrize("name, hyper", VARIANTS, ids=str)
def test_coefficients_equal_the_oracle(name, hyper):
  rng = np.random.default_rng(3)
  rewards = rng.integers(0, 2, (12, 6)).astype(float)
  rewards[0], rewards[1] = 0.0, 1.0
  lengths = rng.integers(1, 9, rewards.shape)
  with jax.enable_x64(True):
    result = _coefficients(name, _batch(rewards, lengths), **hyper)
    oracle = functools.partial(ESTIMATORS[name], **hyper)
    groups = rewards.tolist(), lengths.tolist()
    expected = oracle(*groups) if name in OF_BATCH else list(map(oracle, *groups))
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
  "name, hyper", [(name, hyper) for name, hyper in VARIANTS if MASSES.get(name)], ids=str
)
def test_masses_approach_the_infinite_group(name, hyper):
  """G = 4096: within 4 standard errors and 10/G of the table."""
  size, groups = 4096, 64
  # Not at p = −δV = 0.1, the kink of asymmetric_reinforce, where the error falls as 1/√G.
  for p in (0.15, 0.9):
    rng = np.random.default_rng(int(100 * p))
    rewards = (rng.random((groups, size)) < p).astype(np.float32)
    a = np.asarray(_coefficients(name, _batch(rewards), **hyper), np.float64)
    limits = MASSES[name](p, 1 - p, **hyper)
    successes = np.mean(np.maximum(a, 0) * (rewards == 1), axis=1)
    failures = np.mean(np.maximum(-a, 0) * (rewards == 0), axis=1)
    for masses, limit in zip((successes, failures), limits, strict=True):
      error = 4 * np.std(masses, ddof=1) / np.sqrt(groups) + 10 / size * limit
      assert abs(np.mean(masses) - limit) <= error, (p, np.mean(masses), limit, error)


@pytest.mark.parametrize(
  "name, hyper, is_zero",
  [
    ("gdpo", {}, True),
    ("gdpo", {"leave_one_out": True}, True),
    ("gdpo", {"over": "tokens"}, False),
    ("otb", {}, True),
    ("otb", {"zero_constant": False}, False),
    ("reinforce_plus_plus", {"baseline": True}, True),
    ("reinforce_plus_plus", {"baseline": True, "over": "tokens"}, False),
    ("reinforce_plus_plus", {}, False),
  ],
)
def test_a_constant_group_beside_others_of_the_batch(name, hyper, is_zero):
  """Statistics over tokens, and those of plain rewards, give it a coefficient."""
  rewards = np.array([[0.1] * 3, [0.7, 0.1, 0.3], [0.7] * 3], np.float32)
  batch = _batch(rewards, np.arange(1, 10).reshape(3, 3))
  result = np.asarray(_coefficients(name, batch, **hyper))[[0, 2]]
  assert np.all(result == 0) if is_zero else np.all(np.any(np.abs(result) > 0.01, axis=1))


def test_gradient_masses_are_those_of_the_formula():
  rewards = np.array([[1.0, 0, 0, 1], [1, 1, 1, 0]], np.float32)
  batch = _batch(rewards)
  a = np.asarray(_coefficients("power_asym", batch))
  metrics = advantages.gradient_masses(jnp.asarray(a), batch.rewards, batch.correct, batch.valid)
  success = np.mean(np.maximum(a, 0) * (rewards == 1))
  failure = np.mean(np.maximum(-a, 0) * (rewards == 0))
  assert metric_value(metrics["advantage/mass_success"]) == pytest.approx(success)
  assert metric_value(metrics["advantage/mass_failure"]) == pytest.approx(failure)
  assert metric_value(metrics["advantage/mass_difference"]) == pytest.approx(success - failure)
  assert metric_value(metrics["advantage/mass_ratio"]) == pytest.approx(success / failure)
  ess = np.abs(a).sum() ** 2 / (a.size * (a**2).sum())
  assert metric_value(metrics["advantage/ess"]) == pytest.approx(ess)


def test_gradient_masses_of_a_success_pushed_down_count_for_neither():
  batch = _batch(np.array([[1.0, 0.0]], np.float32))
  metrics = advantages.gradient_masses(
    jnp.array([[-2.0, 3.0]]), batch.rewards, batch.correct, batch.valid
  )
  assert metric_value(metrics["advantage/mass_success"]) == 0
  assert metric_value(metrics["advantage/mass_failure"]) == 0


def test_gradient_masses_of_shaped_rewards_go_by_the_sign():
  batch = _batch(np.array([[0.3, 0.9]], np.float32), correct=np.ones((1, 2), np.float32))
  metrics = advantages.gradient_masses(
    jnp.array([[-0.3, 0.5]]), batch.rewards, batch.correct, batch.valid
  )
  assert metric_value(metrics["advantage/mass_success"]) == pytest.approx(0.25)
  assert metric_value(metrics["advantage/mass_failure"]) == pytest.approx(0.15)


# In bfloat16: one that begins with `as_group`, which makes float32 of rewards, and all others.
@pytest.mark.parametrize(
  ("name", "dtype"),
  [
    *((name, np.float32) for name in ZERO_WHEN_CONSTANT),
    *((name, jnp.bfloat16) for name in ("fade", "grpo", "mt_grpo")),
  ],
)
@remedy(
  "return zero_if_constant(coefficients, rewards, batch.valid) of advantages/base.py: the mean of"
  " equal rewards need not be exact. If the estimator does not compare the rollouts of a group,"
  " name it under WITHOUT_GROUP of tests/oracles/advantage_oracles.py."
)
def test_a_constant_group_is_exactly_zero(name, dtype):
  values = np.array([0.0, 1.0, 0.1, 0.7, -0.3, 1e-8, 1 / 3])
  rewards = np.repeat(values[:, None], 7, axis=1).astype(dtype)
  batch = _batch(rewards, np.arange(1, 50).reshape(7, 7), correct=(rewards > 0.5))
  assert np.array_equal(_coefficients(name, batch), np.zeros((7, 7)))


@pytest.mark.parametrize("name", advantages.__all__)
@remedy(
  "begin with rewards = as_group(NAME, batch.rewards, batch.valid) of advantages/base.py, which"
  " refuses G = 1, and take the mean by group_mean(rewards, batch.valid) of ops/groups.py. If the"
  " estimator does not compare the rollouts of a group, name it under WITHOUT_GROUP of"
  " tests/oracles/advantage_oracles.py."
)
def test_a_group_of_one(name):
  """What compares rollouts says so; tests/oracles/advantage_oracles.py lists what does not."""
  batch = _batch(np.ones((3, 1), np.float32))
  if name in ZERO_WHEN_CONSTANT:
    with pytest.raises(ValueError, match=f"'{name}'.*G = 1"):
      _coefficients(name, batch)
  else:
    assert np.all(np.isfinite(_coefficients(name, batch)))


def test_reductions_over_one_member_are_its_value_and_a_deviation_of_0():
  x, valid = jnp.array([[3.0], [jnp.nan]]), jnp.array([[True], [False]])
  np.testing.assert_array_equal(groups.group_mean(x, valid), [[3.0], [0.0]])
  np.testing.assert_array_equal(groups.group_deviation(x, valid), [[0.0], [0.0]])


@pytest.mark.parametrize("k", [4, 5])
def test_pass_at_k_of_the_whole_group_or_more_says_so(k):
  """With k = G every set of k holds the same rollouts: all coefficients would be 0."""
  with pytest.raises(ValueError, match=rf"k = {k}.*G = 4"):
    _coefficients("pass_at_k", _batch(np.eye(4, dtype=np.float32)), k=k)


def test_pass_at_k_of_the_valid_rollouts_or_more_is_zero_and_counted():
  batch = _batch(np.array([[1.0, 0, 0, 0], [1, 0, 0, 0]]))
  batch = dataclasses.replace(batch, valid=jnp.array([[True] * 4, [True, True, True, False]]))
  estimator = advantages.pass_at_k(k=3)
  result = estimator.apply((), batch)
  np.testing.assert_allclose(result[0], [3 / 4, -1 / 4, -1 / 4, -1 / 4], rtol=1e-6)
  np.testing.assert_array_equal(result[1], [0, 0, 0, 0])  # of three valid ones, any three
  assert metric_value(estimator.metrics((), batch)["advantage/at_most_k"]) == 0.5
  assert metric_value(advantages.pass_at_k(k=2).metrics((), batch)["advantage/at_most_k"]) == 0


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_its_gradient_times_1_minus_k_over_n(x64, k):
  """By enumeration of all groups of five, for a policy that solves with probability p."""
  p, n = 0.3, 5
  groups = np.array([*itertools.product([0.0, 1.0], repeat=n)])
  chances = np.prod(np.where(groups == 1, p, 1 - p), axis=1)
  scores = np.where(groups == 1, 1 / p, -1 / (1 - p))  # the derivative of log π by p
  A = np.asarray(_coefficients("pass_at_k", _batch(groups), k=k))
  expected = k * (1 - p) ** (k - 1)  # of 1 − (1 − p)^k
  found = np.sum(chances * np.mean(A * scores, axis=1))
  np.testing.assert_allclose(found, (1 - k / n) * expected, rtol=1e-12)


def test_pass_at_k_takes_no_fraction_for_correct():
  batch = _batch(np.array([[1.0, 0.5, 0, 0]]), correct=np.array([[1.0, 0.5, 0, 0]]))
  whole = _batch(np.array([[1.0, 0, 0, 0]]))
  np.testing.assert_array_equal(
    _coefficients("pass_at_k", batch, k=2), _coefficients("pass_at_k", whole, k=2)
  )


def test_weighted_reinforce_goes_by_the_grade_whatever_the_reward():
  """A right answer with a penalty or a bonus is right; a wrong one with a reward of 1 is wrong."""
  batch = _batch(np.array([[0.4, 1.5, 1.0, -1.0]]), correct=np.array([[1.0, 1.0, 0.0, 0.0]]))
  result = _coefficients("weighted_reinforce", batch, success_weight=0.1)
  np.testing.assert_allclose(result, [[0.1, 0.1, -1.0, -1.0]])


def test_which_estimators_need_binary_rewards():
  needing = {name for name in advantages.__all__ if getattr(advantages, name)().needs_binary}
  assert needing == {"maxrl", "pass_at_k", "power", "power_asym", "fade"}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
  st.sampled_from(advantages.__all__),
  st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=3, max_size=3),
  st.permutations(range(5)),
  st.permutations(range(3)),
)
def test_permuting_rollouts_and_prompts_permutes_the_coefficients(name, rewards, order, prompts):
  rewards = np.asarray(rewards, np.float32)
  lengths = np.arange(1, 16).reshape(3, 5)
  result = _coefficients(name, _batch(rewards, lengths))
  move = lambda x: np.asarray(x)[list(prompts)][:, list(order)]
  moved = _coefficients(name, _batch(move(rewards), move(lengths)))
  np.testing.assert_allclose(moved, move(result), rtol=1e-6, atol=1e-7)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
  st.lists(st.floats(-4, 4, width=16), min_size=6, max_size=6),
  st.floats(-2, 2, width=16),
  st.floats(0.25, 8, width=16),
)
def test_scaling_laws(rewards, shift, scale):
  """Centered estimators ignore a shift; linear ones scale; GRPO without ε ignores the scale."""
  rewards = np.asarray([rewards])
  if np.ptp(rewards) < 1e-2:
    return
  with jax.enable_x64(True):
    moved = _batch(scale * rewards + shift)
    for name in ("grpo_mean", "rloo", "asym", "opo"):
      expected = scale * _coefficients(name, _batch(rewards))
      np.testing.assert_allclose(_coefficients(name, moved), expected, atol=1e-9)
    same = _coefficients("grpo", _batch(rewards), epsilon=0.0)
    np.testing.assert_allclose(_coefficients("grpo", moved, epsilon=0.0), same, atol=1e-9)
