"""Prints the tables of README.md, of results.json or of the workdir of a sweep.

  python -m experiments.mu_grpo.tables --workdir=runs/experiment_mu_grpo

Run it from the repository root. With a workdir it writes results.json and the plot anew.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.mu_grpo.sweep import AT_HIGHER_RATE, GRPO, HIGHER, RELAXED, SUFFIX, TIGHT
from experiments.testbed import report
from experiments.testbed.report import Result
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import METRIC, by_label, cell, curve_of, final, markdown, rise
from rlvr_jax.evaluate.run_files import read_metrics

RISE = 0.1  # of held-out pass@1, to which the costs are compared
COSTS = {"updates": "updates", "seconds": "seconds", "flops": "TFLOPs"}
BIN = 8  # updates of one point of the plot over ages
LAST = 16  # updates over which the entropy at the end is averaged


def measured(workdir: str) -> dict:
  """Measurements of a finished run for the tables and plots, besides its held-out curve."""
  records = list(read_metrics(workdir))
  train = [r for r in records if r["phase"] == "train"]
  mean = lambda name, of=train: statistics.mean(r[name] for r in of)
  optimise = [r["time/optimise_seconds"] for r in train]
  found = {
    "entropy": mean("policy/entropy", train[-LAST:]),
    "ess": mean("behavior/ess"),
    "clip": mean("loss/clip_fraction"),
    "negative_ratio": max(r["behavior/ratio_max_negative"] for r in train),
    "hand_overs": sum("time/sync_weights_seconds" in r for r in train),
    "first_update_seconds": optimise[0] - statistics.median(optimise),
    "phase_seconds": curves.phase_seconds(records),
    "elapsed_seconds": records[-1][curves.ELAPSED],
    "cost": {},  # to rise by `RISE`, on every axis; None where the run has not
  }
  for over in COSTS:
    spent, accuracy = curves.curve(records, METRIC, over)
    cost = curves.reaching(spent, accuracy, accuracy[0] + RISE)
    found["cost"][over] = None if np.isnan(cost) else cost
  if "veto/trigger_rate" in train[0]:
    found["vetoed"] = mean("veto/token_fraction")
    found["trigger_rate_by_age"] = by_age(train, "veto/trigger_rate")
  return found


def by_age(train: Sequence[Mapping], metric: str) -> list[float]:
  """Mean over the stages of a metric, by the number of updates behind one within its stage."""
  ages = sorted({r["stage/age"] for r in train})
  return [statistics.mean(r[metric] for r in train if r["stage/age"] == age) for age in ages]


def reached(values: Sequence[float | None], scale: float) -> str:
  """Mean over the seeds that reached the level, and how many did if not all."""
  numbers = [value / scale for value in values if value is not None]
  if not numbers:
    return "never"
  if len(numbers) < len(values):
    return f"{statistics.mean(numbers):.3g} ({len(numbers)} of {len(values)} seeds)"
  return cell(numbers)


def learning_table(results: Mapping[str, Sequence[Result]]) -> str:
  columns: dict[str, Callable[[Result], float]] = {
    "final pass@1": final,
    "rise": rise,
    "best less final": lambda r: max(r["evaluations"][METRIC]) - final(r),
    "entropy at the end": lambda r: r["entropy"],
    "ESS": lambda r: r["ess"],
    "clip fraction": lambda r: r["clip"],
  }
  rows = {}
  for label, of_label in results.items():
    rows[label] = [cell([column(r) for r in of_label]) for column in columns.values()]
    rows[label] += [" ".join(f"{rise(r):+.2f}" for r in of_label)]
    relaxed = results[RELAXED + HIGHER if label.endswith(HIGHER) else RELAXED]
    pairs = zip(of_label, relaxed, strict=True)
    rows[label] += [cell([final(r) - final(other) for r, other in pairs])]
    rows[label] += [f"{max(r['negative_ratio'] for r in of_label):.2g}"]
  header = [*columns, "rise, each seed", "final less relaxed's, paired", "largest ρ where A < 0"]
  return markdown(header, rows)


def veto_table(results: Mapping[str, Sequence[Result]]) -> str:
  rows, header = {}, ["vetoed tokens"]
  for label, of_label in results.items():
    if "vetoed" not in of_label[0]:
      continue
    rates = np.array([r["trigger_rate_by_age"] for r in of_label])
    quarters = np.split(rates, 4, axis=1)
    width = quarters[0].shape[1]
    header = ["vetoed tokens"]
    header += [f"trigger rate, ages {width * i} to {width * (i + 1) - 1}" for i in range(4)]
    rows[label] = [cell([r["vetoed"] for r in of_label])]
    rows[label] += [cell(quarter.mean(axis=1)) for quarter in quarters]
  return markdown(header, rows)


def cost_table(results: Mapping[str, Sequence[Result]]) -> str:
  """Costs of a run in all, and until it reached the level."""
  header = [f"{name} to a rise of {RISE:g}" for name in COSTS.values()]
  header += ["weight syncs", "their seconds", "first update's extra seconds, each seed"]
  header += ["generating", "updating", "in all, seconds"]
  rows = {}
  for label, of_label in results.items():
    scale = {"flops": 1e12}
    spent = lambda phase, runs=of_label: cell([r["phase_seconds"].get(phase, 0.0) for r in runs])
    rows[label] = [
      reached([r["cost"][over] for r in of_label], scale.get(over, 1)) for over in COSTS
    ]
    rows[label] += [f"{of_label[0]['hand_overs']}", spent("sync_weights")]
    rows[label] += [" ".join(f"{r['first_update_seconds']:.1f}" for r in of_label)]
    rows[label] += [spent("generate"), spent("optimise")]
    rows[label] += [cell([r["elapsed_seconds"] for r in of_label])]
  return markdown(header, rows)


def plot_rises(axes: Any, found: Mapping[str, Sequence[Result]], over: str) -> None:
  """Per label the mean over seeds of held-out pass@1 less its start, with its interval.

  The starts differ by more between seeds than the runs of one seed do.
  """
  for label, of_label in found.items():
    of_seeds = [curve_of(result, over=over) for result in of_label]
    x, mean, low, high = curves.mean_curve([(x, y - y[0]) for x, y in of_seeds], within=(-1, 1))
    (line,) = axes.plot(x, mean, label=label)
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
  axes.set(xlabel=curves.AXES[over][0], ylabel="held-out pass@1 less its start", ylim=(-0.3, 0.4))


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves rises over updates and over seconds, and the trigger rate over the age within a stage."""
  runs = by_label(results)
  higher = [f"{label}{HIGHER}" for label in AT_HIGHER_RATE]
  shown = (GRPO, TIGHT, RELAXED, SUFFIX)
  with curves.figure_of(home / "curves.png", 1, 4, size=(17, 4), dpi=100) as row:
    for axes, labels, over in zip(
      row[:3], (shown, shown, higher), ("updates", "seconds", "updates"), strict=True
    ):
      plot_rises(axes, {label: runs[label] for label in labels}, over)
    for label, of_label in runs.items():
      if "vetoed" in of_label[0] and label not in higher:
        rates = np.mean([r["trigger_rate_by_age"] for r in of_label], axis=0)
        smooth = rates.reshape(-1, BIN).mean(axis=1)
        row[3].plot(np.arange(len(smooth)) * BIN + BIN / 2, smooth, label=label)
    row[3].set(xlabel="age within a stage, updates", ylabel="veto/trigger_rate")
    for axes in row:
      axes.grid(alpha=0.3)
      axes.legend(fontsize="small")


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  found = by_label(results)
  return "\n\n".join([learning_table(found), veto_table(found), cost_table(found)])


if __name__ == "__main__":
  report.show(pathlib.Path(__file__).parent, tables, measured, draw)
