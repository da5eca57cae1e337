"""Writes the tables and the figure of README.md: python -m experiments.p3o_mismatch.tables.

With --workdir, of a sweep, it replaces results.json by the sweep's runs first.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence

from experiments.p3o_mismatch.sweep import CAP_ONLY, METHODS, OTHER, SETTINGS
from experiments.testbed import report
from experiments.testbed.report import Result
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import (
  METRIC,
  final_value,
  group_by_label,
  markdown_table,
  mean_cell,
  result_curve,
)
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
    finals = {label: [final_value(r) for r in results[f"{setting}: {label}"]] for label in METHODS}
    best = max(
      (label for label in METHODS if label != "P3O"),
      key=lambda label, finals=finals: statistics.mean(finals[label]),
    )
    pairs = zip(finals["P3O"], finals[best], strict=True)
    rows[setting] = [mean_cell(values) for values in finals.values()]
    rows[setting] += [mean_cell([p3o - clip for p3o, clip in pairs]), best.split()[-1]]
  return markdown_table([*METHODS, "P3O less the best", "the best's ε"], rows, "setting")


def cost_table(results: Mapping[str, Sequence[Result]]) -> str:
  """Returns a table of final held-out pass@1 minus that of the matched run of the same seed."""

  def finals(setting: str, label: str) -> list[float]:
    return [final_value(r) for r in results[f"{setting}: {label}"]]

  rows = {}
  for setting in list(SETTINGS)[1:]:
    pairs = {
      label: zip(finals(setting, label), finals("matched", label), strict=True) for label in METHODS
    }
    rows[setting] = [
      mean_cell([final - matched for final, matched in pairs[label]]) for label in METHODS
    ]
  return markdown_table(list(METHODS), rows, "setting")


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1 over updates, with a panel per setting."""
  runs = group_by_label(results)
  columns = len(SETTINGS) // 2
  with curves.save_figure(home / "curves.png", 2, columns, size=(14, 7.5), dpi=90) as grid:
    for axes, setting in zip(grid.flat, SETTINGS, strict=True):
      method_curves = {
        label: [result_curve(result) for result in runs[f"{setting}: {label}"]] for label in METHODS
      }
      curves.plot_curves(axes, method_curves, METRIC, "updates")
      axes.sharey(grid.flat[0])
      axes.set_title(setting)


def end_table(results: Mapping[str, Sequence[Result]]) -> str:
  """Returns a table of effective sample sizes, and of the entropy at the last update."""
  shown = [f"{setting}: {label}" for setting in SETTINGS for label in ("GRPO, ε = 0.2", "P3O")]
  rows = {
    label: [mean_cell([r[name] for r in results[label]]) for name in ("ess", "entropy")]
    for label in (*shown, CAP_ONLY)
  }
  return markdown_table(["ESS", "entropy at the end"], rows)


def tables(results: Sequence[Result]) -> str:
  """Returns all tables as Markdown."""
  runs = group_by_label(result for result in results if result["label"] != OTHER)
  without = mean_cell([final_value(r) for r in runs[CAP_ONLY]])
  return "\n\n".join(
    [
      learning_table(runs),
      f"{CAP_ONLY}: {without}. The same less the matched run of the same method and seed:",
      cost_table(runs),
      end_table(runs),
    ]
  )


if __name__ == "__main__":
  report.write_page(pathlib.Path(__file__).parent, tables, measure, draw)
