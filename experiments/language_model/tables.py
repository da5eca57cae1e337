"""Writes the tables and the figure of README.md: python -m experiments.language_model.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.language_model.sweep import (
  METHODS,
  NO_PULL,
  PILOT,
  PRECISION,
  SAMPLERS,
  SEEDS,
  WHY,
  WHY_SEEDS,
  label,
)
from experiments.testbed.claims import (
  MISMATCH,
  Claim,
  Quantity,
  arm_table,
  quantity_tables,
  write_page,
)
from experiments.testbed.report import Panel, Result, draw_panels, late_mean
from rlvr_jax.evaluate.compare import METRIC

HOME = pathlib.Path(__file__).parent
MARGIN = 0.05  # of pass@1
LATE = late_mean(last=2)  # after updates 40 and 60
GRPO, P3O = METHODS
OWN, FP8 = SAMPLERS
MEASURED = {  # heading → (metric, what of its values over the updates)
  **MISMATCH,
  "entropy at the end": ("policy/entropy", lambda values: values[-1]),
}
PRIMARY = (
  Claim("P3, P3O keeps its gain", label(P3O, FP8), label(P3O, OWN), "not less"),
  Claim("P3, GRPO loses", label(GRPO, OWN), label(GRPO, FP8), "more"),
)
OTHERS = tuple(
  Claim(f"P3O against GRPO, {sampler}", label(P3O, sampler), label(GRPO, sampler), "more")
  for sampler in SAMPLERS
) + (Claim("P3O's KL term", NO_PULL, label(P3O, FP8), "more"),)
QUANTITIES = (
  Quantity("Primary comparisons, late pass@1", PRIMARY, LATE, MARGIN, len(SEEDS)),
  Quantity("Other comparisons, late pass@1", OTHERS, LATE, MARGIN, len(WHY_SEEDS)),
)
PANELS = tuple(
  Panel(method, METRIC, [label(method, sampler) for sampler in SAMPLERS]) for method in METHODS
)


def draw(results: Sequence[Result]) -> None:
  """Saves a figure of held-out pass@1, with a panel for each method."""
  draw_panels(results, PANELS, HOME / "curves.png")


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  compared = arm_table(results, [*PRECISION, *WHY], MEASURED, LATE)
  return "\n\n".join([*quantity_tables(QUANTITIES, results), compared])


if __name__ == "__main__":
  write_page(HOME, [*PILOT, *PRECISION, *WHY], MEASURED, tables, draw)
