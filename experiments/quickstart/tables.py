"""Prints the table of README.md, from results.json or from the workdir of a sweep.

  python -m experiments.quickstart.tables --workdir=runs/experiment_quickstart

Run it from the repository root. With a workdir it rewrites results.json and curves.png.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.quickstart.sweep import RUNS
from experiments.testbed import report
from experiments.testbed.report import Result
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import METRIC, final_value, interval_cell
from rlvr_jax.evaluate.paired import mean_and_half_width


def tables(results: Sequence[Result]) -> str:
  """Returns a Markdown table: a row per run, and per label the mean rise with its t interval."""
  # The longer warm starts have the same first 150 steps as the quickstart of the same seed.
  starts = {r["seed"]: r for r in results if r["label"] == "quickstart"}
  lines = ["| run | seed | start | end | rise | seconds |", "|---|---|---|---|---|---|"]
  for label in RUNS:
    rises = []
    for result in (r for r in results if r["label"] == label):
      start = starts[result["seed"]]
      rises.append(final_value(result) - start["evaluations"][METRIC][0])
      lines.append(
        f"| {label} | {result['seed']} | {interval_cell(start, 0)} | {interval_cell(result, -1)}"
        f" | {rises[-1]:+.3f} | {result['seconds']:.0f} |"
      )
    mean, half = mean_and_half_width(rises)
    lines.append(
      f"| **{label}** | mean | | | **{mean:+.3f}** [{mean - half:+.3f}, {mean + half:+.3f}] | |"
    )
  return "\n".join(lines)


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1 over updates, one line per seed; warm starts as levels."""
  with curves.save_figure(home / "curves.png", size=(6, 3.6), dpi=100) as axes:
    _plot(axes, results)


def _plot(axes: Any, results: Sequence[Result]) -> None:
  for color, label in enumerate(RUNS):
    label_results = [r for r in results if r["label"] == label]
    style = dict(color=f"C{color}")
    evaluations = [r["evaluations"] for r in label_results]
    if len(evaluations[0]["updates"]) == 1:  # no updates: only the end of the warm start
      end = np.mean([e[METRIC][-1] for e in evaluations])
      axes.axhline(end, linestyle="--", label=f"{label} (mean)", **style)
      continue
    for index, columns in enumerate(evaluations):
      name = label if index == 0 else None  # once in the legend
      axes.plot(columns["updates"], columns[METRIC], label=name, alpha=0.8, **style)
  axes.set(xlabel="update", ylabel="held-out pass@1", ylim=(0, 1))
  axes.legend(fontsize="small")


if __name__ == "__main__":
  report.print_tables(pathlib.Path(__file__).parent, tables, draw=draw)
