"""Prints the table of README.md, of results.json or of the workdir of a sweep.

  python -m experiments.quickstart.tables --workdir=runs/experiment_quickstart

Run it from the repository root. With a workdir it writes results.json and curves.png anew.
"""

from __future__ import annotations

import pathlib

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt

from experiments.quickstart.sweep import RUNS
from rlvr_jax.evaluate.compare import METRIC, final, interval, of_experiment
from rlvr_jax.evaluate.paired import mean_and_half_width

HERE = pathlib.Path(__file__).parent


def table(results: list[dict]) -> str:
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


def plot(results: list[dict], path: pathlib.Path) -> None:
  """Held-out pass@1 over updates, one line per seed; the warm starts as levels."""
  figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
  for color, label in enumerate(RUNS):
    of_label = [r for r in results if r["label"] == label]
    name, color = label, f"C{color}"
    evaluations = [r["evaluations"] for r in of_label]
    if len(evaluations[0]["updates"]) == 1:  # no updates: where it ended
      end = np.mean([e[METRIC][-1] for e in evaluations])
      axes.axhline(end, color=color, linestyle="--", label=f"{name} (mean)")
      continue
    for found in evaluations:
      axes.plot(found["updates"], found[METRIC], color=color, label=name, alpha=0.8)
      name = None
  axes.set(xlabel="update", ylabel="held-out pass@1", ylim=(0, 1))
  axes.legend(fontsize="small")
  figure.savefig(path, dpi=100)
  plt.close(figure)


def main() -> None:
  results, are_new = of_experiment(HERE / "results.json")
  if are_new:
    plot(results, HERE / "curves.png")
  print(table(results))


if __name__ == "__main__":
  main()
