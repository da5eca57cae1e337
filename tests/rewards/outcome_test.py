"""Grades become rewards by a table that is checked when it is built."""

import numpy as np
import pytest

from rlvr_jax.rewards import (
  Grade,
  GradingStoppedError,
  Outcome,
  outcome_policy,
  rewards_from_grades,
)

GRADES = [
  Grade(Outcome.CORRECT, 1.25),
  Grade(Outcome.WRONG, 0.3),
  Grade(Outcome.UNPARSEABLE),
  Grade(Outcome.TIMEOUT),
  Grade(Outcome.CRASHED, detail="ValueError: boom"),
  Grade(Outcome.WRONG, 0.1),
]


def test_defaults():
  result = rewards_from_grades(GRADES, outcome_policy())
  np.testing.assert_array_equal(result.rewards, np.float32([1.25, 0, 0, 0, 0, 0]))
  np.testing.assert_array_equal(result.valid, [True, True, True, True, False, True])
  np.testing.assert_array_equal(result.correct, np.float32([1, 0, 0, 0, 0, 0]))
  assert result.rewards.dtype == result.correct.dtype == np.float32
  assert result.valid.dtype == bool


def test_overrides():
  table = {"correct": 2, "wrong": "score", "unparseable": -0.5, "timeout": "mask", "crashed": -1}
  result = rewards_from_grades(GRADES, outcome_policy(table))
  np.testing.assert_array_equal(result.rewards, np.float32([2, 0.3, -0.5, 0, -1, 0.1]))
  np.testing.assert_array_equal(result.valid, [True, True, True, False, True, True])


def test_stop():
  policy = outcome_policy({"crashed": "stop"})
  with pytest.raises(GradingStoppedError, match=r"'crashed' \(ValueError: boom\)"):
    rewards_from_grades(GRADES, policy)
  rewards_from_grades(GRADES[:4], policy)


@pytest.mark.parametrize(
  ("table", "message"),
  [
    ({"time-out": 0.0}, "unknown outcome 'time-out'.*did you mean 'timeout'"),
    ({"wrong": "skip"}, "'wrong' is 'skip', allowed: a number within ±1e\\+30, or one of .*mask"),
    ({"wrong": float("nan")}, "'wrong' is nan"),
    ({"wrong": -1e39}, r"'wrong' is -1e\+39, allowed: a number within"),
    ({"wrong": True}, "'wrong' is True"),
    ({"wrong": None}, "'wrong' is None"),
  ],
)
def test_bad_policy(table, message):
  with pytest.raises(ValueError, match=message):
    outcome_policy(table)


def test_the_largest_rewards_are_finite_as_float32():
  grades = [Grade(Outcome.CORRECT, 1e30), Grade(Outcome.WRONG), Grade(Outcome.TIMEOUT)]
  policy = outcome_policy({"wrong": -1e30})
  rewards = rewards_from_grades(grades, policy).rewards
  np.testing.assert_array_equal(rewards, np.float32([1e30, -1e30, 0]))
  assert np.isfinite(rewards).all()
