"""Writes the tables and the figure of README.md: python -m experiments.p3o_mismatch.tables.

With --workdir, of a sweep, it replaces results.json by the sweep's runs first.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence

from experiments.p3o_mismatch.sweep import CAP_ONLY, METHODS, SETTINGS, runs
from experiments.testbed import report
from experiments.testbed.report import Result, cell, final_differences, plot_runs, runs_of
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import METRIC, final_value, markdown_table
from rlvr_jax.evaluate.run_files import read_metrics


def measure(workdir: str) -> dict:
  """Measures a finished run for the tables, besides its held-out curve."""
  train = [r for r in read_metrics(workdir) if r["phase"] == "train"]
  ess = statistics.mean(r["behavior/ess"] for r in train)
  return {"ess": ess, "entropy": train[-1]["policy/entropy"]}


def learning_table(results: Mapping[str, Sequence[Result]]) -> str:
  """Returns a table of final held-out pass@1, and of P3O's minus the best clip's, by mean."""
  rows = {}
  for setting in SETTINGS:
    runs = {label: results[f"{setting}: {label}"] for label in METHODS}
    finals = {label: [final_value(r) for r in of_label] for label, of_label in runs.items()}
    best = max(
      (label for label in METHODS if label != "P3O" and runs[label]),
      key=lambda label, finals=finals: statistics.mean(finals[label]),
      default="–",
    )
    rows[setting] = [cell(values) for values in finals.values()]
    rows[setting] += [cell(final_differences(runs["P3O"], runs.get(best, []))), best.split()[-1]]
  return markdown_table([*METHODS, "P3O less the best", "the best's ε"], rows, "setting")


def cost_table(results: Mapping[str, Sequence[Result]]) -> str:
  """Returns a table of final held-out pass@1 minus that of the matched run of the same seed."""
  rows = {
    setting: [
      cell(final_differences(results[f"{setting}: {label}"], results[f"matched: {label}"]))
      for label in METHODS
    ]
    for setting in list(SETTINGS)[1:]
  }
  return markdown_table(list(METHODS), rows, "setting")


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1 over updates, with a panel per setting."""
  by_label = runs_of(results, runs())
  columns = len(SETTINGS) // 2
  with curves.save_figure(home / "curves.png", 2, columns, size=(14, 7.5), dpi=90) as grid:
    for axes, setting in zip(grid.flat, SETTINGS, strict=True):
      plot_runs(axes, {label: by_label[f"{setting}: {label}"] for label in METHODS}, METRIC)
      axes.sharey(grid.flat[0])
      axes.set_title(setting)


def end_table(results: Mapping[str, Sequence[Result]]) -> str:
  """Returns a table of effective sample sizes, and of the entropy at the last update."""
  shown = [f"{setting}: {label}" for setting in SETTINGS for label in ("GRPO, ε = 0.2", "P3O")]
  rows = {
    label: [cell([r[name] for r in results[label]]) for name in ("ess", "entropy")]
    for label in (*shown, CAP_ONLY)
  }
  return markdown_table(["ESS", "entropy at the end"], rows)


def tables(results: Sequence[Result]) -> str:
  """Returns all tables as Markdown."""
  by_label = runs_of(results, runs())
  without = cell([final_value(r) for r in by_label[CAP_ONLY]])
  return "\n\n".join(
    [
      learning_table(by_label),
      f"{CAP_ONLY}: {without}. The same less the matched run of the same method and seed:",
      cost_table(by_label),
      end_table(by_label),
    ]
  )


if __name__ == "__main__":
  report.write_page(pathlib.Path(__file__).parent, tables, measure, draw)
