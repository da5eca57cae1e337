"""Prints the tables of README.md, of results.json or of the workdir of a sweep.

  python -m experiments.p3o_mismatch.tables --workdir=runs/experiment_p3o

Run it from the repository root. With a workdir it writes results.json and the plot anew.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from experiments.p3o_mismatch.sweep import CAP_ONLY, METHODS, OTHER, SETTINGS
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import (
  METRIC,
  by_label,
  cell,
  curve_of,
  final,
  markdown,
  of_experiment,
)
from rlvr_jax.evaluate.run_files import read_metrics

HERE = pathlib.Path(__file__).parent


def measured(workdir: str) -> dict:
  """Measurements of a finished run for the tables, besides its held-out curve."""
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
  rows = {setting: [cell(values(setting, label)) for label in METHODS] for setting in SETTINGS}
  return markdown(list(METHODS), rows, "setting")


def learning_table(results: Mapping[str, Sequence[dict]]) -> str:
  """Final held-out pass@1, and P3O's less the best clip's, which is chosen by its mean."""
  rows = {}
  for setting in SETTINGS:
    of_method = {label: [final(r) for r in results[f"{setting}: {label}"]] for label in METHODS}
    best = max(
      (label for label in METHODS if label != "P3O"),
      key=lambda label, found=of_method: statistics.mean(found[label]),
    )
    pairs = zip(of_method["P3O"], of_method[best], strict=True)
    rows[setting] = [cell(values) for values in of_method.values()]
    rows[setting] += [cell([ours - theirs for ours, theirs in pairs]), best.split()[-1]]
  return markdown([*METHODS, "P3O less the best", "the best's ε"], rows, "setting")


def cost_table(results: Mapping[str, Sequence[dict]]) -> str:
  """Final held-out pass@1 less that of the matched run with the same method and seed."""
  ends = lambda setting, label: [final(r) for r in results[f"{setting}: {label}"]]
  rows = {}
  for setting in list(SETTINGS)[1:]:
    pairs = {
      label: zip(ends(setting, label), ends("matched", label), strict=True) for label in METHODS
    }
    rows[setting] = [cell([end - matched for end, matched in pairs[label]]) for label in METHODS]
  return markdown(list(METHODS), rows, "setting")


def plot(results: Mapping[str, Sequence[dict]], path: pathlib.Path) -> None:
  """Held-out pass@1 over updates, a panel per setting."""
  figure, grid = plt.subplots(
    2, len(SETTINGS) // 2, figsize=(14, 7.5), sharey=True, layout="constrained"
  )
  for axes, setting in zip(grid.flat, SETTINGS, strict=True):
    found = {
      label: [curve_of(result) for result in results[f"{setting}: {label}"]] for label in METHODS
    }
    curves.plot_curves(axes, found, METRIC, "updates")
    axes.set_title(setting)
  figure.savefig(path, dpi=90)
  plt.close(figure)


def main() -> None:
  results, are_new = of_experiment(HERE / "results.json", measured)
  found = by_label(result for result in results if result["label"] != OTHER)
  if are_new:
    plot(found, HERE / "curves.png")
  print(learning_table(found), cost_table(found), sep="\n\n")
  for name in ("ess", "clip", "entropy"):
    print(f"\n{name}:\n\n{by_setting(found, lambda r, name=name: r[name])}")
  ablated = found[CAP_ONLY]
  said = {name: cell([r[name] for r in ablated]) for name in ("ess", "clip", "entropy")}
  print(f"\n{CAP_ONLY}: final {cell([final(r) for r in ablated])}, {said}")


if __name__ == "__main__":
  main()
