import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax import evaluate


def counts():
  return st.integers(1, 1024).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


def test_equals_enumeration_of_all_subsets():
  for n in range(1, 8):
    for c in range(n + 1):
      correct = [True] * c + [False] * (n - c)
      for k in range(1, n + 1):
        subsets = list(itertools.combinations(correct, k))
        enumerated = sum(any(subset) for subset in subsets) / len(subsets)
        np.testing.assert_allclose(evaluate.pass_at_k(n, c, k), enumerated, rtol=1e-14)


@given(counts(), st.data())
@settings(max_examples=80, deadline=None)
def test_equals_exact_rational_arithmetic_up_to_1024_samples(nc, data):
  n, c = nc
  k = data.draw(st.integers(1, n))
  exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
  np.testing.assert_allclose(evaluate.pass_at_k(n, c, k), float(exact), rtol=1e-11)


def test_is_unbiased():
  """The expectation over c ~ Binomial(n, p) is 1 − (1 − p)^k."""
  n, k, p = 12, 5, 0.23
  weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
  estimate = np.dot(weights, evaluate.pass_at_k(n, np.arange(n + 1), k))
  np.testing.assert_allclose(estimate, 1 - (1 - p) ** k, rtol=1e-13)


def test_vectorised_over_problems_with_their_own_n():
  found = evaluate.pass_at_k([4, 8], [[1, 1], [4, 8]], 2)
  np.testing.assert_allclose(found, [[0.5, 0.25], [1.0, 1.0]], rtol=1e-14)


@pytest.mark.parametrize(
  ("n", "c", "k", "message"),
  [
    (4, 1, 5, "k must be between 1 and n"),
    (4, 1, 0, "k must be between 1 and n"),
    ([8, 4], [1, 1], 5, "n = 4"),
    (4, 5, 1, "between 0 and num_samples"),
    (4, -1, 1, "between 0 and num_samples"),
  ],
)
def test_bad_counts_are_refused(n, c, k, message):
  with pytest.raises(ValueError, match=message):
    evaluate.pass_at_k(n, c, k)


def test_majority_by_hand():
  answers = [
    ["7", "7", "3", "5"],  # 7 wins, correct
    ["7", "7", "3", "3"],  # a tie, one of the two correct
    ["1", "2", "2", "3"],  # 2 wins, wrong
    [None, None, None, "4"],  # only one votes, correct
    [None, None, None, None],  # nobody votes
  ]
  correct = np.array(
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=bool
  )
  np.testing.assert_array_equal(evaluate.majority_at_n(answers, correct), [1, 0.5, 0, 1, 0])


def test_majority_refuses_inconsistent_input():
  with pytest.raises(ValueError, match="graded both"):
    evaluate.majority_at_n([["1", "1"]], [[True, False]])
  with pytest.raises(ValueError, match="shape"):
    evaluate.majority_at_n([["1"]], [[True, False]])


def test_bootstrap_is_seeded_and_ordered():
  data = np.random.default_rng(0).uniform(size=40)
  low, high = evaluate.bootstrap_interval(data, seed=1)
  assert low < data.mean() < high
  assert (low, high) == evaluate.bootstrap_interval(data, seed=1)
  assert (low, high) != evaluate.bootstrap_interval(data, seed=2)
  narrow = evaluate.bootstrap_interval(data, seed=1, confidence=0.5)
  assert low < narrow[0] < narrow[1] < high


def test_bootstrap_of_equal_values_has_no_width():
  assert evaluate.bootstrap_interval(np.full(9, 0.25), seed=0) == (0.25, 0.25)


def test_bootstrap_covers_as_often_as_it_says():
  rng = np.random.default_rng(0)
  covered = 0
  for trial in range(200):
    low, high = evaluate.bootstrap_interval(
      rng.uniform(size=60) < 0.4, seed=trial, num_resamples=200
    )
    covered += low <= 0.4 <= high
  assert 0.88 <= covered / 200 <= 0.99


@pytest.mark.parametrize("bad", [[], [[0.0, 1.0]]])
def test_bootstrap_refuses_bad_shapes(bad):
  with pytest.raises(ValueError, match="one number per problem"):
    evaluate.bootstrap_interval(bad, seed=0)


@pytest.mark.parametrize(
  ("share", "size", "expected"),
  [  # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I
    (81 / 263, 263, (0.2553, 0.3662)),
    (15 / 148, 148, (0.0624, 0.1605)),
    (0.0, 20, (0.0, 0.1611)),
    (1 / 29, 29, (0.0061, 0.1718)),
    (1.0, 20, (0.8389, 1.0)),
  ],
)
def test_wilson_intervals_are_the_published_ones(share, size, expected):
  assert evaluate.wilson_interval(share, size) == pytest.approx(expected, abs=5e-5)
  mirrored = evaluate.wilson_interval(1 - share, size)
  assert mirrored == pytest.approx((1 - expected[1], 1 - expected[0]), abs=5e-5)


@pytest.mark.parametrize("case", [(1.1, 5, 0.95), (0.5, 0, 0.95), (0.5, 5, 1.0)])
def test_wilson_refuses_what_is_no_share(case):
  share, size, confidence = case
  with pytest.raises(ValueError, match=rf"wilson_interval: share = {share}, num_problems = {size}"):
    evaluate.wilson_interval(share, size, confidence=confidence)


def test_no_interval_is_empty_where_all_or_none_is_right():
  for value, low, high in ((0.0, 0.0, 0.0370), (1.0, 0.9630, 1.0), (0.25, 0.1755, 0.3430)):
    found = evaluate.interval_over_problems(np.full(100, value), seed=0)
    assert found == pytest.approx((low, high), abs=5e-5)
    summary = evaluate.summarize(np.full((100, 4), value > 0.5), ks=[1, 4], seed=0)
    assert summary["pass@4_low"] < summary["pass@4_high"]
  one_differs = np.r_[np.zeros(99), 1.0]
  by_bootstrap = evaluate.bootstrap_interval(one_differs, seed=0)
  assert evaluate.interval_over_problems(one_differs, seed=0) == by_bootstrap


def test_summary():
  correct = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=bool)
  answers = [["a", "a", "b", "c"], ["x", "y", "z", "z"], ["q"] * 4]
  summary = evaluate.summarize(correct, ks=[1, 2, 4], seed=0, answers=answers)
  assert summary["pass@1"] == pytest.approx(0.5)
  assert summary["mean"] == pytest.approx(0.5)
  assert summary["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
  assert summary["pass@4"] == pytest.approx(2 / 3)
  assert summary["majority"] == pytest.approx(2 / 3)
  for name in ("pass@1", "pass@2", "pass@4", "mean", "majority"):
    assert summary[f"{name}_low"] <= summary[name] <= summary[f"{name}_high"]
  assert len(summary) == 15
  assert "majority" not in evaluate.summarize(correct, ks=[1], seed=0)
  for n in (1, 2, 3):
    few = evaluate.summarize(correct[:, :n], ks=[1], seed=0, answers=[row[:n] for row in answers])
    assert ("majority" in few) == (n == 3)


def test_summary_names_the_shape_it_refuses():
  with pytest.raises(ValueError, match=r"\(3,\)"):
    evaluate.summarize(np.ones(3, bool), ks=[1], seed=0)
