"""SALT's claims in kind, at small scale: gradient geometry with and without it, over group sizes.

  python -m experiments.salt_geometry.run --seeds=3

Run it from the repository root; half a minute a run on two quiet CPU cores, 45 runs. Prints the
tables of README.md, and writes results.json and the plots beside this file. Finished runs are not
repeated.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import numpy as np
from absl import app, flags
from matplotlib import pyplot as plt

from experiments.runs import mean_and_half_width, run_all, write_results
from rlvr_jax.evaluate.run_files import read_metrics

_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds 0, 1, ... of each run.", lower_bound=2)
_UPDATES = flags.DEFINE_integer("updates", 100, "Updates of each run.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", "runs/experiment_salt", "Holds the runs' workdirs.")

HERE = pathlib.Path(__file__).parent
BUDGET = 256  # rollouts per update, whatever the group size
GROUP_SIZES = (4, 8, 16, 32, 64)
ALPHAS = (0.0, 0.5, 1.0)
ENTROPY_BONUS = 0.01
MIDDLE = 16  # group size of the ablations
COMPARED = 8  # group size of the runs whose Gram is compared with the last block's

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


def arguments(recipe: str, group_size: int, *more: str) -> list[str]:
  """The command line of one run; four updates per refresh, so that clipping can happen."""
  return [
    f"--config=configs/{recipe}.py",
    f"--config.num_updates={_UPDATES.value}",
    f"--config.batch.group_size={group_size}",
    f"--config.batch.prompts={BUDGET // group_size}",
    "--config.schedule=updates_per_refresh(batches=4)",
    "--config.diagnostics.every=10",
    *more,
  ]


def all_runs() -> dict[str, list[str]]:
  """label → command line."""
  runs = {}
  for group_size in GROUP_SIZES:
    compared = ["--config.diagnostics.compared=last_block"] if group_size == COMPARED else []
    for name, recipe in (("GRPO", "grpo"), ("SALT", "salt_grpo")):
      runs[f"{name}, G = {group_size}"] = arguments(recipe, group_size, *compared)
  for alpha in ALPHAS:
    fixed = f"--config.reweighting=salt(alpha_min={alpha}, alpha_max={alpha})"
    runs[f"SALT, α = {alpha}, G = {MIDDLE}"] = arguments("salt_grpo", MIDDLE, fixed)
  bonus = f"--config.entropy_bonus={ENTROPY_BONUS}"
  runs[f"GRPO + entropy bonus, G = {MIDDLE}"] = arguments("grpo", MIDDLE, bonus)
  random = "--config.reweighting=salt(random_subspace=True)"
  runs[f"SALT, random subspace, G = {MIDDLE}"] = arguments("salt_grpo", MIDDLE, random)
  return runs


def curves(workdir: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
  """Metric → (update, value) pairs of a finished run, of the metrics of both tables."""
  train = [record for record in read_metrics(workdir) if record["phase"] == "train"]
  names = [*COLUMNS.values(), *AGREEMENT.values()]
  pairs = {name: [(r["step"], round(r[name], 5)) for r in train if name in r] for name in names}
  pairs["longest_tenth"] = [
    (int(path.stem) + 1, longest_tenth(path)) for path in sorted(workdir.glob("geometry/*.npz"))
  ]
  return {name: found for name, found in pairs.items() if found}


def longest_tenth(path: pathlib.Path) -> float:
  """Share of Σ‖g_i‖² that is in the tenth of the rollouts with the longest gradients."""
  with np.load(path) as file:
    squares = np.sort(np.diagonal(file["gram"]))[::-1]
  return round(float(squares[: len(squares) // 10].sum() / squares.sum()), 5)


def average(result: dict, metric: str) -> float | None:
  """Mean over the run's updates; None where the run does not report it."""
  found = result["curves"].get(metric)
  return statistics.mean(value for _, value in found) if found else None


def cell(values: Sequence[float | None]) -> str:
  """Mean over seeds with half of its 95 % interval."""
  numbers = [value for value in values if value is not None]
  if not numbers:
    return "–"
  mean, half = mean_and_half_width(numbers)
  return f"{mean:.3g} ± {half:.1g}"


def of_label(results: Sequence[dict], label: str) -> list[dict]:
  return [r for r in results if r["label"] == label]


def rise(result: dict) -> float:
  return result["pass@1"][-1] - result["pass@1"][0]


def table(results: Sequence[dict]) -> str:
  """Markdown: one row per run, means over seeds."""
  lines = [f"| run | rise of pass@1 | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
  for label in all_runs():
    found = of_label(results, label)
    cells = [cell([average(r, metric) for r in found]) for metric in COLUMNS.values()]
    lines.append(f"| {label} | {cell([rise(r) for r in found])} | {' | '.join(cells)} |")
  return "\n".join(lines)


def agreement_table(results: Sequence[dict]) -> str:
  """Markdown: the head's Gram against the last block's."""
  lines = [f"| run | {' | '.join(AGREEMENT)} |", "|---" * (len(AGREEMENT) + 1) + "|"]
  for name in ("GRPO", "SALT"):
    label = f"{name}, G = {COMPARED}"
    found = of_label(results, label)
    cells = [cell([average(r, metric) for r in found]) for metric in AGREEMENT.values()]
    lines.append(f"| {label} | {' | '.join(cells)} |")
  return "\n".join(lines)


def plot_training(results: Sequence[dict], path: pathlib.Path) -> None:
  """PR, n_eff and entropy over updates, one line per seed."""
  metrics = {
    "participation ratio": "geometry/participation_ratio",
    "n_eff of the coefficients in the loss": "geometry/effective_rollouts_reweighted",
    "entropy, nats per token": "policy/entropy",
  }
  labels = [f"{name}, G = {MIDDLE}" for name in ("GRPO", "SALT", "GRPO + entropy bonus")]
  figure, row = plt.subplots(1, len(metrics), figsize=(11, 3.3), layout="constrained")
  for axes, (title, metric) in zip(row, metrics.items(), strict=True):
    for color, label in enumerate(labels):
      for index, result in enumerate(of_label(results, label)):
        updates, values = zip(*result["curves"][metric], strict=True)
        name = label if index == 0 else None
        axes.plot(updates, values, color=f"C{color}", alpha=0.8, label=name)
    axes.set(xlabel="update", title=title)
  row[0].legend(fontsize="small")
  figure.savefig(path, dpi=90)
  plt.close(figure)


def plot_scaling(results: Sequence[dict], path: pathlib.Path) -> None:
  """What a larger group gives at the same number of rollouts, means with 95 % intervals."""
  panels = {
    "rise of held-out pass@1": rise,
    "participation ratio": lambda r: average(r, "geometry/participation_ratio"),
    "n_eff in the loss": lambda r: average(r, "geometry/effective_rollouts_reweighted"),
    "α of SALT": lambda r: average(r, "reweighting/alpha"),
    "residual energy": lambda r: average(r, "geometry/residual_energy"),
  }
  figure, row = plt.subplots(1, len(panels), figsize=(16, 3.3), layout="constrained")
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
  figure.savefig(path, dpi=80)
  plt.close(figure)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  root = pathlib.Path(_WORKDIR.value)
  results = run_all(
    all_runs(),
    root,
    num_seeds=_SEEDS.value,
    same_warm_start=True,
    measure=lambda workdir: {"curves": curves(workdir)},
  )
  write_results(HERE / "results.json", results)
  plot_training(results, HERE / "training.png")
  plot_scaling(results, HERE / "scaling.png")
  print(table(results), agreement_table(results), sep="\n\n")


if __name__ == "__main__":
  app.run(main)
