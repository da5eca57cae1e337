"""Writes the tables and the figure of README.md: python -m experiments.high_entropy.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

from experiments.high_entropy.sweep import (
  ADVANTAGES,
  EQUAL,
  FADE,
  FAILURE_HEAVY,
  PILOT,
  STATIC,
  SUCCESS_HEAVY,
)
from experiments.testbed import report
from experiments.testbed.claims import (
  Claim,
  Quantity,
  arm_table,
  measured,
  quantity_tables,
  write_page,
)
from experiments.testbed.report import Panel, Result, late_mean, peak_update, plot_panel
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import METRIC

HOME = pathlib.Path(__file__).parent
LATE = late_mean()
PASS_AT_16 = "eval/pass@16"
ENTROPY, RANK_ONE = "entropy over the run", "head's rank-1 fraction"
MEASURED = {  # heading → (metric, what of its values over the updates)
  "entropy at the start": ("policy/entropy", lambda values: values[0]),
  ENTROPY: ("policy/entropy", statistics.mean),
  "at the end": ("policy/entropy", lambda values: values[-1]),
  RANK_ONE: ("geometry/head_rank_one_fraction", lambda values: values[-1]),
  "α at the end": ("advantage/fade_alpha", lambda values: values[-1]),
  "δ at the end": ("advantage/fade_delta", lambda values: values[-1]),
}
SHOWN = (ENTROPY, RANK_ONE, "α at the end", "δ at the end")
MORE = {
  "highest pass@1": report.peak_value(),
  "its update": peak_update,
  "pass@16 at the start": lambda result: result["evaluations"][PASS_AT_16][0],
  "late pass@16": late_mean(PASS_AT_16),
  "entropy at the end": measured("at the end"),
}
QUANTITIES = (
  Quantity(
    "Entropy over the run, nats",
    (Claim("F1", EQUAL, SUCCESS_HEAVY, "more"),),
    measured(ENTROPY),
    0.02,
  ),
  Quantity(
    "The head's rank-1 fraction at the end",
    (Claim("F2", FAILURE_HEAVY, EQUAL, "more"),),
    measured(RANK_ONE),
    0.05,
  ),
  Quantity(
    "Update of the highest pass@1",
    tuple(Claim(f"F3, sooner than {label}", label, FADE, "more") for label in STATIC),
    peak_update,
    30,
  ),
  Quantity(
    "Highest pass@1",
    tuple(Claim(f"F3, as high as {label}", FADE, label, "not less") for label in STATIC),
    report.peak_value(),
    0.03,
  ),
  Quantity(
    "Late pass@16",
    tuple(Claim(f"F3, as broad as {label}", FADE, label, "not less") for label in STATIC),
    late_mean(PASS_AT_16),
    0.03,
  ),
)
PANELS = (
  Panel("held-out pass@1", METRIC, list(ADVANTAGES)),
  Panel("held-out pass@16", PASS_AT_16, list(ADVANTAGES)),
)


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1 and pass@16."""
  with curves.save_figure(home / "curves.png", 1, len(PANELS), size=(13, 4.5), dpi=90) as row:
    for axes, panel in zip(row.flat, PANELS, strict=True):
      plot_panel(axes, panel, results)


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  arms = arm_table(results, list(ADVANTAGES), SHOWN, LATE, MORE)
  return "\n\n".join([*quantity_tables(QUANTITIES, results), arms])


if __name__ == "__main__":
  write_page(HOME, [*PILOT, *ADVANTAGES], MEASURED, tables, draw)
