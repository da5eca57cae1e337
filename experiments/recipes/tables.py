"""Prints the table of README.md, of results.json or of the workdir of a sweep.

  python -m experiments.recipes.tables --workdir=runs/experiment_recipes

Run it from the repository root. With a workdir it writes results.json anew.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.recipes.sweep import RECIPES
from experiments.testbed import report
from experiments.testbed.report import Result
from rlvr_jax.evaluate.compare import METRIC, by_label, interval, rise
from rlvr_jax.evaluate.paired import mean_and_half_width, standard_error_of_interval


def standard_error(result: Result, index: int) -> float:
  """Standard error of one evaluation, over problems."""
  limits = (result["evaluations"][f"{METRIC}_{side}"][index] for side in ("low", "high"))
  return standard_error_of_interval(*limits)


def rise_in_standard_errors(result: Result) -> float:
  """Rise from start to end in standard errors, with independent evaluations."""
  error = (standard_error(result, 0) ** 2 + standard_error(result, -1) ** 2) ** 0.5
  return rise(result) / error


def tables(results: Sequence[Result]) -> str:
  """Markdown: one row per recipe, one column per seed, the mean rise with its t interval."""
  seeds = sorted({r["seed"] for r in results})
  first = [r for r in results if r["label"] == RECIPES[0]]
  ends = " | ".join(f"end, seed {seed}" for seed in seeds)
  lines = [
    f"| recipe | {ends} | mean rise | smallest rise, standard errors | seconds |",
    "|---" * (len(seeds) + 4) + "|",
    "| start, all | " + " | ".join(interval(r, 0) for r in first) + " | | | |",
  ]
  for label, of_recipe in by_label(results).items():
    mean, half = mean_and_half_width([rise(r) for r in of_recipe])
    smallest = min(rise_in_standard_errors(r) for r in of_recipe)
    seconds = sum(r["seconds"] for r in of_recipe) / len(of_recipe)
    lines.append(
      f"| {label} | {' | '.join(interval(r, -1) for r in of_recipe)}"
      f" | {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}] | {smallest:.1f} | {seconds:.0f} |"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  report.show(pathlib.Path(__file__).parent, tables)
