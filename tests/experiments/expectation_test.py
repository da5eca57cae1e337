"""What n_eff is in expectation: the formulae against all outcomes of a tiny policy."""

import itertools
import json

import numpy as np
import pytest

from experiments.premises import expectation
from experiments.premises import tiny_policies as tiny
from experiments.testbed.report import GRPO
from rlvr_jax.evaluate import compare

STEPS = expectation.HERE.parent / "steps" / "results.json"


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
def test_the_formula_of_the_simulation_is_the_expectation(prompts, group_size):
  policy = expectation.softmax_policy(3, prompts, seed=3)
  numerator, denominator = enumerated(policy, group_size, centred=True)
  found = expectation.n_eff_by_formula(*policy, group_size, tokens=1)
  assert found == pytest.approx(numerator / denominator, rel=1e-9)


# --- tiny policies --------------------------------------------------------------------------------

RIGHT = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0])  # rewards of tiny.RESPONSES


def policies(count, seed=0):
  rng = np.random.default_rng(seed)
  return [tiny.random_policy(rng, scale=rng.uniform(0.3, 2)) for _ in range(count)]


@pytest.mark.parametrize("estimator", [tiny.CENTERED, tiny.UNCENTERED])
@pytest.mark.parametrize("condition", list(tiny.conditions(tiny.CONTENT)))
def test_the_formulae_are_the_expectations(condition, estimator):
  prompts = tiny.conditions(tiny.CONTENT)[condition]
  G = 3 if len(prompts) == 1 else 2
  exact = tiny.enumerate_batches(prompts, G, estimator).energies
  found = tiny.expected_energies(
    [tiny.moments(x) for x in prompts], G, centered=estimator == tiny.CENTERED
  )
  np.testing.assert_allclose(found, exact, rtol=1e-12)
  mean = np.linalg.norm(tiny.moments(prompts[0]).mean)
  is_score = condition.startswith("on-policy, one") or "two prompts" in condition
  assert mean < 1e-14 if is_score else mean > 0.05


@pytest.mark.parametrize("group_size", [2, 3, 8, 64])
def test_on_policy_one_prompt_is_never_below_one(group_size):
  for policy in policies(30):
    found = tiny.moments(tiny.make_outcomes(policy, RIGHT))
    for centered in (True, False):
      energies = tiny.expected_energies([found], group_size, centered=centered)
      assert energies.together >= energies.separate * (1 - 1e-12)


def test_any_estimator_with_the_signs_of_success_adds_up_given_the_rewards():
  """On-policy, also with GRPO's deviation and coefficients that do not sum to 0."""
  own = tiny.make_outcomes(policies(1)[0], RIGHT)
  chosen = np.array(list(itertools.product(range(len(own.probs)), repeat=3)))
  rewards = own.rewards[chosen]
  for A in (tiny.coefficients(rewards, tiny.GRPO), np.where(rewards > 0, 0.2, -1.7)):
    together, separate = tiny.group_sums(own, chosen, A)
    excess = np.prod(own.probs[chosen], axis=1) * (np.sum(together**2, axis=1) - separate)
    given = [excess[(rewards == row).all(axis=1)].sum() for row in np.unique(rewards, axis=0)]
    assert min(given) > -1e-15 and max(given) > 1e-3


@pytest.mark.parametrize("successes", [1, 2])
def test_the_criterion_says_where_n_eff_is_below_one(successes):
  signs = set()
  for policy in policies(6, seed=2):
    for feature in ("score", "sampled"):
      outcomes = tiny.make_outcomes(policy, 0.4 + 0.2 * RIGHT, feature=feature)
      given = lambda rewards: rewards.sum(axis=1) == successes
      exact = tiny.enumerate_batches([outcomes], 3, tiny.CENTERED, given).energies
      criterion = tiny.below_one(outcomes, successes, 3)
      pairs = successes * (3 - successes)
      excess = (pairs / 3) ** 2 * criterion
      assert excess == pytest.approx(exact.together - exact.separate, rel=1e-9, abs=1e-14)
      below = criterion < 0
      assert below == (tiny.enumerate_batches([outcomes], 3, tiny.GRPO, given).energies.n_eff < 1)
      assert not below or feature == "sampled"
      signs.add(below)
  assert signs == {True, False}


def test_only_conflicting_prompts_are_below_one_and_drawn_ones_never():
  own, conflicting = tiny.conditions(tiny.CONTENT)["on-policy, two prompts that conflict"]
  pair = [tiny.moments(own), tiny.moments(conflicting)]
  assert tiny.expected_energies(pair, 3).n_eff < 1
  agreeing = tiny.conditions(tiny.CONTENT)["on-policy, two prompts that agree"]
  for population in (pair, [tiny.moments(x) for x in agreeing]):
    batches = itertools.product(population, repeat=2)
    mean = np.mean([tiny.expected_energies(list(batch), 3) for batch in batches], axis=0)
    drawn = tiny.drawn_energies(population, P=2, G=3)
    np.testing.assert_allclose(drawn, mean, rtol=1e-12)
    assert drawn.n_eff > 1


def test_a_reward_by_luck_leaves_the_share_of_the_mean():
  for prompts in tiny.conditions(tiny.LUCK).values():
    found = [tiny.moments(x) for x in prompts]
    share = sum(m.mean @ m.mean for m in found) / sum(m.energy for m in found)
    for G in (2, 8, 64):
      assert tiny.expected_energies(found, G).n_eff == pytest.approx(1 - share, rel=1e-9)


def test_the_mean_of_another_sampler_is_bounded_by_its_divergence():
  policy, older = policies(2, seed=5)
  own = tiny.make_outcomes(policy, RIGHT)
  other = tiny.make_outcomes(policy, RIGHT, sampler=policy._replace(head=older.head))
  divergence = own.probs @ (other.probs / own.probs - 1) ** 2
  largest = np.linalg.eigvalsh(tiny.second_moment(own))[-1]
  mean = tiny.moments(other).mean
  assert 0 < mean @ mean <= divergence * largest


@pytest.mark.parametrize("count", [1, 2])
def test_the_participation_ratio_by_formula(count):
  G = 3 - count + 1
  prompts = tiny.conditions(tiny.CONTENT)["on-policy, two prompts that agree"][:count]
  traces = squares = 0.0
  lists = [range(len(x.probs)) for x in prompts for _ in range(G)]
  for chosen in itertools.product(*[lists[0][:14]] * (G * count)):
    rows = [prompts[n // G] for n in range(G * count)]
    g = np.stack([x.features[i] for x, i in zip(rows, chosen, strict=True)])
    weight = np.prod([x.probs[i] for x, i in zip(rows, chosen, strict=True)])
    gram = g @ g.T
    traces += weight * np.trace(gram) ** 2
    squares += weight * np.sum(gram**2)
  found = tiny.expected_participation_ratio(prompts, G)
  assert found == pytest.approx(traces / squares, rel=1e-9)
  limit = tiny.limit_participation_ratio(prompts)
  assert tiny.expected_participation_ratio(prompts, 10**7) == pytest.approx(limit, rel=1e-5)


def test_the_mean_cosine_of_two_answers_is_not_zero():
  p, q = 0.9, 0.1
  g = np.array([[-q, q], [p, -p]])  # p_t − onehot(y_t)
  weights = np.outer([p, q], [p, q])
  inner = g @ g.T
  norms = np.sqrt(np.diag(inner))
  assert np.sum(weights * inner) == pytest.approx(0, abs=1e-15)
  assert np.sum(weights * inner / np.outer(norms, norms)) == pytest.approx((p - q) ** 2)


# --- simulation and page --------------------------------------------------------------------------


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


def test_the_results_are_those_of_the_code():
  results = json.loads(expectation.RESULTS.read_text())
  condition = "on-policy, one prompt"
  found = tiny.measure_condition(tiny.conditions(tiny.LUCK)[condition], seed=0)
  recorded = results["tiny"]["luck"][condition]
  for name in ("enumerated", "at_8", "at_64", "alpha", "pr_at_8", "sampled_n_eff"):
    assert recorded[name] == pytest.approx(found[name], rel=1e-4)


def test_what_the_page_says_in_words_is_in_the_results():
  results = json.loads(expectation.RESULTS.read_text())
  found = results["search"]
  allowed = ("on-policy, one prompt", "on-policy, one prompt, uncentered")
  assert all(
    found[name]["below_1"] == 0 for name in (*allowed, "on-policy, prompts drawn from two")
  )
  least = min(row["least"] for name, row in found.items() if name != "`sampled`")
  assert f"down to {least:.3f} with `score`" in expectation.PAGE.read_text(encoding="utf-8")
  alpha, below = expectation.n_eff_of_noise(2)
  assert (round(alpha, 2), round(below, 2)) == (0.37, 0.63)


def test_the_mean_cosine_of_the_page_is_that_of_steps():
  runs = compare.group_by_label(compare.read_results(STEPS))[GRPO]
  cell = compare.mean_cell([run["geometry"]["geometry/redundancy_within"] for run in runs])
  text = expectation.PAGE.read_text(encoding="utf-8").replace("\n", " ")
  assert f"it is {cell}, over the {len(runs)} seeds" in text
