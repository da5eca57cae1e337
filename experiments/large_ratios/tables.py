"""Writes the tables and the figure of README.md: python -m experiments.large_ratios.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.large_ratios.sweep import (
  CLIPS,
  LAG,
  LOWER,
  LOWER_RUNS,
  ON_POLICY,
  P3O,
  PILOT,
  RELAXED,
  RUNS,
  SUFFIX,
  TRIGGER,
  at_lower,
  grpo,
)
from experiments.mu_grpo.hand_over import GRID, RESTART_S, prices_of_7b, refreshes
from experiments.testbed.claims import (
  HEADINGS,
  Claim,
  arm_table,
  claim_row,
  claim_table,
  write_page,
)
from experiments.testbed.report import Result, late_mean
from rlvr_jax.evaluate import compare, curves
from rlvr_jax.evaluate.compare import METRIC, markdown_table, result_curve
from rlvr_jax.evaluate.paired import paired_difference

HOME = pathlib.Path(__file__).parent
LATE = late_mean()
MEASURED = {  # heading → (metric, what of its values over the updates)
  "ESS": ("behavior/ess", statistics.mean),
  "KL(β‖π)": ("behavior/kl_k3", statistics.mean),
  "largest ratio": ("behavior/ratio_max", max),
  "clipped": ("loss/clip_fraction", statistics.mean),
  "vetoed": ("veto/token_fraction", statistics.mean),
  "entropy at the start": ("policy/entropy", lambda values: values[0]),
  "at the end": ("policy/entropy", lambda values: values[-1]),
}
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
_RATES = {  # suffix of a panel's title → label of an arm there
  "": str,
  f", rate {LOWER}": at_lower,
}
PANELS = {  # title → arms
  f"{title}{suffix}": tuple(map(label, arms))
  for suffix, label in _RATES.items()
  for title, arms in {
    "P3O and GRPO's clips": (*map(grpo, CLIPS), P3O),
    "the veto": (grpo(0.2), RELAXED, SUFFIX, TRIGGER),
    "on-policy": (grpo(0.2), f"{grpo(0.2)}, {ON_POLICY}", P3O, f"{P3O}, {ON_POLICY}"),
  }.items()
}


# --- the price of a hand-over ---------------------------------------------------------------------

RISE = 0.1  # of held-out pass@1, to the level that is reached sooner
FRESH = at_lower(f"{grpo(0.2)}, {ON_POLICY}")
UPDATES_PER_HAND_OVER = 16
STAGES = {"price, vetoed": at_lower(SUFFIX), "price, tight": at_lower(grpo(0.2))}  # claim → arm
PRICE = prices_of_7b()[f"engine restart, {RESTART_S[0]:g} s"]  # in updates
SOONER = 0.2  # of a speed-up, the difference that would matter


def cost(result: Result, updates_per_hand_over: int, price: float) -> float:
  """Updates, and hand-overs in units of them, until pass@1 has risen by `RISE`; ∞ for never."""
  evaluations = result["evaluations"]
  level = evaluations[METRIC][0] + RISE
  updates = curves.first_crossing(evaluations["updates"], evaluations[METRIC], level)
  if math.isnan(updates):
    return math.inf
  return updates + price * refreshes(updates, updates_per_hand_over)


def speedups(results: Sequence[Result], label: str, price: float) -> dict[int, float]:
  """Seed → cost of fresh rollouts over that of stale ones; 0 where these never get there."""
  runs = compare.group_by_label(results)
  fresh = {run["seed"]: cost(run, 1, price) for run in runs.get(FRESH, [])}
  stale = {run["seed"]: cost(run, UPDATES_PER_HAND_OVER, price) for run in runs.get(label, [])}
  return {seed: fresh[seed] / stale[seed] for seed in sorted(fresh.keys() & stale.keys())}


def price_table(results: Sequence[Result]) -> str:
  """Speed-ups at the price of the plan, their verdicts, and how many seeds get there."""
  rows = {}
  for name, label in STAGES.items():
    found = speedups(results, label, PRICE)
    if not found:
      continue
    free, dear = (statistics.mean(speedups(results, label, p).values()) for p in (0.0, 100.0))
    rows[name] = [
      *claim_row(
        Claim(name, label, "1", "more"),
        paired_difference(found, dict.fromkeys(found, 1.0)),
        SOONER,
      ),
      f"{sum(x > 0 for x in found.values())} of {len(found)}",
      f"{free:.2f}",
      f"{dear:.2f}",
    ]
  more = ["seeds that get there", "speed-up, p = 0", "speed-up, p = 100"]
  return markdown_table([*HEADINGS, *more], rows, "claim")


def _draw_price(axes: Any, results: Sequence[Result]) -> None:
  for label in STAGES.values():
    means = [statistics.mean(speedups(results, label, price).values()) for price in GRID]
    axes.plot(GRID, means, label=label)
  axes.axhline(1, color="black", linewidth=0.8)
  axes.axvline(PRICE, color="gray", linewidth=0.8)
  axes.set_xscale("log")
  axes.set(xlabel="price of a hand-over, updates", ylabel="cost of on-policy GRPO / of stale runs")
  axes.set_title("the price of a hand-over")
  axes.legend(fontsize=7)


# --- the page -------------------------------------------------------------------------------------


def draw(results: Sequence[Result]) -> None:
  """Saves a figure of held-out pass@1, a panel for each question and rate, and of the price."""
  runs = compare.group_by_label(results)
  with curves.save_figure(HOME / "curves.png", 2, 4, size=(20, 7.6), dpi=80) as rows:
    questions = [*rows[0][:3], *rows[1][:3]]
    for axes, (title, labels) in zip(questions, PANELS.items(), strict=True):
      of_panel = {label: [result_curve(r) for r in runs.get(label, [])] for label in labels}
      curves.plot_curves(axes, of_panel, METRIC, "updates")
      axes.sharey(rows.flat[0])
      axes.set_title(title)
    rows[0][3].axis("off")
    _draw_price(rows[1][3], results)


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  pilot, compared, lower = (
    arm_table(results, list(arms), MEASURED, LATE) for arms in (PILOT, RUNS, LOWER_RUNS)
  )
  parts = [pilot, claim_table(CLAIMS, results, LATE), compared]
  parts += [
    f"At {LOWER}:",
    claim_table(CLAIMS_AT_LOWER, results, LATE),
    price_table(results),
    lower,
  ]
  return "\n\n".join(parts)


if __name__ == "__main__":
  write_page(HOME, [*PILOT, *RUNS, *LOWER_RUNS], MEASURED, tables, draw)
