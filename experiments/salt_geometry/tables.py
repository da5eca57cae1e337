"""Prints the tables of README.md, from results.json or from the workdir of a sweep.

  python -m experiments.salt_geometry.tables --workdir=runs/experiment_salt

Run it from the repository root. With a workdir it rewrites results.json and the plots.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

import numpy as np

from experiments.salt_geometry.sweep import BUDGET, COMPARED, GROUP_SIZES, MIDDLE, runs
from experiments.testbed import report
from experiments.testbed.report import Result, cell
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
  "redundancy within": "geometry/redundancy_within",
  "longest tenth": "longest_tenth",
  "entropy": "policy/entropy",
  "clip fraction": "loss/clip_fraction",
}
AGREEMENT = {
  "correlation": "geometry/agreement_correlation",
  "permutation null, mean": "geometry/agreement_permutation_mean",
  "permutation null, 95 %": "geometry/agreement_permutation_quantile",
  "noise null, mean": "geometry/agreement_noise_mean",
  "noise null, 95 %": "geometry/agreement_noise_quantile",
}


def measure(workdir: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
  """Returns `curves` of a finished run: metric of the tables → (update, value) pairs."""
  train = [record for record in read_metrics(workdir) if record["phase"] == "train"]
  names = [*COLUMNS.values(), *AGREEMENT.values()]
  pairs = {name: [(r["step"], round(r[name], 5)) for r in train if name in r] for name in names}
  pairs["longest_tenth"] = [
    (int(path.stem) + 1, longest_tenth(path))
    for path in sorted(pathlib.Path(workdir).glob("geometry/*.npz"))
  ]
  return {"curves": {name: curve for name, curve in pairs.items() if curve}}


def longest_tenth(path: pathlib.Path) -> float:
  """Share of Σ‖g_i‖² in the tenth of the rollouts with the longest gradients."""
  with np.load(path) as file:
    squares = np.sort(np.diagonal(file["gram"]))[::-1]
  return round(float(squares[: len(squares) // 10].sum() / squares.sum()), 5)


def average(result: Result, metric: str) -> float | None:
  """Mean over the run's updates; None if the run does not report the metric."""
  curve = result["curves"].get(metric)
  return statistics.mean(value for _, value in curve) if curve else None


def runs_with_label(results: Sequence[Result], label: str) -> list[Result]:
  return [r for r in results if r["label"] == label]


def learning_table(results: Sequence[Result]) -> str:
  """Returns a Markdown table with one row per run, of means over seeds."""
  rows = {}
  for label in runs():
    label_runs = runs_with_label(results, label)
    rows[label] = [cell([rise(r) for r in label_runs])]
    rows[label] += [cell([average(r, metric) for r in label_runs]) for metric in COLUMNS.values()]
  return markdown_table(["rise of pass@1", *COLUMNS], rows)


def agreement_table(results: Sequence[Result]) -> str:
  """Returns a Markdown table that compares the head's Gram matrix with the last block's."""
  labels = [f"{name}, G = {COMPARED}" for name in ("GRPO", "SALT")]
  rows = {}
  for label in labels:
    label_runs = runs_with_label(results, label)
    averages = [[average(r, metric) for r in label_runs] for metric in AGREEMENT.values()]
    rows[label] = [cell(values) for values in averages]
  return markdown_table(list(AGREEMENT), rows)


def draw_training(results: Sequence[Result], path: pathlib.Path) -> None:
  """Saves a figure of PR, n_eff and entropy over updates, one line per seed."""
  metrics = {
    "participation ratio": "geometry/participation_ratio",
    "n_eff of the coefficients in the loss": "geometry/effective_rollouts_reweighted",
    "entropy, nats per token": "policy/entropy",
  }
  labels = [f"{name}, G = {MIDDLE}" for name in ("GRPO", "SALT", "GRPO + entropy bonus")]
  with curves.save_figure(path, 1, len(metrics), size=(11, 3.3), dpi=90) as row:
    for axes, (title, metric) in zip(row, metrics.items(), strict=True):
      for color, label in enumerate(labels):
        for index, result in enumerate(runs_with_label(results, label)):
          updates, values = zip(*result["curves"][metric], strict=True)
          name = label if index == 0 else None
          axes.plot(updates, values, color=f"C{color}", alpha=0.8, label=name)
      axes.set(xlabel="update", title=title)
    row[0].legend(fontsize="small")


def draw_scaling(results: Sequence[Result], path: pathlib.Path) -> None:
  """Saves a figure of effects of the group size at equal rollouts: means with 95 % intervals."""
  panels = {
    "rise of held-out pass@1": rise,
    "participation ratio": lambda r: average(r, "geometry/participation_ratio"),
    "n_eff in the loss": lambda r: average(r, "geometry/effective_rollouts_reweighted"),
    "α of SALT": lambda r: average(r, "reweighting/alpha"),
    "residual energy": lambda r: average(r, "geometry/residual_energy"),
  }
  with curves.save_figure(path, 1, len(panels), size=(16, 3.3), dpi=80) as row:
    for axes, (title, value) in zip(row, panels.items(), strict=True):
      for color, name in (("C0", "GRPO"), ("C1", "SALT")):
        runs_by_size = [runs_with_label(results, f"{name}, G = {size}") for size in GROUP_SIZES]
        values_by_size = [[value(result) for result in size_runs] for size_runs in runs_by_size]
        if any(x is None for values in values_by_size for x in values):
          continue
        points = [mean_and_half_width(values) for values in values_by_size]
        means, halves = np.array(points).T
        axes.errorbar(GROUP_SIZES, means, halves, color=color, marker="o", capsize=3, label=name)
      axes.set_xscale("log", base=2)
      axes.set(xlabel=f"group size G, {BUDGET} rollouts in all", title=title)
    row[0].legend()


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves both figures."""
  draw_training(results, home / "training.png")
  draw_scaling(results, home / "scaling.png")


def tables(results: Sequence[Result]) -> str:
  """Returns both tables as Markdown."""
  return f"{learning_table(results)}\n\n{agreement_table(results)}"


if __name__ == "__main__":
  report.print_tables(pathlib.Path(__file__).parent, tables, measure, draw)
