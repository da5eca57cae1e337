"""Writes the table of README.md: python -m experiments.recipes.tables.

With --workdir, of a sweep, it replaces results.json by the sweep's runs first.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.testbed import report
from experiments.testbed.report import Result
from rlvr_jax.evaluate.compare import METRIC, final_value, group_by_label, markdown_table, rise
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
  """Returns a Markdown table with a row per recipe."""
  rows = {}
  for label, runs in group_by_label(results).items():
    interval = "–"
    if len(runs) > 1:
      mean, half = mean_and_half_width([rise(r) for r in runs])
      interval = f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"
    smallest = min(map(rise_in_standard_errors, runs))
    rows[label] = [report.cell([final_value(r) for r in runs]), interval, f"{smallest:.1f}"]
  header = ["pass@1 at the end", "mean rise", "smallest rise, standard errors"]
  return markdown_table(header, rows, "recipe")


if __name__ == "__main__":
  report.write_page(pathlib.Path(__file__).parent, tables)
