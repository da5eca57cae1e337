"""Writes the tables and the figure of README.md: python -m experiments.mixtures.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

from experiments.mixtures.sweep import LAGS, METHODS, ROUTINGS, RUNS, label
from experiments.testbed.claims import Claim, arm_table, claim_table, write_page
from experiments.testbed.report import Result, late_mean, plot_runs, runs_of
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import METRIC

HOME = pathlib.Path(__file__).parent
LATE = late_mean(last=2)
MEASURED = {  # heading → (metric, what of its values over the updates)
  "choices changed": ("routing/changed", statistics.mean),
  "tokens with a change": ("routing/changed_tokens", statistics.mean),
  "ESS": ("behavior/ess", statistics.mean),
  "KL(β‖π)": ("behavior/kl_k3", statistics.mean),
  "largest ratio": ("behavior/ratio_max", max),
  "sampler against trainer": ("agreement/quantized_mean", statistics.mean),
  "entropy at the end": ("policy/entropy", lambda values: values[-1]),
}
SHOWN = ("choices changed", "ESS", "KL(β‖π)", "entropy at the end")
CLAIMS = (
  Claim("R1", "GRPO, lag 8, replayed", "GRPO, lag 8, recomputed", "more"),
  Claim("R2", "GRPO, lag 0, replayed", "GRPO, lag 0, recomputed", "more"),
  Claim("G1", "GSPO, lag 8, recomputed", "GRPO, lag 8, recomputed", "more"),
  Claim("G2", "GSPO, lag 8, replayed", "GSPO, lag 8, recomputed", "equal"),
  Claim("P1", "P3O, lag 8, recomputed", "GRPO, lag 8, recomputed", "more"),
  Claim("P2", "P3O, lag 8, replayed", "P3O, lag 8, recomputed", "equal"),
)


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1, with a panel for each lag and routing."""
  panels = [(lag, routing) for lag in LAGS for routing in ROUTINGS]
  with curves.save_figure(home / "curves.png", 1, len(panels), size=(16, 3.8), dpi=90) as row:
    for axes, (lag, routing) in zip(row.flat, panels, strict=True):
      runs = runs_of(results, [label(method, lag, routing) for method in METHODS])
      plot_runs(axes, dict(zip(METHODS, runs.values(), strict=True)), METRIC)
      axes.sharey(row.flat[0])
      axes.set_title(f"lag {lag}, routes {routing}")


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  arms = arm_table(results, list(RUNS), SHOWN, LATE)
  return "\n\n".join([claim_table(CLAIMS, results, LATE), arms])


if __name__ == "__main__":
  write_page(HOME, list(RUNS), MEASURED, tables, draw)
