"""Writes the tables of README.md: python -m experiments.fade.tables."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.fade.testbed import ABLATIONS, CLAIMS, ON_TOUR
from experiments.testbed import report
from experiments.testbed.arms import GRPO, Arms
from experiments.testbed.report import (
  Result,
  drift_correlation,
  end_mean,
  late_mean,
  peak_value,
  training_mean,
)
from rlvr_jax.evaluate import compare

PAGE = pathlib.Path(__file__).parent / "README.md"
ARMS: Arms = {**CLAIMS, **ABLATIONS}


def peak_update(result: Result) -> float:
  """Update of the highest held-out pass@1."""
  evaluations = result["evaluations"]
  return float(evaluations["updates"][int(np.argmax(evaluations["eval/pass@1"]))])


LEARNING = {
  "pass@1": late_mean(),
  "its peak": peak_value(),
  "update of the peak": peak_update,
  "pass@16": late_mean("eval/pass@16"),
}
ENTROPY = training_mean("policy/entropy")
RANK_ONE = report.geometry_value("head_rank_one_fraction", when="last")
MASS = {
  "m_S": training_mean("advantage/mass_success"),
  "m_F": training_mean("advantage/mass_failure"),
  "entropy over the run": ENTROPY,
  "entropy at the end": end_mean("policy/entropy"),
  "ΔH against its prediction, correlation": drift_correlation,
  "head's rank-1 fraction at the end": RANK_ONE,
  "head's share of ‖ΔW‖²": report.geometry_value("head_share", when="last"),
}
CONTROL = {
  f"{symbol}, {phase}": (lambda r, name=name, at=at: r["train"].get(name, [None])[at])
  for symbol, name in (
    ("α", "advantage/fade_alpha"),
    ("δ", "advantage/fade_delta"),
    ("p̂", "advantage/fade_solve_rate"),
  )
  for phase, at in (("start", 0), ("end", -1))
}
SHOWN = list(CLAIMS)
PANELS = (
  report.Panel("held-out pass@1", "eval/pass@1", SHOWN),
  report.Panel("held-out pass@16", "eval/pass@16", SHOWN),
  report.Panel("entropy, nats per token", "policy/entropy", SHOWN),
)


def mass_table(results: Sequence[Result], labels: Sequence[str]) -> str:
  """Returns a table of m_S and m_F of groups by solve rate, over all measurements of a label."""
  header = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(report.RATES)]
  rows = {}
  for label, runs in compare.group_by_label(results).items():
    if label in labels:
      bins = zip(*(run["masses"] for run in runs), strict=True)
      rows[label] = [_mass_cell(np.array(bin_rows, np.float64)) for bin_rows in bins]
  return compare.markdown_table(header, rows)


def _mass_cell(rows: np.ndarray) -> str:
  """Text of the mean m_S and m_F of rows f64[runs, 3] of groups, m_S, m_F."""
  groups = rows[:, 0]
  if not groups.sum():
    return "–"
  success, failure = groups @ rows[:, 1:] / groups.sum()
  return f"{success:.3f}, {failure:.3f}"


def tables(results: Sequence[Result]) -> str:
  on_steps = [label for label in ARMS if label not in ON_TOUR]
  sections = {
    "Learning": report.table(results, on_steps, LEARNING, compared=late_mean()),
    "pass@16, paired": report.table(results, on_steps, {}, compared=late_mean("eval/pass@16")),
    "Masses, entropy, the head's update": report.table(results, on_steps, MASS),
    **{
      f"Entropy over the run, against {baseline}": report.table(
        results, list(CLAIMS), {}, compared=ENTROPY, baseline=baseline, digits=5
      )
      for baseline in (GRPO, "FADE")
    },
    **{
      f"Head's rank-1 fraction at the end, against {baseline}": report.table(
        results, list(CLAIMS), {}, compared=RANK_ONE, baseline=baseline
      )
      for baseline in (GRPO, "FADE")
    },
    "m_S, m_F by the solve rate of a group": mass_table(results, on_steps),
    "FADE's controllers": report.table(
      results, [label for label in on_steps if "FADE" in label], CONTROL
    ),
    "On tour": report.table(
      results,
      list(ON_TOUR),
      {"pass@1": late_mean(), **({"pass@64": late_mean("eval/pass@64")}), **MASS},
      compared=late_mean(),
      baseline=f"tour: {GRPO}",
    ),
  }
  return "\n\n".join(f"{title}:\n\n{text}" for title, text in sections.items())


if __name__ == "__main__":
  report.write_page(PAGE, ARMS, tables, PANELS)
