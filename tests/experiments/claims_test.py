"""What an interval says about a claim that was written down before its runs."""

import math

import pytest

from experiments.large_ratios.tables import PRICE, RACES, Race, price_table, speedups
from experiments.low_precision.sweep import CLIPS, clip
from experiments.low_precision.tables import sweep_mean
from experiments.sampled_feature.tables import gain_of_size
from experiments.testbed.claims import Claim, Quantity, claim_table, quantity_tables, verdict


@pytest.mark.parametrize(
  ("claimed", "low", "high", "expected"),
  [
    ("more", 0.01, 0.09, "found"),
    ("more", -0.01, 0.09, "undecided"),
    ("more", -0.02, 0.02, "excluded beyond the margin"),
    ("more", 0.001, 0.02, "excluded beyond the margin"),  # so small a difference does not matter
    ("more", -0.09, -0.01, "reversed"),
    ("equal", -0.02, 0.02, "found"),
    ("equal", -0.02, 0.04, "undecided"),
    ("equal", 0.01, 0.04, "excluded: they differ"),
    ("equal", -0.04, -0.01, "excluded: they differ"),
    ("not less", -0.02, 0.09, "found"),
    ("not less", 0.01, 0.02, "found"),
    ("not less", -0.04, 0.02, "undecided"),
    ("not less", -0.041, -0.004, "undecided"),  # below 0, and perhaps by less than matters
    ("not less", -0.118, -0.089, "reversed"),
  ],
)
def test_the_verdict_of_an_interval(claimed, low, high, expected):
  assert verdict(claimed, low, high, matters=0.03) == expected


def run(label, seed, *values):
  evaluations = {"updates": [16 * i for i in range(len(values))], "eval/pass@1": list(values)}
  return {"label": label, "seed": seed, "evaluations": evaluations}


def test_a_table_has_all_its_claims_once_their_runs_have_begun():
  claims = (Claim("one", "a", "b", "more"), Claim("two", "a", "c", "more"))
  results = [run(label, seed, 0.0, at) for label, at in (("a", 0.5), ("b", 0.4)) for seed in (0, 1)]
  final = lambda result: result["evaluations"]["eval/pass@1"][-1]
  (text,) = quantity_tables([Quantity("pass@1", claims[:1], final, 0.2)], results)
  assert text.startswith("pass@1:\n\n") and "| one | a | b | +0.100 [+0.100, +0.100] | 2 |" in text
  assert "| 0.2 | excluded beyond the margin |" in text
  few = claim_table(claims, results, final, 0.2, least_seeds=3)  # the interval stays
  assert "| +0.100 [+0.100, +0.100] | 2 | more | 0.2 | undecided |" in few
  # No claim is left out without a word.
  assert "| two | a | c | – | 0 | more | 0.03 | undecided |" in claim_table(claims, results, final)
  before = claim_table(claims, [run("pilot", 0, 0.5)], final)
  assert "one" not in before and before.startswith("| claim |")


def test_a_stale_run_that_never_gets_there_has_no_speed():
  race = Race("x", "stale", "fresh", 4, lambda result: 0.4)
  results = [
    run("fresh", 0, 0.2, 0.4),  # 16 updates, four hand-overs
    run("stale", 0, 0.2, 0.3, 0.4),  # 32 updates, two hand-overs
    run("fresh", 1, 0.2, 0.4),
    run("stale", 1, 0.2, 0.3, 0.3),
    run("fresh", 2, 0.2, 0.3),  # never there: no level to race to
    run("stale", 2, 0.2, 0.4),
  ]
  assert speedups(results, race, 0.0) == {0: 0.5, 1: 0.0}
  assert speedups(results, race, 8.0) == {0: (16 + 4 * 8) / (32 + 2 * 8), 1: 0.0}
  bound = speedups(results, race, 8.0, at_most=True)  # as if it had got there with update 32
  assert bound == {0: 1.0, 1: 1.0} and speedups(results, race, 0.0, at_most=True)[1] == 0.5
  assert speedups(results[:1], race, 8.0) == {}


def test_a_bound_counts_runs_that_never_get_there_as_if_they_did():
  race = RACES["M1, tight"]
  assert race.bounded and not RACES["accuracy, tight"].bounded
  results = [run(race.fresh, seed, 0.25, 0.5, 0.5, 0.5) for seed in (0, 1)]
  results += [run(race.stale, 0, 0.25, 0.5), run(race.stale, 1, *8 * [0.25])]
  (row,) = [line for line in price_table(results).splitlines() if line.startswith("| M1, tight |")]
  cost = lambda updates, μ: updates + PRICE * math.ceil(updates / μ)
  speeds = cost(16, 4) / cost(16, 16), cost(16, 4) / cost(7 * 16, 16)
  mean = sum(speeds) / 2
  assert f"| {mean:.2f} | {mean - 1:+.3f} [" in row and "| 1 of 2 |" in row


def test_the_mean_of_the_clips_is_of_seeds_that_all_have():
  late = lambda label, seed, value: {
    "label": label,
    "seed": seed,
    "evaluations": {"updates": [0, 1, 2, 3], "eval/pass@8": [0.9, *3 * [value]]},
  }
  results = [late(clip(x), 0, value) for x, value in zip(CLIPS, (0.3, 0.4, 0.8), strict=True)]
  results.append(late(clip(CLIPS[0]), 1, 0.1))
  assert sweep_mean(results) == {0: pytest.approx(0.5)} and sweep_mean([]) == {}


def test_what_larger_groups_do_is_late_pass_at_1():
  sizes = {4: "small", 16: "middle", 64: "large"}
  results = [run("small", 0, 0.9, 0.3, 0.4, 0.5), run("large", 0, 0.9, 0.1, 0.2, 0.3)]
  results += [run("large", 1, 0.1, 0.1, 0.1, 0.1)]  # without its counterpart
  assert gain_of_size(results, sizes) == {0: pytest.approx(-0.2)}
