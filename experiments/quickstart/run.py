"""Measures the quickstart, its control and a longer warm start, over seeds, one run at a time.

  python -m experiments.quickstart.run --seeds=3

Run it from the repository root. Prints the table of README.md, and writes results.json and
curves.png beside this file. Finished runs are not repeated.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import matplotlib

matplotlib.use("Agg")
import numpy as np
from absl import app, flags
from matplotlib import pyplot as plt

from rlvr_jax.train.metrics import read_metrics

_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds 0, 1, ... of each run.", lower_bound=2)
_WORKDIR = flags.DEFINE_string("workdir", "runs/experiment_quickstart", "Holds the runs' workdirs.")

HERE = pathlib.Path(__file__).parent
METRIC = "eval/pass@1"
RUNS = {  # label → command line
  "quickstart": ["--config=configs/quickstart.py"],
  "control: rewards permuted": ["--config=configs/quickstart_control.py"],
  "longer warm start, same time": ["--config=configs/quickstart_longer_warm_start.py"],
  "longer warm start, best length": [  # chosen by held-out pass@1, in its favour
    "--config=configs/quickstart_longer_warm_start.py",
    "--config.warm_start.num_steps=350",
  ],
}
# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}


def run(label: str, seed: int, workdir: pathlib.Path) -> dict:
  """One run as a process of its own; its curve, and the seconds that it took in all."""
  result_file = workdir / "result.json"
  if result_file.exists():
    return json.loads(result_file.read_text())
  command = [sys.executable, "-m", "rlvr_jax.main", *RUNS[label], f"--config.seed={seed}"]
  print(f"{label}, seed {seed}", file=sys.stderr, flush=True)
  began = time.perf_counter()
  subprocess.run(
    [*command, f"--workdir={workdir}"],
    check=True,
    stdout=subprocess.DEVNULL,
    env={"JAX_PLATFORMS": "cpu", **os.environ},
  )
  seconds = time.perf_counter() - began
  evaluations = [record for record in read_metrics(workdir) if record["phase"] == "eval"]
  fields = {"updates": "step", "pass@1": METRIC, "low": f"{METRIC}_low", "high": f"{METRIC}_high"}
  result = {name: [record[field] for record in evaluations] for name, field in fields.items()}
  result |= {"label": label, "seed": seed, "seconds": round(seconds, 1)}
  result_file.write_text(json.dumps(result))
  return result


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
    half = T_QUANTILES[len(rises) - 1] * statistics.stdev(rises) / len(rises) ** 0.5
    mean = statistics.mean(rises)
    lines.append(
      f"| **{label}** | mean | | | **{mean:+.3f}** [{mean - half:+.3f}, {mean + half:+.3f}] | |"
    )
  return "\n".join(lines)


def interval(result: dict, index: int) -> str:
  return f"{result['pass@1'][index]:.3f} [{result['low'][index]:.3f}, {result['high'][index]:.3f}]"


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
  if _SEEDS.value - 1 not in T_QUANTILES:
    raise app.UsageError(f"--seeds={_SEEDS.value}: at most {max(T_QUANTILES) + 1}")
  root = pathlib.Path(_WORKDIR.value)
  results = []
  for label in RUNS:
    folder = label.replace(":", "").replace(",", "").replace(" ", "_")
    for seed in range(_SEEDS.value):
      results.append(run(label, seed, root / f"{folder}_{seed}"))
  (HERE / "results.json").write_text("\n".join(["[", ",\n".join(map(json.dumps, results)), "]\n"]))
  plot(results, HERE / "curves.png")
  print(table(results))


if __name__ == "__main__":
  app.run(main)
