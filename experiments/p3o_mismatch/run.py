"""P3O's claims in kind, at small scale: one run against GRPO's clip sweep on mismatched rollouts.

  python -m experiments.p3o_mismatch.run --seeds=3

Run it from the repository root; 15 to 30 seconds a run on two CPU cores, 76 runs. Prints the
tables of README.md, and writes results.json and the plot beside this file. Finished runs are not
repeated.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
from absl import app, flags
from matplotlib import pyplot as plt

from experiments.runs import (
  METRIC,
  by_label,
  cell,
  markdown,
  run,
  run_all,
  workdir_of,
  write_results,
)
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.run_files import read_metrics

_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds 0, 1, ... of each run.", lower_bound=2)
_WORKDIR = flags.DEFINE_string("workdir", "runs/experiment_p3o", "Holds the runs' workdirs.")

HERE = pathlib.Path(__file__).parent
CONFIG = "--config=experiments/p3o_mismatch/config.py"
OTHER_SEED = 1000  # of the run whose policy draws half the rollouts of others
METHODS = {
  **{
    f"GRPO, ε = {epsilon}": (
      "grpo",
      [f"--config.loss=ppo_clip(epsilon_low={epsilon}, epsilon_high={epsilon})"],
    )
    for epsilon in (0.2, 0.4, 0.6)
  },
  "P3O": ("p3o", []),
}
ABLATED = "temperature 1.5"
CAP_ONLY = f"{ABLATED}: P3O without its KL term"


def settings(other: pathlib.Path) -> dict[str, tuple[str, list[str]]]:
  """Setting → (schedule, what it changes); `other` is the workdir of the other policy's run."""
  sources = "--config.sources"
  return {
    "matched": ("refresh", []),
    "temperature 1.5": (
      "refresh",
      [f"{sources}.temperature.fraction=1.0", f"{sources}.temperature.temperature=1.5"],
    ),
    "int8 rollouts": (
      "refresh",
      [f"{sources}.quantized.fraction=1.0", "--config.model.overrides.compute_dtype=bfloat16"],
    ),
    "lag 1": ("lag", ["--config.schedule=fixed_lag(lag=1)"]),
    "lag 2": ("lag", ["--config.schedule=fixed_lag(lag=2)"]),
    "half from another policy": (
      "refresh",
      [f"{sources}.checkpoint.fraction=0.5", f"{sources}.checkpoint.workdir={other}"],
    ),
  }


def arguments(method: str, schedule: str, *changes: Sequence[str]) -> list[str]:
  return [f"{CONFIG}:{method},{schedule}", *(flag for change in changes for flag in change)]


def all_runs(other: pathlib.Path) -> dict[str, list[str]]:
  """ "setting: method" → command line."""
  runs = {
    f"{setting}: {label}": arguments(method, schedule, own, changes)
    for setting, (schedule, changes) in settings(other).items()
    for label, (method, own) in METHODS.items()
  }
  schedule, changes = settings(other)[ABLATED]
  cap_only = ["--config.loss=p3o(kl_term=False)"]
  return runs | {CAP_ONLY: arguments("p3o", schedule, cap_only, changes)}


def measured(workdir: pathlib.Path) -> dict:
  """What the tables say of a finished run, besides its held-out curve."""
  train = [r for r in read_metrics(workdir) if r["phase"] == "train"]
  names = dict(ess="behavior/ess", clip="loss/clip_fraction", kl="behavior/kl_k3")
  found = {name: statistics.mean(r[metric] for r in train) for name, metric in names.items()}
  return found | {
    "entropy": train[-1]["policy/entropy"],
    "largest_ratio": max(r["behavior/ratio_max"] for r in train),
    "skipped": train[-1]["update/skipped"],
  }


def by_setting(results: Mapping[str, Sequence[dict]], of_run: Callable[[dict], float]) -> str:
  """Markdown: settings down, methods across."""
  values = lambda setting, label: [of_run(r) for r in results[f"{setting}: {label}"]]
  rows = {
    setting: [cell(values(setting, label)) for label in METHODS]
    for setting in settings(pathlib.Path())
  }
  return markdown(list(METHODS), rows)


def learning_table(results: Mapping[str, Sequence[dict]]) -> str:
  """Final held-out pass@1, and P3O's less the best clip's, which is chosen by its mean."""
  rows = {}
  for setting in settings(pathlib.Path()):
    of_method = {
      label: [r["pass@1"][-1] for r in results[f"{setting}: {label}"]] for label in METHODS
    }
    best = max(
      (label for label in METHODS if label != "P3O"),
      key=lambda label, found=of_method: statistics.mean(found[label]),
    )
    pairs = zip(of_method["P3O"], of_method[best], strict=True)
    rows[setting] = [cell(values) for values in of_method.values()]
    rows[setting] += [cell([ours - theirs for ours, theirs in pairs]), best.split()[-1]]
  return markdown([*METHODS, "P3O less the best", "the best's ε"], rows)


def cost_table(results: Mapping[str, Sequence[dict]]) -> str:
  """Final held-out pass@1 less that of the matched run with the same method and seed."""
  ends = lambda setting, label: [r["pass@1"][-1] for r in results[f"{setting}: {label}"]]
  rows = {}
  for setting in list(settings(pathlib.Path()))[1:]:
    pairs = {
      label: zip(ends(setting, label), ends("matched", label), strict=True) for label in METHODS
    }
    rows[setting] = [cell([end - matched for end, matched in pairs[label]]) for label in METHODS]
  return markdown(list(METHODS), rows)


def plot(results: Mapping[str, Sequence[dict]], root: pathlib.Path, path: pathlib.Path) -> None:
  """Held-out pass@1 over updates, a panel per setting."""
  names = list(settings(root))
  figure, grid = plt.subplots(
    2, len(names) // 2, figsize=(14, 7.5), sharey=True, layout="constrained"
  )
  for axes, setting in zip(grid.flat, names, strict=True):
    workdirs = {
      label: [workdir_of(root, of[0]["label"], r["seed"]) for r in of]
      for label in METHODS
      for of in [results[f"{setting}: {label}"]]
    }
    curves.plot(axes, workdirs, METRIC, "updates")
    axes.set_title(setting)
  figure.savefig(path, dpi=90)
  plt.close(figure)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  root = pathlib.Path(_WORKDIR.value)
  other = root / "other_policy"
  run("other policy", arguments("grpo", "refresh"), seed=OTHER_SEED, workdir=other)
  results = run_all(
    all_runs(other), root, num_seeds=_SEEDS.value, same_warm_start=True, measure=measured
  )
  write_results(HERE / "results.json", results)
  found = by_label(results)
  plot(found, root, HERE / "curves.png")
  print(learning_table(found), cost_table(found), sep="\n\n")
  for name in ("ess", "clip", "entropy"):
    print(f"\n{name}:\n\n{by_setting(found, lambda r, name=name: r[name])}")
  ablated = found[CAP_ONLY]
  said = {name: cell([r[name] for r in ablated]) for name in ("ess", "clip", "entropy")}
  print(f"\n{CAP_ONLY}: final {cell([r['pass@1'][-1] for r in ablated])}, {said}")


if __name__ == "__main__":
  app.run(main)
