"""Writes the tables of TESTBED.md: python -m experiments.mu_grpo.testbed_tables."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.mu_grpo import hand_over
from experiments.mu_grpo.testbed import ABLATIONS, CLAIMS, MU
from experiments.testbed import report
from experiments.testbed.arms import GRPO, Arms
from experiments.testbed.report import Result, end_mean, late_mean, peak_value, training_mean

PAGE = pathlib.Path(__file__).parent / "TESTBED.md"
ARMS: Arms = {**CLAIMS, **ABLATIONS}
FAST = [label for label in ARMS if label.endswith("learning rate 1e-3")]
RISE = 0.2  # of held-out pass@1, at which wall-clock times are compared
TIGHT, RELAXED, SUFFIX = (f"{name}, μ = {MU}" for name in ("tight", "relaxed", "suffix"))


def value_after_first_stage(result: Result) -> float:
  """Held-out pass@1 at the end of the first stage."""
  evaluations = result["evaluations"]
  return evaluations["eval/pass@1"][evaluations["updates"].index(MU)]


COLUMNS = {
  "pass@1": late_mean(),
  "its peak": peak_value(),
  "at the end of the first stage": value_after_first_stage,
  "clip fraction": training_mean("loss/clip_fraction"),
  "largest ratio where A < 0": lambda r: max(r["train"]["behavior/ratio_max_negative"]),
  "vetoed tokens": training_mean("veto/token_fraction"),
  "trigger rate": training_mean("veto/trigger_rate"),
  "entropy at the end": end_mean("policy/entropy"),
  "seconds of syncs": lambda r: r["seconds"].get("sync_weights", 0.0),
}
SHOWN = list(CLAIMS)
PANELS = (
  report.Panel("held-out pass@1", "eval/pass@1", SHOWN),
  report.Panel("training solve rate, by stage", "reward/pass_rate", SHOWN),
  report.Panel("vetoed share of tokens", "veto/token_fraction", SHOWN),
)


def costs(results: Sequence[Result], label: str, mu: int) -> dict[int, hand_over.Cost | None]:
  """Seed → cost of a rise of pass@1 by `RISE`."""
  return {
    run["seed"]: hand_over.cost_to(run, run["evaluations"]["eval/pass@1"][0] + RISE, mu)
    for run in results
    if run["label"] == label
  }


def price_curves(results: Sequence[Result], prices: Sequence[float]) -> list[hand_over.Curve]:
  """Curves of GRPO's seconds over those of the suffix arm to that rise, by price."""
  return hand_over.make_curves(costs(results, GRPO, 4), costs(results, SUFFIX, MU), prices)


def tables(results: Sequence[Result]) -> str:
  usual = [label for label in ARMS if label not in FAST]
  prices = hand_over.table(lambda price_grid: price_curves(results, price_grid))
  sections = {
    "Learning, against GRPO": report.table(results, usual, COLUMNS, compared=late_mean()),
    "Against the relaxed clip": report.table(
      results, usual[1:], {}, compared=late_mean(), baseline=RELAXED
    ),
    "At a learning rate of 1e-3": report.table(
      results, FAST, COLUMNS, compared=late_mean(), baseline="GRPO, learning rate 1e-3"
    ),
    f"Seconds of GRPO over those of {SUFFIX}, to a rise of {RISE:g}": prices,
  }
  return "\n\n".join(f"{title}:\n\n{text}" for title, text in sections.items())


if __name__ == "__main__":
  report.write_page(PAGE, ARMS, tables, PANELS)
