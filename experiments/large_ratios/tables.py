"""Writes the tables and the figure of README.md: python -m experiments.large_ratios.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.large_ratios.sweep import (
  CAP,
  CLIPS,
  FREE,
  LAG,
  LONGER_RUNS,
  LOWER,
  LOWER_RUNS,
  ON_POLICY,
  P3O,
  PILOT,
  PULL,
  REFRESHED,
  REFRESHED_RUNS,
  RELAXED,
  RUNS,
  SUFFIX,
  TRIGGER,
  VETO_RUNS,
  WHY_RUNS,
  at_lower,
  grpo,
  longer,
  with_new_seeds,
)
from experiments.mu_grpo.hand_over import GRID, RESTART_S, prices_of_7b, refreshes
from experiments.testbed.claims import (
  MISMATCH,
  Claim,
  arm_table,
  claim_table,
  measured,
  verdict,
  write_page,
)
from experiments.testbed.report import Panel, Result, late_mean, name_missing, plot_panel
from rlvr_jax.evaluate import compare, curves
from rlvr_jax.evaluate.compare import METRIC, markdown_table
from rlvr_jax.evaluate.paired import paired_difference

HOME = pathlib.Path(__file__).parent
LATE = late_mean()
MEASURED = {  # heading → (metric, what of its values over the updates)
  **MISMATCH,
  "vetoed": ("veto/token_fraction", statistics.mean),
  "entropy at the start": ("policy/entropy", lambda values: values[0]),
  "at the end": ("policy/entropy", lambda values: values[-1]),
}
SHOWN = ("ESS", "largest ratio", "clipped", "vetoed")
CLAIMS = (
  *(Claim(f"P1, ε = {epsilon}", P3O, grpo(epsilon), "not less") for epsilon in CLIPS),
  Claim("P5", P3O, grpo(0.2), "more"),
  Claim("P5, on-policy", P3O, f"{P3O}, {ON_POLICY}", "not less"),
  Claim("M1", SUFFIX, grpo(0.2), "more"),
  Claim("M2", SUFFIX, RELAXED, "more"),
  Claim("M3", SUFFIX, TRIGGER, "more"),
)
AT_LOWER = (
  *(Claim(f"P1, ε = {epsilon}", P3O, grpo(epsilon), "not less") for epsilon in CLIPS),
  Claim("P5, stale", P3O, grpo(0.2), "more"),
  Claim("P5, lag 1", f"{P3O}, {LAG}", f"{grpo(0.2)}, {LAG}", "more"),
  Claim("P5, cost of lag 1", f"{P3O}, {LAG}", f"{P3O}, {ON_POLICY}", "not less"),
  Claim("P5, cost of 15", P3O, f"{P3O}, {ON_POLICY}", "not less"),
  Claim("M1", SUFFIX, grpo(0.2), "more"),
  Claim("M2", SUFFIX, RELAXED, "more"),
  Claim("M3", SUFFIX, TRIGGER, "more"),
)
CLAIMS_AT_LOWER = tuple(
  Claim(f"{c.name}, rate {LOWER}", at_lower(c.arm), at_lower(c.control), c.claimed)
  for c in AT_LOWER
)
_AT_LAG = at_lower(f"{grpo(0.2)}, {LAG}")
WHY = (
  Claim("no clip at lag 1", _AT_LAG, FREE, "more"),
  Claim("cap at lag 1", CAP, _AT_LAG, "not less"),
  Claim("pull at lag 1", PULL, _AT_LAG, "not less"),
)
AS_LONG = tuple(
  Claim(f"equal cost, {name}", longer(label), REFRESHED, "more")
  for name, label in (("vetoed", SUFFIX), ("tight", grpo(0.2)))
)
VETO = (Claim("M3, new seeds", with_new_seeds(SUFFIX), with_new_seeds(TRIGGER), "more"),)


def _panels(suffix: str, label: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
  """Title → arms, of a panel for each question at one rate."""
  questions = {
    "P3O and GRPO's clips": (*map(grpo, CLIPS), P3O),
    "the veto": (grpo(0.2), RELAXED, SUFFIX, TRIGGER),
    "on-policy": (grpo(0.2), f"{grpo(0.2)}, {ON_POLICY}", P3O, f"{P3O}, {ON_POLICY}"),
  }
  return {f"{title}{suffix}": tuple(map(label, arms)) for title, arms in questions.items()}


PANELS = {
  **_panels("", str),
  f"a lag of one, rate {LOWER}": (_AT_LAG, FREE, at_lower(f"{P3O}, {LAG}"), CAP, PULL),
  **_panels(f", rate {LOWER}", at_lower),
  f"the cost of GRPO's 160 updates, rate {LOWER}": (REFRESHED, *LONGER_RUNS),
  "the veto, other seeds": tuple(VETO_RUNS),
}


# --- the price of a hand-over ---------------------------------------------------------------------

UPDATES_PER_HAND_OVER = 16  # of stale runs
PRICE = prices_of_7b()[f"engine restart, {RESTART_S[0]:g} s"]  # in updates
SHOWN_PRICES = (0.0, PRICE / 3, PRICE, 100.0)  # the second at a third of the chips' peak
SOONER = 0.2  # of a speed-up, the difference that would matter


def risen(result: Result) -> float:
  """pass@1 0.1 above its start."""
  return result["evaluations"][METRIC][0] + 0.1


class Race(NamedTuple):
  """Which of two runs of a seed is sooner at a level.

  Attributes:
    name: of the claim.
    stale: label, of runs with `UPDATES_PER_HAND_OVER`.
    fresh: label, of runs with fewer.
    updates_per_hand_over: theirs.
    level: pass@1 to be reached, of the fresh run.
    bounded: whether stale runs that never get there count as if they did with their last update.
      So the claim is about a bound from above.
  """

  name: str
  stale: str
  fresh: str
  updates_per_hand_over: int
  level: Callable[[Result], float]
  bounded: bool = False


_VETOED, _TIGHT = at_lower(SUFFIX), at_lower(grpo(0.2))
_FRESH = at_lower(f"{grpo(0.2)}, {ON_POLICY}")
RACES = {
  race.name: race
  for race in (
    Race("price, vetoed", _VETOED, _FRESH, 1, risen),
    Race("price, tight", _TIGHT, _FRESH, 1, risen),
    Race("accuracy, vetoed", _VETOED, REFRESHED, 4, LATE),
    Race("accuracy, tight", _TIGHT, REFRESHED, 4, LATE),
    Race("M1, vetoed", longer(SUFFIX), REFRESHED, 4, LATE, bounded=True),
    Race("M1, tight", longer(grpo(0.2)), REFRESHED, 4, LATE, bounded=True),
    Race("rise, vetoed, not planned", _VETOED, REFRESHED, 4, risen),
    Race("rise, tight, not planned", _TIGHT, REFRESHED, 4, risen),
  )
}


def cost(
  result: Result,
  level: float,
  updates_per_hand_over: int,
  price: float,
  *,
  at_the_end: bool = False,
) -> float:
  """Updates, and hand-overs in units of them, until pass@1 first reaches a level.

  Args:
    result: of a run; if it never gets there, its cost is ∞.
    level: of pass@1.
    updates_per_hand_over: of the run.
    price: of a hand-over, in updates.
    at_the_end: whether a run that never gets there counts as getting there with its last update.
  """
  evaluations = result["evaluations"]
  updates = curves.first_crossing(evaluations["updates"], evaluations[METRIC], level)
  if math.isnan(updates):
    if not at_the_end:
      return math.inf
    updates = evaluations["updates"][-1]
  return updates + price * refreshes(updates, updates_per_hand_over)


def speedups(
  results: Sequence[Result], race: Race, price: float, *, at_most: bool = False
) -> dict[int, float]:
  """Seed → cost of fresh rollouts over that of stale ones; 0 where these never get there.

  Args:
    results: with the runs of both; seeds whose fresh run never gets there are left out.
    race: of the two.
    price: of a hand-over, in updates.
    at_most: whether stale runs that never get there count as if they did with their last update,
      which bounds what a longer run would have.
  """
  runs = compare.group_by_label(results)
  stale = {run["seed"]: run for run in runs.get(race.stale, [])}
  found = {}
  for run in runs.get(race.fresh, []):
    level = race.level(run)
    of_fresh = cost(run, level, race.updates_per_hand_over, price)
    if run["seed"] in stale and math.isfinite(of_fresh):
      of_stale = stale[run["seed"]], level, UPDATES_PER_HAND_OVER, price
      found[run["seed"]] = of_fresh / cost(*of_stale, at_the_end=at_most)
  return found


def price_table(results: Sequence[Result]) -> str:
  """Speed-ups at the price of the plan, their verdicts, and how many seeds get there.

  Cells whose runs are missing have a dash.
  """
  mean = lambda found: f"{statistics.mean(found.values()):.2f}" if found else "–"
  rows = {}
  for name, race in RACES.items():
    zero_if_never = speedups(results, race, PRICE)
    at_most = speedups(results, race, PRICE, at_most=True)
    rows[name] = [
      race.stale,
      f"{sum(x > 0 for x in zero_if_never.values())} of {len(zero_if_never)}",
      *(mean(speedups(results, race, price)) for price in SHOWN_PRICES),
      mean(at_most),
      *_verdict_cells(at_most if race.bounded else zero_if_never),
    ]
  header = ["stale run", "seeds that get there", *(f"p = {price:.3g}" for price in SHOWN_PRICES)]
  return markdown_table([*header, "at most", "claimed less 1, 95 %", "verdict"], rows, "claim")


def _verdict_cells(found: dict[int, float]) -> list[str]:
  """The speed-ups less 1 with their interval, and the verdict; undecided with fewer than two."""
  if len(found) < 2:
    return ["–", "undecided"]
  less_one = paired_difference(found, dict.fromkeys(found, 1.0))
  decided = verdict("more", less_one.low, less_one.high, SOONER)
  return [compare.difference_cell(less_one), decided]


def _draw_price(axes: Any, results: Sequence[Result]) -> None:
  for name, race in RACES.items():
    if speedups(results, race, PRICE):
      at = lambda price, race=race: speedups(results, race, price, at_most=race.bounded)
      means = [statistics.mean(at(price).values()) for price in GRID]
      axes.plot(GRID, means, label=f"{name}, at most" if race.bounded else name)
    else:
      name_missing(axes, [name])
  axes.axhline(1, color="black", linewidth=0.8)
  axes.axvline(PRICE, color="gray", linewidth=0.8)
  axes.set_xscale("log")
  axes.set(xlabel="price of a hand-over, updates", ylabel="cost of fresh over that of stale runs")
  axes.set_title("the price of a hand-over")
  axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0))


# --- the page -------------------------------------------------------------------------------------


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1, a panel for each question and rate, and of the price."""
  with curves.save_figure(home / "curves.png", 5, 2, size=(14, 17.5), dpi=80) as rows:
    *questions, of_price = rows.flat
    for axes, (title, labels) in zip(questions, PANELS.items(), strict=True):
      plot_panel(axes, Panel(title, METRIC, labels), results)
      axes.sharey(rows.flat[0])
    _draw_price(of_price, results)


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  later = {**LOWER_RUNS, **REFRESHED_RUNS, **WHY_RUNS, **LONGER_RUNS}
  entropy = {"entropy at the end": measured("at the end")}
  arms = arm_table(results, [*RUNS, *VETO_RUNS, *later], SHOWN, LATE, entropy)
  claims = [*CLAIMS, *VETO, *CLAIMS_AT_LOWER, *WHY, *AS_LONG]
  title = f"Speed-up of stale over fresher rollouts, at a price p of {PRICE:.2f} updates:"
  return "\n\n".join([claim_table(claims, results, LATE), title, price_table(results), arms])


if __name__ == "__main__":
  later = [*LOWER_RUNS, *REFRESHED_RUNS, *WHY_RUNS, *LONGER_RUNS, *VETO_RUNS]
  write_page(HOME, [*PILOT, *RUNS, *later], MEASURED, tables, draw)
