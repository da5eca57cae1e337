"""Writes the tables and the figure of README.md: python -m experiments.language_model.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Sequence

from experiments.language_model.sweep import (
  ADAPTING,
  AVERAGED,
  FADE,
  FADE_SEEDS,
  METHODS,
  NO_PULL,
  PILOT,
  PRECISION,
  RELAXED,
  SAMPLERS,
  SEEDS,
  STAGE_PILOT,
  STAGE_SEEDS,
  STAGED,
  SUFFIX,
  WHY,
  WHY_SEEDS,
  averaged_label,
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
from experiments.testbed.report import Panel, Result, draw_panels, fall_from_peak, late_mean
from rlvr_jax.evaluate import compare
from rlvr_jax.evaluate.compare import METRIC
from rlvr_jax.evaluate.paired import paired_difference

HOME = pathlib.Path(__file__).parent
MARGIN = 0.05  # of pass@1
ENTROPY_MARGIN = 0.05  # nats per token
LATE = late_mean(last=2)  # after updates 40 and 60, of question 3 after 96 and 128
GRPO, P3O = METHODS
OWN, FP8 = SAMPLERS
VETOED, TRIGGERS = "vetoed tokens", "trigger rate"
ONE_OUTCOME = "last 32 updates: without a group of both outcomes"  # so without a gradient
ENTROPY, AT_THE_END = "entropy over the run", "entropy at the end"
FIRST_NORM = "first gradient's norm"
MEASURED = {  # heading → (metric, what of its values over the updates)
  **MISMATCH,
  ENTROPY: ("policy/entropy", statistics.mean),
  AT_THE_END: ("policy/entropy", lambda values: values[-1]),
  FIRST_NORM: ("update/gradient_norm", lambda values: values[0]),
  VETOED: ("veto/token_fraction", statistics.mean),
  TRIGGERS: ("veto/trigger_rate", statistics.mean),
  ONE_OUTCOME: ("groups/effective", lambda values: statistics.mean(x == 0 for x in values[-32:])),
  "α": ("advantage/fade_alpha", statistics.mean),
  "δ": ("advantage/fade_delta", statistics.mean),
}
PRIMARY = (
  Claim("P3, P3O keeps its gain", label(P3O, FP8), label(P3O, OWN), "not less"),
  Claim("P3, GRPO loses", label(GRPO, OWN), label(GRPO, FP8), "more"),
)
OTHERS = (
  *(
    Claim(f"P3O against GRPO, {sampler}", label(P3O, sampler), label(GRPO, sampler), "more")
    for sampler in SAMPLERS
  ),
  Claim("P3O's KL term", NO_PULL, label(P3O, FP8), "more"),
  Claim("without it, P3O keeps its gain", NO_PULL, label(P3O, OWN), "not less"),
  Claim("without it, P3O against GRPO", NO_PULL, label(GRPO, FP8), "more"),
)
VETO_GAINS = Claim("the suffix veto gains", SUFFIX, RELAXED, "more")
ADAPTS = Claim("FADE's adapting weights gain", FADE, AVERAGED, "more")
KEEPS = Claim("FADE keeps entropy", FADE, AVERAGED, "more")
PRECISION_PRIMARY, STAGES_PRIMARY, FADE_PRIMARY = PRIMARY_QUANTITIES = (
  Quantity("Primary comparisons of question 2, late pass@1", PRIMARY, LATE, MARGIN, len(SEEDS)),
  Quantity(
    "Primary comparison of question 3, late pass@1", [VETO_GAINS], LATE, MARGIN, len(STAGE_SEEDS)
  ),
  Quantity(
    "Primary comparison of question 4, late pass@1", [ADAPTS], LATE, MARGIN, len(FADE_SEEDS)
  ),
)
QUANTITIES = (
  PRECISION_PRIMARY,
  Quantity("Its other comparisons, late pass@1", OTHERS, LATE, MARGIN, len(WHY_SEEDS)),
  STAGES_PRIMARY,
  FADE_PRIMARY,
  Quantity(
    "Its entropy over the run, nats",
    [KEEPS],
    lambda result: result["measured"].get(ENTROPY, math.nan),  # seed 0 of question 2 lacks it
    ENTROPY_MARGIN,
    len(FADE_SEEDS),
  ),
)
PANELS = (
  Panel(OWN, METRIC, [label(method, OWN) for method in METHODS]),
  Panel(FP8, METRIC, [label(GRPO, FP8), label(P3O, FP8), NO_PULL]),
  Panel("four stages of 32 updates", METRIC, [*STAGED]),
  Panel("FADE, on-policy", METRIC, [FADE, AVERAGED]),
)
CONTROLS = [averaged_label(seed) for seed in FADE_SEEDS]


def with_one_control(results: Sequence[Result]) -> list[Result]:
  """The results, with one label for FADE's controls, whose weights differ by seed."""
  return [{**r, "label": AVERAGED} if r["label"] in CONTROLS else r for r in results]


def adjusted_p_table(results: Sequence[Result]) -> str:
  """Holm's p-values of the primary comparisons whose seeds have all run."""
  found = {}
  for quantity in PRIMARY_QUANTITIES:
    values = compare.values_by_seed(results, quantity.value)
    for claim in quantity.claims:
      arm, control = (values.get(label, {}) for label in (claim.arm, claim.control))
      if len(arm.keys() & control.keys()) >= quantity.least_seeds:
        found[claim.name] = paired_difference(arm, control)
  rows = {name: [f"{p:.2g}"] for name, p in compare.adjusted_p(found).items()}
  table = compare.markdown_table(["p"], rows, "claim")
  return f"Primary comparisons, Holm's p of a difference of 0:\n\n{table}"


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1."""
  draw_panels(with_one_control(results), PANELS, home / "curves.png")


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  results = with_one_control(results)
  precision = [*PRECISION, *WHY], [FIRST_NORM, *MISMATCH, AT_THE_END]
  staged = [*STAGED], [VETOED, TRIGGERS, ONE_OUTCOME, *MISMATCH, AT_THE_END]
  fade = [FADE, AVERAGED], [ENTROPY, AT_THE_END, "α", "δ"]
  return "\n\n".join(
    [
      *quantity_tables(QUANTITIES, results),
      adjusted_p_table(results),
      arm_table(results, *precision, LATE),
      arm_table(results, *staged, LATE, {"fall from the peak": fall_from_peak}),
      arm_table(results, *fade, LATE),
    ]
  )


if __name__ == "__main__":
  pilots = [*PILOT, *STAGE_PILOT]
  arms = [*PRECISION, *WHY, *STAGED, *ADAPTING, *CONTROLS]
  write_page(HOME, [*pilots, *arms], MEASURED, tables, draw)
