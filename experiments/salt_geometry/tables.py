"""Prints the tables of README.md, of results.json or of the workdir of a sweep.

  python -m experiments.salt_geometry.tables --workdir=runs/experiment_salt

Run it from the repository root. With a workdir it writes results.json and the plots anew.
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
from rlvr_jax.evaluate.compare import markdown, rise
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


def measured(workdir: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
  """`curves`: metric → (update, value) pairs of a finished run, of the metrics of both tables."""
  train = [record for record in read_metrics(workdir) if record["phase"] == "train"]
  names = [*COLUMNS.values(), *AGREEMENT.values()]
  pairs = {name: [(r["step"], round(r[name], 5)) for r in train if name in r] for name in names}
  pairs["longest_tenth"] = [
    (int(path.stem) + 1, longest_tenth(path))
    for path in sorted(pathlib.Path(workdir).glob("geometry/*.npz"))
  ]
  return {"curves": {name: found for name, found in pairs.items() if found}}


def longest_tenth(path: pathlib.Path) -> float:
  """Share of Σ‖g_i‖² that is in the tenth of the rollouts with the longest gradients."""
  with np.load(path) as file:
    squares = np.sort(np.diagonal(file["gram"]))[::-1]
  return round(float(squares[: len(squares) // 10].sum() / squares.sum()), 5)


def average(result: Result, metric: str) -> float | None:
  """Mean over the run's updates; None where the run does not report it."""
  found = result["curves"].get(metric)
  return statistics.mean(value for _, value in found) if found else None


def of_label(results: Sequence[Result], label: str) -> list[Result]:
  return [r for r in results if r["label"] == label]


def learning_table(results: Sequence[Result]) -> str:
  """Markdown: one row per run, means over seeds."""
  rows = {}
  for label in runs():
    found = of_label(results, label)
    rows[label] = [cell([rise(r) for r in found])]
    rows[label] += [cell([average(r, metric) for r in found]) for metric in COLUMNS.values()]
  return markdown(["rise of pass@1", *COLUMNS], rows)


def agreement_table(results: Sequence[Result]) -> str:
  """Markdown: the head's Gram against the last block's."""
  labels = [f"{name}, G = {COMPARED}" for name in ("GRPO", "SALT")]
  averages = lambda label, metric: [average(r, metric) for r in of_label(results, label)]
  rows = {x: [cell(averages(x, metric)) for metric in AGREEMENT.values()] for x in labels}
  return markdown(list(AGREEMENT), rows)


def draw_training(results: Sequence[Result], path: pathlib.Path) -> None:
  """Saves PR, n_eff and entropy over updates, one line per seed."""
  metrics = {
    "participation ratio": "geometry/participation_ratio",
    "n_eff of the coefficients in the loss": "geometry/effective_rollouts_reweighted",
    "entropy, nats per token": "policy/entropy",
  }
  labels = [f"{name}, G = {MIDDLE}" for name in ("GRPO", "SALT", "GRPO + entropy bonus")]
  with curves.figure_of(path, 1, len(metrics), size=(11, 3.3), dpi=90) as row:
    for axes, (title, metric) in zip(row, metrics.items(), strict=True):
      for color, label in enumerate(labels):
        for index, result in enumerate(of_label(results, label)):
          updates, values = zip(*result["curves"][metric], strict=True)
          name = label if index == 0 else None
          axes.plot(updates, values, color=f"C{color}", alpha=0.8, label=name)
      axes.set(xlabel="update", title=title)
    row[0].legend(fontsize="small")


def draw_scaling(results: Sequence[Result], path: pathlib.Path) -> None:
  """Saves effects of the group size at the same number of rollouts, means with 95 % intervals."""
  panels = {
    "rise of held-out pass@1": rise,
    "participation ratio": lambda r: average(r, "geometry/participation_ratio"),
    "n_eff in the loss": lambda r: average(r, "geometry/effective_rollouts_reweighted"),
    "α of SALT": lambda r: average(r, "reweighting/alpha"),
    "residual energy": lambda r: average(r, "geometry/residual_energy"),
  }
  with curves.figure_of(path, 1, len(panels), size=(16, 3.3), dpi=80) as row:
    for axes, (title, value) in zip(row, panels.items(), strict=True):
      for color, name in (("C0", "GRPO"), ("C1", "SALT")):
        found = [of_label(results, f"{name}, G = {group_size}") for group_size in GROUP_SIZES]
        if any(value(result) is None for of_size in found for result in of_size):
          continue
        points = [mean_and_half_width([value(result) for result in of_size]) for of_size in found]
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
  """Both tables as Markdown."""
  return f"{learning_table(results)}\n\n{agreement_table(results)}"


if __name__ == "__main__":
  report.show(pathlib.Path(__file__).parent, tables, measured, draw)
