"""The one comparison that decides each claim of docs/reproduction.md, or each part of a claim."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from docs.runs import (
  EQUAL,
  FAR,
  HIGH,
  HIGH_RANK,
  LATE,
  LATE_16,
  LOW,
  ON_STEPS,
  OTHERS,
  REWEIGHTED,
  SALT,
  SAMPLED,
  OfRun,
  Result,
  average,
  every,
  fall,
  measured,
  start,
)
from experiments.fade.tables import peak_update
from experiments.large_ratios.sweep import LOWER, SUFFIX, TRIGGER, at_lower, with_new_seeds
from experiments.large_ratios.tables import PRICE, RACES, SOONER, speedups
from experiments.low_precision import tables as low
from experiments.mu_grpo.testbed_tables import TIGHT
from experiments.other_samplers.sweep import LARGER, half_from
from experiments.sampled_feature.sweep import BONUS, ROLLOUTS, SIZES, fixed, grpo, salt
from experiments.sampled_feature.tables import gain_of_size
from experiments.testbed import claims, report
from experiments.testbed.arms import GRPO
from rlvr_jax.evaluate import compare, curves
from rlvr_jax.evaluate.compare import final_value
from rlvr_jax.evaluate.figures import COLORS
from rlvr_jax.evaluate.paired import BySeed, Difference, holm, paired_difference

FEWEST_SEEDS = 3  # for an interval


# --- a comparison ---------------------------------------------------------------------------------


class Side(NamedTuple):
  """An arm, or a number that it is compared with.

  Attributes:
    name: as the page shows it.
    by_seed: its values, by seed; empty for a number.
    number: where there are no values.
  """

  name: str
  by_seed: BySeed
  number: float = 0.0


class Comparison(NamedTuple):
  """Two sides, and what a difference of them says about a claim.

  Attributes:
    quantity: what is compared, with its unit.
    arm, control: the difference is arm less control.
    claimed: as in `claims.Claim`.
    margin: the smallest difference that would matter.
    regime: task and conditions.
    plan: experiment and row of its README's plan, such as "large_ratios P1", where comparison and
      margin were committed before the runs; "": they were chosen after them.
  """

  quantity: str
  arm: Side
  control: Side
  claimed: str
  margin: float
  regime: str
  plan: str = ""


def side(found: Mapping[str, Sequence[Result]], label: str, of_run: OfRun) -> Side:
  """The side of an arm: a value of each of its runs."""
  return Side(label, {run["seed"]: of_run(run) for run in found[label]})


def differences(comparison: Comparison) -> dict[int, float]:
  """Seed → arm less control, over the seeds that both have."""
  arm, control = comparison.arm, comparison.control
  seeds = [s for s in (arm.by_seed or control.by_seed) if s in (control.by_seed or arm.by_seed)]
  of = lambda side, seed: side.by_seed[seed] if side.by_seed else side.number
  return {seed: of(arm, seed) - of(control, seed) for seed in sorted(seeds)}


def interval(comparison: Comparison) -> Difference | None:
  """The mean difference with its interval; None for fewer than `FEWEST_SEEDS` seeds."""
  found = differences(comparison)
  if len(found) < FEWEST_SEEDS:
    return None
  return paired_difference(found, dict.fromkeys(found, 0.0))


def verdict(comparison: Comparison) -> str:
  """What the interval says about the claim; see `claims.verdict`."""
  found = interval(comparison)
  if found is None:
    return "undecided"
  return claims.verdict(comparison.claimed, found.low, found.high, comparison.margin)


def holm_p(comparisons: Mapping[str, Comparison]) -> dict[str, float]:
  """p that the difference is 0, adjusted for all comparisons that have an interval."""
  found = {name: interval(comparison) for name, comparison in comparisons.items()}
  p_values = {name: difference.p for name, difference in found.items() if difference is not None}
  return dict(zip(p_values, holm([*p_values.values()]).tolist(), strict=True))


def describe(comparison: Comparison) -> list[str]:
  """Cells of the page: what is compared, the difference with its interval, margin, and regime."""
  found, seeds = interval(comparison), differences(comparison)
  digits = 3 if comparison.margin < 1 else 1
  number = (
    " and ".join(f"{value:+.{digits}f}" for value in seeds.values())
    if found is None
    else compare.difference_cell(found, digits)
  )
  return [
    f"{comparison.quantity}: *{comparison.arm.name}* minus *{comparison.control.name}*",
    f"{number}, {len(seeds)} seeds",
    f"{comparison.margin:g}" + ("" if comparison.plan else ", set later"),
    comparison.regime,
  ]


def draw(path: pathlib.Path, comparisons: Mapping[str, Comparison]) -> None:
  """Saves the figure of `plot`."""
  size = (8.0, 0.8 + 0.34 * len(comparisons))
  with curves.save_figure(path, size=size, dpi=90) as axes:
    plot(axes, comparisons)


def plot(axes: Any, comparisons: Mapping[str, Comparison]) -> None:
  """Plots differences with their intervals, in units of their margins, a row for each.

  Between −10 and 10 margins the axis is linear, and logarithmic beyond.
  """
  axes.axvspan(-1, 1, color=COLORS["reference"], alpha=0.2, linewidth=0)
  axes.axvline(0, color=COLORS["plain"], linewidth=1)
  for row, comparison in enumerate(comparisons.values()):
    found = interval(comparison)
    seeds = [x / comparison.margin for x in differences(comparison).values()]
    offset_rows = [row + 0.25] * len(seeds)  # off the interval, which would hide them
    axes.plot(seeds, offset_rows, "o", markersize=3, color=COLORS["reference"])
    if found is not None:
      mean, low, high = (x / comparison.margin for x in (found.mean, found.low, found.high))
      error = [[mean - low], [high - mean]]
      axes.errorbar(mean, row, xerr=error, fmt="D", markersize=5, capsize=3, color=COLORS["result"])
  axes.set_xscale("symlog", linthresh=10)
  low, high = axes.get_xlim()
  ticks = [x for x in (-100, -30, -10, -5, -1, 0, 1, 5, 10, 30, 100) if low <= x <= high]
  axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
  axes.set_xticks([], minor=True)
  names = [f"{name}: {c.quantity}" for name, c in comparisons.items()]
  axes.set_yticks(range(len(names)), names)
  axes.set(
    ylim=(len(names) - 0.5, -0.5),
    xlabel="arm minus control, in margins: mean, 95 % interval, and single seeds",
  )
  axes.grid(axis="x", alpha=0.3)


# --- the claims -----------------------------------------------------------------------------------

_QUICKSTART = "quickstart, G = 16, 100 updates"
_STEPS = "`steps`, 192 updates"
_STALE = "quickstart, sixteen large updates per refresh"
_SMALL_GROUPS = "quickstart in written steps, G = 8, 144 updates"
_WRITTEN = "quickstart in written steps, `sampled`, 144 updates"
_OTHERS = "quickstart, half of the rollouts from a larger, better model"
_ENTROPIC = "quickstart, 2500 demonstrations, 240 updates"


def _number(name: str, value: float) -> Side:
  return Side(name, {}, value)


def _between(
  quantity: str,
  found: Mapping[str, Sequence[Result]],
  arm: str,
  control: str,
  value: OfRun,
  margin: float,
  regime: str,
  claimed: str = "more",
  plan: str = "",
) -> Comparison:
  """A comparison of two arms by one value."""
  sides = side(found, arm, value), side(found, control, value)
  return Comparison(quantity, *sides, claimed, margin, regime, plan)


def _pass_at_1(
  found: Mapping[str, Sequence[Result]],
  arm: str,
  control: str,
  regime: str,
  *,
  claimed: str = "more",
  value: OfRun = final_value,
  plan: str = "",
) -> Comparison:
  """A comparison of held-out pass@1, where 0.03 matters."""
  return _between("pass@1", found, arm, control, value, claims.MATTERS, regime, claimed, plan)


def _at_lower(plan: str, arm: str, control: str, regime: str, claimed: str = "more") -> Comparison:
  """A comparison of experiments/large_ratios at its lower rate, by its name there."""
  plan = f"large_ratios {plan}, rate {LOWER}"
  arm, control = at_lower(arm), at_lower(control)
  return _pass_at_1(FAR, arm, control, regime, claimed=claimed, value=LATE, plan=plan)


def _sampled(
  plan: str, quantity: str, arm: str, control: str, value: OfRun, margin: float
) -> Comparison:
  """A comparison of experiments/sampled_feature, by its name there."""
  plan = f"sampled_feature {plan}"
  return _between(quantity, SAMPLED, arm, control, value, margin, _WRITTEN, plan=plan)


def _high(
  plan: str,
  quantity: str,
  arm: str,
  control: str,
  value: OfRun,
  margin: float,
  claimed: str = "more",
) -> Comparison:
  """A comparison of experiments/high_entropy, by its name there."""
  plan = f"high_entropy {plan}"
  return _between(quantity, HIGH, arm, control, value, margin, _ENTROPIC, claimed, plan)


def _correlation_above_chance(run: Result) -> float:
  of = lambda name: average(f"geometry/agreement_{name}")(run)
  return of("correlation") - of("permutation_quantile")


def _speedup(name: str) -> Side:
  """Of a race of experiments/large_ratios, of stale rollouts over fresher ones."""
  race = RACES[name]
  found = speedups(every(FAR), race, PRICE, at_most=race.bounded)
  return Side(f"speed-up {'at most ' if race.bounded else ''}of {race.stale}", found)


def _larger_groups(name: str, label: Callable[[int], str]) -> Side:
  """What larger groups do for a method's pass@1, in experiments/sampled_feature."""
  gains = gain_of_size(every(SAMPLED), {size: label(size) for size in SIZES})
  return Side(f"{name}, G = 64 less 4", gains)


def _directions_per_rollout(run: Result) -> float:
  return measured("PR, score")(run) / ROLLOUTS


def _below(quantity: str, bound: float, meaning: str, value: OfRun) -> Comparison:
  """GRPO's gradients in experiments/sampled_feature, which are to stay below a bound."""
  arm = _number(f"{bound:g} ({meaning})", bound)
  return Comparison(quantity, arm, side(SAMPLED, grpo(16), value), "more", 0.1, _WRITTEN)


def _start_8(run: Result) -> float:
  return run["evaluations"]["eval/pass@8"][0]


_DEGRADED = low.label(low.GRPO, *low.HARDEST)
_RELAXED = at_lower("relaxed")

# Claim, and a letter where it has several parts → what decides it.
DECIDED_BY = {
  "S1a": _below("PR by `score`, over the rollouts", 0.5, "half", _directions_per_rollout),
  "S1b": _below("n_eff by `score`", 1.0, "they cancel", measured("n_eff, score")),
  "S1c": _below("n_eff by `sampled`", 1.0, "they cancel", measured("n_eff")),
  "S2a": _sampled("S2, n_eff", "n_eff of A′", salt(16), grpo(16), measured("n_eff of A′"), 0.1),
  "S2b": _sampled("S2, PR", "PR", salt(16), grpo(16), measured("PR"), 0.2),
  "S2c": _sampled("S2", "pass@1", salt(16), grpo(16), LATE, claims.MATTERS),
  "S3a": _between(
    "n_eff of A′",
    SALT,
    "SALT, G = 16",
    "SALT, random subspace, G = 16",
    REWEIGHTED,
    1.0,
    f"{_QUICKSTART}, `score`",
  ),
  "S3b": _sampled("S4, α = 0", "pass@1", salt(16), fixed(0.0), LATE, claims.MATTERS),
  "S4a": _sampled("S4, α = 0", "pass@1", salt(16), fixed(0.0), LATE, claims.MATTERS),
  "S4b": _sampled("S4, α = 1", "pass@1", salt(16), fixed(1.0), LATE, claims.MATTERS),
  "S5": Comparison(
    "gain of pass@1 by larger groups",
    _larger_groups("SALT", salt),
    _larger_groups("GRPO", grpo),
    "more",
    claims.MATTERS,
    _WRITTEN,
    "sampled_feature S5",
  ),
  "S7": Comparison(
    "correlation of cosines",
    side(SALT, "GRPO, G = 8", _correlation_above_chance)._replace(name="head with last block"),
    _number("permuted, 95 % quantile", 0.0),
    "more",
    0.1,
    "quickstart, G = 8, 100 updates",
  ),
  "S10a": _sampled("S10", "α", salt(64), salt(4), measured("α"), 0.1),
  "S10b": _between(
    "clip fraction",
    SAMPLED,
    grpo(16),
    salt(16),
    measured("clipped"),
    0.01,
    _WRITTEN,
    "not less",
  ),
  "S11a": _sampled("S11", "PR by `score`", BONUS, grpo(16), measured("PR, score"), 1.0),
  "S11b": _between(
    "n_eff by `score`",
    SAMPLED,
    BONUS,
    grpo(16),
    measured("n_eff, score"),
    0.3,
    _WRITTEN,
    "equal",
  ),
  "P1": _at_lower("P1, ε = 0.2", "P3O", "GRPO, ε = 0.2", f"{_STALE}, rate 6e-4", "not less"),
  "P2": _pass_at_1(
    ON_STEPS,
    "P3O, temperature 1.5, raw",
    "P3O",
    f"{_STEPS}, recorded raw",
    claimed="not less",
    value=LATE,
  ),
  "P3": _pass_at_1(
    LOW,
    low.label(low.P3O, "bfloat16", "fp8 rollouts"),
    low.label(low.P3O, "bfloat16"),
    _SMALL_GROUPS,
    claimed="not less",
    value=LATE,
    plan="low_precision P3, bfloat16, fp8 rollouts",
  ),
  "P4a": Comparison(
    "pass@8",
    side(LOW, low.SWEEP.arm, low.LATE_8),
    Side(low.SWEEP.control, low.sweep_mean(every(LOW))),
    "not less",
    claims.MATTERS,
    _SMALL_GROUPS,
    "low_precision P4",
  ),
  "P4b": Comparison(
    "pass@8",
    side(LOW, _DEGRADED, _start_8)._replace(name=f"{_DEGRADED}, at the start"),
    side(LOW, _DEGRADED, low.LATE_8),
    "more",
    claims.MATTERS,
    _SMALL_GROUPS,
  ),
  "P5a": _at_lower(
    "P5, lag 1", "P3O, lag 1", "GRPO, ε = 0.2, lag 1", "quickstart, a lag of one update, rate 6e-4"
  ),
  "P6": _pass_at_1(
    OTHERS,
    half_from(LARGER, "P3O"),
    "P3O",
    _OTHERS,
    claimed="not less",
    value=LATE,
    plan="other_samplers P6, larger model",
  ),
  "F1": _high(
    "F1",
    "entropy over the run, nats",
    EQUAL,
    "success-heavy",
    measured("entropy over the run"),
    0.02,
  ),
  "F2": _high(
    "F2",
    "head's rank-1 fraction",
    "failure-heavy",
    EQUAL,
    HIGH_RANK,
    0.05,
  ),
  "F3a": _high(
    "F3, sooner", "update of the highest pass@1", "success-heavy", "FADE", peak_update, 30.0
  ),
  "F3b": _high(
    "F3, as high",
    "highest pass@1",
    "FADE",
    "success-heavy",
    report.peak_value(),
    claims.MATTERS,
    "not less",
  ),
  "F3c": _high(
    "F3, as broad",
    "pass@16",
    "FADE",
    "pass@4 training",
    LATE_16,
    claims.MATTERS,
    "not less",
  ),
  "M1a": Comparison(
    "times as fast as GRPO to its accuracy",
    _speedup("M1, vetoed"),
    _number("1", 1.0),
    "more",
    SOONER,
    f"{_STALE}, rate 6e-4, hand-overs of {PRICE:.2f} updates",
    "large_ratios M1, vetoed",
  ),
  "M2a": _pass_at_1(ON_STEPS, GRPO, TIGHT, f"{_STEPS}, two stages of μ = 96", value=LATE),
  "M2b": Comparison(
    "pass@1",
    side(FAR, _RELAXED, LATE),
    side(FAR, _RELAXED, start)._replace(name="at the start"),
    "more",
    claims.MATTERS,
    f"{_STALE}, rate 6e-4",
  ),
  "M2c": _between(
    "fall of pass@1 from its highest",
    FAR,
    _RELAXED,
    at_lower("GRPO, ε = 0.2"),
    fall,
    claims.MATTERS,
    f"{_STALE}, rate 6e-4",
  ),
  "M3": _pass_at_1(
    FAR,
    with_new_seeds(SUFFIX),
    with_new_seeds(TRIGGER),
    f"{_STALE}, rate 1e-3",
    value=LATE,
    plan="large_ratios M3, new seeds",
  ),
}
