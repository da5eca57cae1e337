"""Prints the table of README.md, from results.json or from the workdir of a sweep.

  python -m experiments.recipes.tables --workdir=runs/experiment_recipes

Run it from the repository root. With a workdir it rewrites results.json.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.recipes.sweep import RECIPES
from experiments.testbed import report
from experiments.testbed.report import Result
from rlvr_jax.evaluate.compare import METRIC, group_by_label, interval_cell, rise
from rlvr_jax.evaluate.paired import mean_and_half_width, standard_error_of_interval


def standard_error(result: Result, index: int) -> float:
  """Standard error over problems of one evaluation, from its interval."""
  limits = (result["evaluations"][f"{METRIC}_{side}"][index] for side in ("low", "high"))
  return standard_error_of_interval(*limits)


def rise_in_standard_errors(result: Result) -> float:
  """Rise from start to end in standard errors, as if evaluations were independent."""
  error = (standard_error(result, 0) ** 2 + standard_error(result, -1) ** 2) ** 0.5
  return rise(result) / error


def tables(results: Sequence[Result]) -> str:
  """Returns a Markdown table: a row per recipe, a column per seed, mean rises with t intervals."""
  seeds = sorted({r["seed"] for r in results})
  first = [r for r in results if r["label"] == RECIPES[0]]
  ends = " | ".join(f"end, seed {seed}" for seed in seeds)
  lines = [
    f"| recipe | {ends} | mean rise | smallest rise, standard errors | seconds |",
    "|---" * (len(seeds) + 4) + "|",
    "| start, all | " + " | ".join(interval_cell(r, 0) for r in first) + " | | | |",
  ]
  for label, recipe_runs in group_by_label(results).items():
    mean, half = mean_and_half_width([rise(r) for r in recipe_runs])
    smallest = min(rise_in_standard_errors(r) for r in recipe_runs)
    seconds = sum(r["seconds"] for r in recipe_runs) / len(recipe_runs)
    lines.append(
      f"| {label} | {' | '.join(interval_cell(r, -1) for r in recipe_runs)}"
      f" | {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}] | {smallest:.1f} | {seconds:.0f} |"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  report.print_tables(pathlib.Path(__file__).parent, tables)
