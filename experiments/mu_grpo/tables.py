"""Writes the tables and the figure of README.md: python -m experiments.mu_grpo.tables.

With --workdir, of a sweep, it replaces results.json by the sweep's runs first.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.mu_grpo import hand_over
from experiments.mu_grpo.sweep import AT_HIGHER_RATE, GRPO, HIGHER, RELAXED, RUNS, SUFFIX, TIGHT
from experiments.testbed import report
from experiments.testbed.report import Result, cell, final_differences, name_missing, runs_of
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import METRIC, final_value, markdown_table, result_curve, rise
from rlvr_jax.evaluate.run_files import read_metrics

RISE = 0.1  # of held-out pass@1, at which costs are compared
COSTS = {"updates": "updates", "seconds": "seconds"}
BIN = 8  # updates per point of the plot over ages


def measure(workdir: str) -> dict:
  """Measures a finished run for the tables and plots, besides its held-out curve."""
  records = list(read_metrics(workdir))
  train = [r for r in records if r["phase"] == "train"]

  def mean(name: str, of: Sequence[Mapping] = train) -> float:
    return statistics.mean(r[name] for r in of)

  measurements = {
    "ess": mean("behavior/ess"),
    "hand_overs": sum("time/sync_weights_seconds" in r for r in train),
    "phase_seconds": curves.phase_seconds(records),
    "elapsed_seconds": records[-1][curves.ELAPSED],
    "cost": {},  # of a rise by `RISE`, on every axis; None if it was not reached
  }
  for over in COSTS:
    spent, accuracy = curves.curve(records, METRIC, over)
    cost = curves.first_crossing(spent, accuracy, accuracy[0] + RISE)
    measurements["cost"][over] = None if np.isnan(cost) else cost
  if "veto/trigger_rate" in train[0]:
    measurements["vetoed"] = mean("veto/token_fraction")
    measurements["trigger_rate_by_age"] = means_by_age(train, "veto/trigger_rate")
  return measurements


def means_by_age(train: Sequence[Mapping], metric: str) -> list[float]:
  """Means of a metric over stages, by the age within a stage, in updates."""
  ages = sorted({r["stage/age"] for r in train})
  return [statistics.mean(r[metric] for r in train if r["stage/age"] == age) for age in ages]


def reached_cell(values: Sequence[float | None]) -> str:
  """Text of the mean over the seeds that reached the level, and their number if not all did."""
  numbers = [value for value in values if value is not None]
  if values and not numbers:
    return "never"
  if len(numbers) < len(values):
    return f"{statistics.mean(numbers):.3g} ({len(numbers)} of {len(values)} seeds)"
  return cell(numbers)


def learning_table(results: Mapping[str, Sequence[Result]]) -> str:
  """Returns a table of accuracy, and of what the veto drops in the first and last quarter."""
  columns: dict[str, Callable[[Result], float]] = {
    "final pass@1": final_value,
    "best less final": report.fall_from_peak,
    "ESS": lambda r: r["ess"],
  }
  rows = {}
  for label, label_runs in results.items():
    rows[label] = [cell([column(r) for r in label_runs]) for column in columns.values()]
    rows[label] += [" ".join(f"{rise(r):+.2f}" for r in label_runs) or "–"]
    relaxed = results[RELAXED + HIGHER if label.endswith(HIGHER) else RELAXED]
    rows[label] += [cell(final_differences(label_runs, relaxed))]
    rows[label] += veto_cells(label_runs)
  header = [*columns, "rise, each seed", "final less relaxed's, paired", "vetoed tokens"]
  return markdown_table([*header, "trigger rate, first quarter", "last quarter"], rows)


def veto_cells(runs: Sequence[Result]) -> list[str]:
  """Share of vetoed tokens, and the rate of triggers in the first and last quarter of a stage."""
  if not runs or "vetoed" not in runs[0]:
    return 3 * ["–"]
  first, *_, last = np.split(np.array([r["trigger_rate_by_age"] for r in runs]), 4, axis=1)
  of_quarters = [cell(quarter.mean(axis=1)) for quarter in (first, last)]
  return [cell([r["vetoed"] for r in runs]), *of_quarters]


def cost_table(results: Mapping[str, Sequence[Result]]) -> str:
  """Returns a table of the costs of a run, in total and until it reached the level."""
  header = [f"{name} to a rise of {RISE:g}" for name in COSTS.values()]
  header += ["weight syncs", "their seconds", "in all, seconds"]
  rows = {}
  for label in (GRPO, TIGHT, RELAXED, SUFFIX):
    runs = results[label]
    rows[label] = [reached_cell([r["cost"][over] for r in runs]) for over in COSTS]
    rows[label] += [cell([r["hand_overs"] for r in runs])]
    rows[label] += [cell([r["phase_seconds"].get("sync_weights", 0.0) for r in runs])]
    rows[label] += [cell([r["elapsed_seconds"] for r in runs])]
  return markdown_table(header, rows)


def plot_rises(axes: Any, runs: Mapping[str, Sequence[Result]], over: str) -> None:
  """Plots the rise of held-out pass@1 by label: mean over seeds with interval, or a single seed.

  Rises are plotted because starts differ more between seeds than runs of one seed do.
  """
  for label, label_runs in runs.items():
    with_axis = [result for result in label_runs if over in result["evaluations"]]
    seed_curves = [result_curve(result, over=over) for result in with_axis]
    rises = [(x, y - y[0]) for x, y in seed_curves]
    if len(rises) > 1:
      x, mean, low, high = curves.mean_curve(rises, within=(-1, 1))
      (line,) = axes.plot(x, mean, label=label)
      axes.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    elif rises:
      axes.plot(*rises[0], label=label)
    else:
      name_missing(axes, [label])
  axes.set(xlabel=curves.AXES[over][0], ylabel="held-out pass@1 less its start", ylim=(-0.3, 0.4))


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure: rises over updates and seconds, and trigger rates over the age in a stage."""
  runs = runs_of(results, RUNS)
  higher = [f"{label}{HIGHER}" for label in AT_HIGHER_RATE]
  main_labels = (GRPO, TIGHT, RELAXED, SUFFIX)
  with curves.save_figure(home / "curves.png", 1, 4, size=(17, 4), dpi=100) as row:
    for axes, labels, over in zip(
      row[:3], (main_labels, main_labels, higher), ("updates", "seconds", "updates"), strict=True
    ):
      plot_rises(axes, {label: runs[label] for label in labels}, over)
    for label, label_runs in runs.items():
      if label.startswith("veto") and label not in higher:
        if not label_runs:
          name_missing(row[3], [label])
          continue
        rates = np.mean([r["trigger_rate_by_age"] for r in label_runs], axis=0)
        smooth = rates.reshape(-1, BIN).mean(axis=1)
        row[3].plot(np.arange(len(smooth)) * BIN + BIN / 2, smooth, label=label)
    row[3].set(xlabel="age within a stage, updates", ylabel="veto/trigger_rate")
    for axes in row:
      axes.grid(alpha=0.3)
      axes.legend(fontsize="small")


def tables(results: Sequence[Result]) -> str:
  """Returns all tables as Markdown."""
  runs = runs_of(results, RUNS)
  title = f"Seconds of GRPO over those of stages with the suffix veto, to a rise of {RISE:g}:"
  prices = hand_over.table(lambda prices: hand_over.recorded_curves(results, prices))
  return "\n\n".join([learning_table(runs), cost_table(runs), title, prices])


if __name__ == "__main__":
  report.write_page(pathlib.Path(__file__).parent, tables, measure, draw)
