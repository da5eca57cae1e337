"""Prints the table of README.md, of results.json or of the workdir of a sweep.

  python -m experiments.quickstart.tables --workdir=runs/experiment_quickstart

Run it from the repository root. With a workdir it writes results.json and curves.png anew.
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
from rlvr_jax.evaluate.compare import METRIC, final, interval
from rlvr_jax.evaluate.paired import mean_and_half_width


def tables(results: Sequence[Result]) -> str:
  """Markdown: a row per run, and per label the rise's mean over seeds with its t interval."""
  # The longer warm starts begin as the quickstart of the same seed does: its first 150 steps.
  starts = {r["seed"]: r for r in results if r["label"] == "quickstart"}
  lines = ["| run | seed | start | end | rise | seconds |", "|---|---|---|---|---|---|"]
  for label in RUNS:
    rises = []
    for result in (r for r in results if r["label"] == label):
      start = starts[result["seed"]]
      rises.append(final(result) - start["evaluations"][METRIC][0])
      lines.append(
        f"| {label} | {result['seed']} | {interval(start, 0)} | {interval(result, -1)}"
        f" | {rises[-1]:+.3f} | {result['seconds']:.0f} |"
      )
    mean, half = mean_and_half_width(rises)
    lines.append(
      f"| **{label}** | mean | | | **{mean:+.3f}** [{mean - half:+.3f}, {mean + half:+.3f}] | |"
    )
  return "\n".join(lines)


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves held-out pass@1 over updates, one line per seed; the warm starts as levels."""
  with curves.figure_of(home / "curves.png", size=(6, 3.6), dpi=100) as axes:
    _plot(axes, results)


def _plot(axes: Any, results: Sequence[Result]) -> None:
  for color, label in enumerate(RUNS):
    of_label = [r for r in results if r["label"] == label]
    style = dict(color=f"C{color}")
    evaluations = [r["evaluations"] for r in of_label]
    if len(evaluations[0]["updates"]) == 1:  # no updates: where it ended
      end = np.mean([e[METRIC][-1] for e in evaluations])
      axes.axhline(end, linestyle="--", label=f"{label} (mean)", **style)
      continue
    for index, found in enumerate(evaluations):
      name = label if index == 0 else None  # once in the legend
      axes.plot(found["updates"], found[METRIC], label=name, alpha=0.8, **style)
  axes.set(xlabel="update", ylabel="held-out pass@1", ylim=(0, 1))
  axes.legend(fontsize="small")


if __name__ == "__main__":
  report.show(pathlib.Path(__file__).parent, tables, draw=draw)
