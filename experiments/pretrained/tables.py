"""Prints the table of README.md, from results.json or from the workdir of a sweep.

  python -m experiments.pretrained.tables --workdir=runs/experiment_pretrained

Run it from the repository root. With a workdir it rewrites results.json and curves.png.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.pretrained.sweep import RUNS
from experiments.testbed import report
from experiments.testbed.report import Result


def tables(results: Sequence[Result]) -> str:
  """Returns a Markdown table: a row per run, and per label the mean rise with its t interval."""
  starts = {r["seed"]: r for r in results if r["label"] == "pretrained"}
  return report.rise_table(results, list(RUNS), starts)


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1 over updates."""
  run = [label for label in RUNS if any(r["label"] == label for r in results)]
  report.draw_rises(results, run, home / "curves.png")


if __name__ == "__main__":
  report.print_tables(pathlib.Path(__file__).parent, tables, draw=draw)
