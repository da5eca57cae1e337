"""Writes the tables and the figure of README.md: python -m experiments.large_ratios.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

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
from experiments.testbed.claims import Claim, arm_table, claim_table, write_page
from experiments.testbed.report import Result, late_mean
from rlvr_jax.evaluate import compare, curves
from rlvr_jax.evaluate.compare import METRIC, result_curve

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
PANELS = {  # title → arms
  "P3O and GRPO's clips": (*map(grpo, CLIPS), P3O),
  "the veto": (grpo(0.2), RELAXED, SUFFIX, TRIGGER),
  "on-policy": (grpo(0.2), f"{grpo(0.2)}, {ON_POLICY}", P3O, f"{P3O}, {ON_POLICY}"),
}


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
  """All tables as Markdown."""
  pilot, compared = (arm_table(results, list(arms), MEASURED, LATE) for arms in (PILOT, RUNS))
  return "\n\n".join([pilot, claim_table(CLAIMS, results, LATE), compared])


if __name__ == "__main__":
  write_page(HOME, [*PILOT, *RUNS], MEASURED, tables, draw)
