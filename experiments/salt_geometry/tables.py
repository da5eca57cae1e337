"""Writes the tables and the figure of README.md: python -m experiments.salt_geometry.tables.

With --workdir, of a sweep, it replaces results.json by the sweep's runs first.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

import numpy as np

from experiments.salt_geometry.sweep import BUDGET, COMPARED, GROUP_SIZES, runs
from experiments.testbed import report
from experiments.testbed.report import Result, cell, name_missing, runs_of
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import markdown_table, rise
from rlvr_jax.evaluate.paired import mean_and_half_width
from rlvr_jax.evaluate.run_files import read_metrics

COLUMNS = {  # heading → metric, averaged over the updates that report it
  "PR": "geometry/participation_ratio",
  "n_eff of A": "geometry/effective_rollouts",
  "n_eff of A'": "geometry/effective_rollouts_reweighted",
  "α": "reweighting/alpha",
  "shared share of A": "reweighting/shared_share",
  "residual energy": "geometry/residual_energy",
  "clip fraction": "loss/clip_fraction",
}
AGREEMENT = {
  "correlation": "geometry/agreement_correlation",
  "permutation null, 95 %": "geometry/agreement_permutation_quantile",
  "noise null, 95 %": "geometry/agreement_noise_quantile",
}


def measure(workdir: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
  """Returns `curves` of a finished run: metric of the tables → (update, value) pairs."""
  train = [record for record in read_metrics(workdir) if record["phase"] == "train"]
  names = [*COLUMNS.values(), *AGREEMENT.values()]
  pairs = {name: [(r["step"], round(r[name], 5)) for r in train if name in r] for name in names}
  return {"curves": {name: curve for name, curve in pairs.items() if curve}}


def average(result: Result, metric: str) -> float | None:
  """Mean over the run's updates; None if the run does not report the metric."""
  curve = result["curves"].get(metric)
  return statistics.mean(value for _, value in curve) if curve else None


def learning_table(results: Sequence[Result]) -> str:
  """Returns a Markdown table with one row per run, of means over seeds."""
  rows = {}
  for label, label_runs in runs_of(results, runs()).items():
    rows[label] = [cell([rise(r) for r in label_runs])]
    rows[label] += [cell([average(r, metric) for r in label_runs]) for metric in COLUMNS.values()]
  return markdown_table(["rise of pass@1", *COLUMNS], rows)


def agreement_table(results: Sequence[Result]) -> str:
  """Returns a Markdown table that compares the head's Gram matrix with the last block's."""
  labels = [f"{name}, G = {COMPARED}" for name in ("GRPO", "SALT")]
  rows = {}
  for label, label_runs in runs_of(results, labels).items():
    averages = [[average(r, metric) for r in label_runs] for metric in AGREEMENT.values()]
    rows[label] = [cell(values) for values in averages]
  return markdown_table(list(AGREEMENT), rows)


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of effects of the group size at equal rollouts: means with 95 % intervals."""
  panels = {
    "rise of held-out pass@1": rise,
    "participation ratio": lambda r: average(r, "geometry/participation_ratio"),
    "n_eff in the loss": lambda r: average(r, "geometry/effective_rollouts_reweighted"),
    "α of SALT": lambda r: average(r, "reweighting/alpha"),
    "residual energy": lambda r: average(r, "geometry/residual_energy"),
  }
  by_label = runs_of(results, runs())
  with curves.save_figure(home / "scaling.png", 1, len(panels), size=(16, 3.3), dpi=80) as row:
    for axes, (title, value) in zip(row, panels.items(), strict=True):
      for color, name in (("C0", "GRPO"), ("C1", "SALT")):
        points = []  # group size, mean, half of the interval, of the sizes that have run
        for size in GROUP_SIZES:
          found = [value(result) for result in by_label[f"{name}, G = {size}"]]
          if found and None not in found:
            mean_half = mean_and_half_width(found) if len(found) > 1 else (*found, np.nan)
            points.append((size, *mean_half))
        if points:
          axes.errorbar(*np.transpose(points), color=color, marker="o", capsize=3, label=name)
        elif axes is row[0]:  # which has the legend
          name_missing(axes, [name])
      axes.set_xscale("log", base=2)
      axes.set(xlabel=f"group size G, {BUDGET} rollouts in all", title=title)
    row[0].legend()


def tables(results: Sequence[Result]) -> str:
  """Returns both tables as Markdown."""
  return f"{learning_table(results)}\n\n{agreement_table(results)}"


if __name__ == "__main__":
  report.write_page(pathlib.Path(__file__).parent, tables, measure, draw)
