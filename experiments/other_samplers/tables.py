"""Writes the tables and the figure of README.md: python -m experiments.other_samplers.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.other_samplers.sweep import EQUAL, LARGER, OTHERS, RUNS, half_from
from experiments.testbed.claims import MISMATCH, Claim, arm_table, claim_table, write_page
from experiments.testbed.report import Panel, Result, late_mean, plot_panel
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import METRIC

HOME = pathlib.Path(__file__).parent
LATE = late_mean()
MEASURED = {  # heading → (metric, what of its values over the updates)
  **MISMATCH,
  "entropy at the end": ("policy/entropy", lambda values: values[-1]),
}
CLAIMS = tuple(
  claim
  for model in (LARGER, EQUAL)
  for claim in (
    Claim(f"P6, {model}", half_from(model, "P3O"), "P3O", "not less"),
    Claim(f"P6, {model}, GRPO degrades", "GRPO", half_from(model, "GRPO"), "more"),
    Claim(f"P6, {model}, against GRPO", half_from(model, "P3O"), half_from(model, "GRPO"), "more"),
  )
)


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1."""
  with curves.save_figure(home / "curves.png", size=(8, 4.5), dpi=90) as axes:
    plot_panel(axes, Panel("", METRIC, list(RUNS)), results)


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  arms = arm_table(results, [*OTHERS, *RUNS], MEASURED, LATE)
  return "\n\n".join([claim_table(CLAIMS, results, LATE), arms])


if __name__ == "__main__":
  write_page(HOME, [*OTHERS, *RUNS], MEASURED, tables, draw)
