"""Measures the quickstart, its control and a longer warm start, over seeds, one run at a time.

  python -m experiments.quickstart.run --seeds=3

Run it from the repository root. Prints the table of README.md, and writes results.json and
curves.png beside this file. Finished runs are not repeated.
"""

from __future__ import annotations

import pathlib

import matplotlib

matplotlib.use("Agg")
import numpy as np
from absl import app, flags
from matplotlib import pyplot as plt

from experiments.runs import interval, mean_and_half_width, run_all, write_results

_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds 0, 1, ... of each run.", lower_bound=2)
_WORKDIR = flags.DEFINE_string("workdir", "runs/experiment_quickstart", "Holds the runs' workdirs.")

HERE = pathlib.Path(__file__).parent
RUNS = {  # label → command line
  "quickstart": ["--config=configs/quickstart.py"],
  "control: rewards permuted": ["--config=configs/quickstart_control.py"],
  "longer warm start, same time": ["--config=configs/quickstart_longer_warm_start.py"],
  "longer warm start, best length": [  # chosen by held-out pass@1, in its favor
    "--config=configs/quickstart_longer_warm_start.py",
    "--config.warm_start.num_steps=350",
  ],
}


def table(results: list[dict]) -> str:
  """Markdown: a row per run, and per label the rise's mean over seeds with its t interval."""
  # The longer warm starts begin as the quickstart of the same seed does: its first 150 steps.
  starts = {r["seed"]: r for r in results if r["label"] == "quickstart"}
  lines = ["| run | seed | start | end | rise | seconds |", "|---|---|---|---|---|---|"]
  for label in RUNS:
    rises = []
    for result in (r for r in results if r["label"] == label):
      start = starts[result["seed"]]
      rises.append(result["pass@1"][-1] - start["pass@1"][0])
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
    if len(of_label[0]["updates"]) == 1:  # no updates: where it ended
      end = np.mean([r["pass@1"][-1] for r in of_label])
      axes.axhline(end, color=color, linestyle="--", label=f"{name} (mean)")
      continue
    for result in of_label:
      axes.plot(result["updates"], result["pass@1"], color=color, label=name, alpha=0.8)
      name = None
  axes.set(xlabel="update", ylabel="held-out pass@1", ylim=(0, 1))
  axes.legend(fontsize="small")
  figure.savefig(path, dpi=100)
  plt.close(figure)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  results = run_all(RUNS, pathlib.Path(_WORKDIR.value), num_seeds=_SEEDS.value)
  write_results(HERE / "results.json", results)
  plot(results, HERE / "curves.png")
  print(table(results))


if __name__ == "__main__":
  app.run(main)
