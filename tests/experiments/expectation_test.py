"""What n_eff is in expectation: the formulae against all outcomes of a tiny policy."""

import itertools
import json

import numpy as np
import pytest

from experiments.premises import expectation


def enumerated(policy, group_size, centred):
  """(E numerator, E denominator) over all outcomes of P groups, one token each."""
  p, scores, rewards = policy
  P, V = p.shape
  means = np.zeros(2)
  for actions in itertools.product(range(V), repeat=P * group_size):
    rows = np.repeat(np.arange(P), group_size), np.array(actions)
    r = rewards[rows].reshape(P, group_size)
    A = (r - r.mean(1, keepdims=True) if centred else r).ravel()
    g = scores[rows]
    means += np.prod(p[rows]) * np.array(expectation.sums(A, g @ g.T))
  return means


@pytest.mark.parametrize(("prompts", "group_size"), [(1, 2), (1, 4), (2, 3)])
@pytest.mark.parametrize("centred", [True, False])
def test_the_formulae_are_the_expectations(prompts, group_size, centred):
  policy = expectation.softmax_policy(3, prompts, seed=3)
  p, scores, rewards = policy
  numerator, denominator = enumerated(policy, group_size, centred)
  gradients = np.einsum("pv,pv,pvd->pd", p, rewards, scores)
  excess = expectation.expected_excess(gradients, group_size, centred=centred)
  assert numerator - denominator == pytest.approx(excess, rel=1e-9, abs=1e-12)
  assert excess > 0 or prompts > 1
  if centred:
    found = expectation.n_eff_by_formula(*policy, group_size, tokens=1)
    assert found == pytest.approx(numerator / denominator, rel=1e-9)


def test_prompts_that_oppose_one_another_are_below_one():
  opposed = np.array([[1.0, 0.0], [-1.0, 0.0]])
  assert expectation.expected_excess(opposed, 4, centred=True) == pytest.approx(-(3 * 2 / 4) * 2)
  assert expectation.expected_excess(opposed[:1], 4, centred=True) > 0


def test_without_a_signal_n_eff_is_that_of_noise():
  noise = np.random.default_rng(0).normal(size=(200_000, 5))
  n_eff = (noise**2).mean(1)
  alpha, below = expectation.n_eff_of_noise(5)
  assert alpha == pytest.approx(np.clip(1 - n_eff, 0, 1).mean(), abs=3e-3)
  assert below == pytest.approx((n_eff < 1).mean(), abs=5e-3)


def test_a_simulation_is_near_the_formula():
  found = expectation.simulate(8, 1, 5, draws=1500)
  expected = found["score: by the formula"]
  assert found["score: n_eff of the means"] == pytest.approx(expected, rel=0.06)
  assert found["sampled: n_eff of the means"] < 0.9 < expected


def test_the_page_has_the_tables_of_the_results():
  text = expectation.tables(json.loads(expectation.RESULTS.read_text()))
  assert text in expectation.PAGE.read_text(encoding="utf-8")
