"""Writes the tables and the figure of README.md: python -m experiments.large_ratios.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.large_ratios.sweep import (
  CLIPS,
  ON_POLICY,
  P3O,
  PILOT,
  RELAXED,
  RUNS,
  SUFFIX,
  TRIGGER,
  grpo,
)
from experiments.testbed import report
from experiments.testbed.claims import Claim, claim_table, late_mean
from experiments.testbed.report import Result
from rlvr_jax.evaluate import compare, curves
from rlvr_jax.evaluate.compare import METRIC, result_curve
from rlvr_jax.evaluate.run_files import read_metrics

HOME = pathlib.Path(__file__).parent
LATE = late_mean(3)
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
PANELS = {  # title → arms
  "P3O and GRPO's clips": (*map(grpo, CLIPS), P3O),
  "the veto": (grpo(0.2), RELAXED, SUFFIX, TRIGGER),
  "on-policy": (grpo(0.2), f"{grpo(0.2)}, {ON_POLICY}", P3O, f"{P3O}, {ON_POLICY}"),
}


def measure(workdir: str) -> dict[str, Any]:
  """Measures a finished run: each of `MEASURED` over its updates, where the run has it."""
  train = [r for r in read_metrics(workdir) if r["phase"] == "train"]
  values = {metric: [r[metric] for r in train if metric in r] for metric, _ in MEASURED.values()}
  return {
    "measured": {
      name: float(f"{of(values[metric]):.6g}")
      for name, (metric, of) in MEASURED.items()
      if values[metric]
    }
  }


def arm_table(results: Sequence[Result], labels: Sequence[str]) -> str:
  """A row for each arm: pass@1 and what was measured, as means over seeds."""

  def value(name: str) -> Callable[[Result], float | None]:
    return lambda result: result["measured"].get(name)

  columns: Mapping[str, Callable[[Result], float | None]] = {
    "pass@1 at the start": lambda r: r["evaluations"][METRIC][0],
    "late pass@1": LATE,
    "highest pass@1": report.peak_value(),
    **{name: value(name) for name in MEASURED},
  }
  return report.table(results, labels, columns)


def draw(results: Sequence[Result]) -> None:
  """Saves a figure of held-out pass@1, with a panel for each question."""
  runs = compare.group_by_label(results)
  with curves.save_figure(HOME / "curves.png", 1, len(PANELS), size=(15, 3.8), dpi=90) as row:
    for axes, (title, labels) in zip(row.flat, PANELS.items(), strict=True):
      of_panel = {label: [result_curve(r) for r in runs.get(label, [])] for label in labels}
      curves.plot_curves(axes, of_panel, METRIC, "updates")
      axes.sharey(row.flat[0])
      axes.set_title(title)


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown; that of claims once every arm has run."""
  found = {result["label"] for result in results}
  parts = [arm_table(results, list(PILOT))]
  if found >= RUNS.keys():
    parts += [claim_table(CLAIMS, results, LATE), arm_table(results, list(RUNS))]
  return "\n\n".join(parts)


if __name__ == "__main__":
  labels = [*PILOT, *RUNS]
  results, are_new = report.load_results(HOME / "results.json", measure, labels)
  if are_new and {result["label"] for result in results} >= RUNS.keys():
    draw(results)
  text = tables(results) + "\n\n" + compare.provenance(results).replace("\n", "; ")
  page = HOME / "README.md"
  page.write_text(report.insert_text(page.read_text(encoding="utf-8"), text), encoding="utf-8")
  print(text)
