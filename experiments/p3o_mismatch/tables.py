"""Prints the tables of README.md, from results.json or from the workdir of a sweep.

  python -m experiments.p3o_mismatch.tables --workdir=runs/experiment_p3o

Run it from the repository root. With a workdir it rewrites results.json and the plot.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

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
  names = dict(ess="behavior/ess", clip="loss/clip_fraction", kl="behavior/kl_k3")
  means = {name: statistics.mean(r[metric] for r in train) for name, metric in names.items()}
  return means | {
    "entropy": train[-1]["policy/entropy"],
    "largest_ratio": max(r["behavior/ratio_max"] for r in train),
    "skipped": train[-1]["update/skipped"],
  }


def setting_table(
  results: Mapping[str, Sequence[Result]], run_value: Callable[[Result], float]
) -> str:
  """Returns a Markdown table with a row per setting and a column per method."""

  def values(setting: str, label: str) -> list[float]:
    return [run_value(r) for r in results[f"{setting}: {label}"]]

  rows = {setting: [mean_cell(values(setting, label)) for label in METHODS] for setting in SETTINGS}
  return markdown_table(list(METHODS), rows, "setting")


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


def tables(results: Sequence[Result]) -> str:
  """Returns all tables as Markdown, and the means of the ablation."""
  runs = group_by_label(result for result in results if result["label"] != OTHER)
  metrics = ("ess", "clip", "entropy")
  sections = [learning_table(runs), cost_table(runs)]
  for name in metrics:
    sections.append(f"{name}:\n\n{setting_table(runs, lambda r, name=name: r[name])}")
  cap_only_runs = runs[CAP_ONLY]
  means = {name: mean_cell([r[name] for r in cap_only_runs]) for name in metrics}
  final = mean_cell([final_value(r) for r in cap_only_runs])
  sections.append(f"{CAP_ONLY}: final {final}, {means}")
  return "\n\n".join(sections)


if __name__ == "__main__":
  report.print_tables(pathlib.Path(__file__).parent, tables, measure, draw)
