"""Writes the tables and the figure of README.md: python -m experiments.low_precision.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

from experiments.low_precision.sweep import (
  ANCHORED,
  ANCHORS,
  CLIPPED,
  CLIPS,
  FORMATS,
  HARDEST,
  HOT,
  METHODS,
  PILOT,
  PRECISION,
  RUNS,
  TRAINING,
  WHY,
  clip,
  label,
)
from experiments.testbed.claims import (
  HEADINGS,
  MISMATCH,
  Claim,
  Quantity,
  arm_table,
  claim_row,
  quantity_tables,
  write_page,
)
from experiments.testbed.report import Panel, Result, draw_panels, late_mean, peak_value
from rlvr_jax.evaluate import compare
from rlvr_jax.evaluate.compare import METRIC, markdown_table
from rlvr_jax.evaluate.paired import BySeed

HOME = pathlib.Path(__file__).parent
LATE, LATE_8 = late_mean(), late_mean("eval/pass@8")
MEASURED = {  # heading → (metric, what of its values over the updates)
  **MISMATCH,
  "entropy at the end": ("policy/entropy", lambda values: values[-1]),
}
GRPO, P3O = METHODS
CELLS = tuple((training, rollouts) for training in TRAINING for rollouts in FORMATS)
HOT_P3O, HOT_ANCHORS = (f"{label(method)}, {HOT}" for method in (P3O, ANCHORS))
QUANTITIES = (
  Quantity(
    "Late pass@1",
    (
      *(Claim(f"P3, {t}, {r}", label(P3O, t, r), label(P3O, t), "not less") for t, r in CELLS),
      *(
        Claim(f"P3, GRPO degrades, {t}, {r}", label(GRPO, t), label(GRPO, t, r), "more")
        for t, r in CELLS
      ),
      *(
        Claim(f"P3, against GRPO, {t}, {r}", label(P3O, t, r), label(GRPO, t, r), "more")
        for t, r in CELLS
      ),
      *(
        Claim(f"P3, bfloat16, {method}", label(method, TRAINING[1]), label(method), "not less")
        for method in METHODS
      ),
      Claim("P7", HOT_P3O, HOT_ANCHORS, "more"),
      Claim("P7, one anchor is robust", HOT_P3O, label(P3O), "not less"),
    ),
    LATE,
  ),
  Quantity(
    "Highest pass@1",
    (Claim("P7, two anchors peak alike", label(ANCHORS), label(P3O), "not less"),),
    peak_value(),
  ),
  Quantity(
    "Late pass@8",
    (Claim("P4, GRPO collapses", label(GRPO, TRAINING[1]), label(GRPO, *HARDEST), "more"),),
    LATE_8,
  ),
)
_FREE, _CAP, _PULL = WHY
_OF_GRPO, _OF_P3O = (label(method, *HARDEST) for method in METHODS)
REASONS = (
  Claim("no clip", _FREE, _OF_GRPO, "more"),
  Claim("cap", _CAP, _OF_P3O, "not less"),
  Claim("pull", _PULL, _OF_P3O, "not less"),
)
SWEEP = Claim("P4", label(P3O), "GRPO, mean of the clips", "not less")
PANELS = (
  *(
    Panel(
      f"training in {training}",
      METRIC,
      [label(method, training, rollouts) for method in METHODS for rollouts in ("", *FORMATS)],
    )
    for training in TRAINING
  ),
  Panel("clips: pass@8", "eval/pass@8", [*map(clip, CLIPS), label(P3O)]),
  Panel(f"anchors, {HOT}", METRIC, [label(P3O), *ANCHORED]),
  Panel("training in bfloat16, fp8 rollouts", METRIC, [_OF_GRPO, _OF_P3O, *WHY]),
)


def sweep_mean(results: Sequence[Result]) -> BySeed:
  """Seed → late pass@8 of GRPO trained in float32, averaged over its clips."""
  runs = compare.group_by_label(results)
  by_clip = [{run["seed"]: LATE_8(run) for run in runs.get(clip(x), [])} for x in CLIPS]
  shared = set.intersection(*(set(found) for found in by_clip))
  return {seed: statistics.mean(found[seed] for found in by_clip) for seed in sorted(shared)}


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1, with a panel for each question."""
  draw_panels(results, PANELS, home / "curves.png")


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  of_p3o = {run["seed"]: LATE_8(run) for run in results if run["label"] == SWEEP.arm}
  rows = {SWEEP.name: claim_row(SWEEP, of_p3o, sweep_mean(results))}
  mean = f"Late pass@8, less the mean of GRPO's clips:\n\n{markdown_table(HEADINGS, rows, 'claim')}"
  why = Quantity("Late pass@1, five seeds: which part of each method", REASONS, LATE)
  claims = [*quantity_tables([*QUANTITIES, why], results), mean]
  shown = [*PRECISION, *CLIPPED, *ANCHORED, *WHY]
  arms = arm_table(results, shown, ("ESS", "clipped"), LATE, {"late pass@8": LATE_8})
  return "\n\n".join([*claims, arms])


if __name__ == "__main__":
  write_page(HOME, [*PILOT, *RUNS, *WHY], MEASURED, tables, draw)
