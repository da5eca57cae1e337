"""How a comparison of two arms decides a claim of docs/reproduction.md.

The claims and their comparisons are in docs/claims.py.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.testbed import claims
from rlvr_jax.evaluate import compare, curves
from rlvr_jax.evaluate.figures import COLORS, plot_difference
from rlvr_jax.evaluate.paired import BySeed, Difference, holm, paired_difference

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"
FEWEST_SEEDS = 3  # for an interval
Result = Mapping[str, Any]
OfRun = Callable[[Result], float]


class Task(NamedTuple):
  """The task of an experiment, and the experiment's runs."""

  name: str  # the task's name on the page docs/reproduction.md
  page: str  # path of the experiment's page below experiments/
  runs: Mapping[str, Sequence[Result]]  # label → runs

  @property
  def all_runs(self) -> list[Result]:
    return [run for runs in self.runs.values() for run in runs]

  @property
  def experiment(self) -> str:
    return self.page.partition("/")[0]


def results(name: str) -> dict[str, list[Result]]:
  """Label → the committed runs of experiments/NAME."""
  return compare.group_by_label(compare.read_results(EXPERIMENTS / name / "results.json"))


class Side(NamedTuple):
  """One side of a comparison: an arm with a value per seed, or a number."""

  name: str  # the side's name on the page
  by_seed: BySeed  # values of the arm by seed; empty for a number
  number: float = 0.0  # used if `by_seed` is empty


class Comparison(NamedTuple):
  """A comparison of two sides, and the conditions under which it supports a claim."""

  quantity: str  # the compared quantity, with its unit
  arm: Side
  control: Side  # the difference is arm minus control
  task: Task
  margin: float  # the smallest difference that would matter
  claimed: str = "more"  # see `experiments.testbed.claims.Claim`
  # Row of the plan in the experiment's README.md, which was committed before the runs and has the
  # comparison and the margin; "": comparison and margin were chosen after the runs.
  plan: str = ""


def side(task: Task, label: str, value: OfRun) -> Side:
  """The side of the arm with this label: the value of each run, by seed."""
  return Side(label, {run["seed"]: value(run) for run in task.runs[label]})


def differences(arm: Side, control: Side) -> dict[int, float]:
  """The arm's value minus the control's, for each seed that both sides have.

  A side that is a number has this value for every seed.
  """
  seeds = [s for s in (arm.by_seed or control.by_seed) if s in (control.by_seed or arm.by_seed)]
  of = lambda side, seed: side.by_seed[seed] if side.by_seed else side.number
  return {seed: of(arm, seed) - of(control, seed) for seed in sorted(seeds)}


def interval(found: Mapping[int, float]) -> Difference | None:
  """The mean difference with its interval; None for fewer than `FEWEST_SEEDS` seeds."""
  return _interval(tuple(found.values())) if len(found) >= FEWEST_SEEDS else None


@functools.cache
def _interval(values: tuple[float, ...]) -> Difference:
  by_seed = dict(enumerate(values))
  return paired_difference(by_seed, dict.fromkeys(by_seed, 0.0))


def interval_of(comparison: Comparison) -> Difference | None:
  """The `interval` of a comparison's differences."""
  return interval(differences(comparison.arm, comparison.control))


def verdict(comparison: Comparison) -> str:
  """The verdict on a claim from the comparison's interval; see `experiments.testbed.claims`."""
  found = interval_of(comparison)
  if found is None:
    return "undecided"
  return claims.verdict(comparison.claimed, found.low, found.high, comparison.margin)


def holm_p(comparisons: Mapping[str, Comparison]) -> dict[str, float]:
  """The p-value of each comparison that has an interval, adjusted by Holm's procedure.

  A comparison that decides two claims counts once.
  """
  distinct = {id(comparison): comparison for comparison in comparisons.values()}
  found = {key: interval_of(comparison) for key, comparison in distinct.items()}
  p = {key: difference.p for key, difference in found.items() if difference is not None}
  adjusted = dict(zip(p, holm([*p.values()]).tolist(), strict=True))
  return {name: adjusted[id(c)] for name, c in comparisons.items() if id(c) in adjusted}


def difference_cell(found: Mapping[int, float], digits: int = 3) -> str:
  """Text: the mean difference with its interval, and the number of seeds.

  With too few seeds for an interval, the text has the difference of each seed instead of the mean.
  """
  mean = interval(found)
  if mean is None:
    number = " and ".join(f"{value:+.{digits}f}" for value in found.values())
  else:
    number = compare.difference_cell(mean, digits)
  return f"{number}, {len(found)} seeds"


def draw(path: pathlib.Path, comparisons: Mapping[str, Comparison]) -> None:
  """Saves the figure of `plot`."""
  size = (8.0, 0.8 + 0.34 * len(comparisons))
  with curves.save_figure(path, size=size, dpi=90) as axes:
    plot(axes, comparisons)


def plot(axes: Any, comparisons: Mapping[str, Comparison]) -> None:
  """Plots one row per comparison: the difference and its interval, in units of the margin.

  The axis is linear between −10 and 10 margins, and logarithmic outside this range.
  """
  axes.axvspan(-1, 1, color=COLORS["reference"], alpha=0.2, linewidth=0)
  axes.axvline(0, color=COLORS["plain"], linewidth=1)
  for row, comparison in enumerate(comparisons.values()):
    seeds = differences(comparison.arm, comparison.control)
    in_margins = {seed: value / comparison.margin for seed, value in seeds.items()}
    plot_difference(axes, row, [*in_margins.values()], interval(in_margins))
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
