"""Figures of the runs behind the reproduction page: differences and curves.

The runs are read from experiments/*/results.json and testbed.json in the checkout `root`.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from rlvr_jax.colab.display import COLORS
from rlvr_jax.evaluate import compare, curves
from rlvr_jax.evaluate.compare import Result

_FILES = ("results.json", "testbed.json")
_NOT_MEASURED = {"seed", "number"}  # numeric fields that are not measurements


def files(root: str | os.PathLike[str]) -> list[str]:
  """Names of the files of runs in experiments/, such as "mu_grpo/results.json".

  Raises:
    FileNotFoundError: `root` is not a checkout.
  """
  folder = pathlib.Path(root) / "experiments"
  paths = sorted(path for name in _FILES for path in folder.glob(f"*/{name}") if _has_runs(path))
  if not paths:
    raise FileNotFoundError(f"{folder} has no results; set root to the folder of a checkout")
  return [path.relative_to(folder).as_posix() for path in paths]


def _has_runs(path: pathlib.Path) -> bool:
  return isinstance(json.loads(path.read_text(encoding="utf-8")), list)


def load(root: str | os.PathLike[str], file: str) -> list[Result]:
  """Loads the runs of one of `files`.

  Raises:
    ValueError: the file is unknown.
  """
  known = files(root)
  if file not in known:
    raise ValueError(f"load: file = {file!r} is unknown; choose one of {known}")
  return list(compare.read_results(pathlib.Path(root) / "experiments" / file))


def overview(root: str | os.PathLike[str]) -> str:
  """Text with the numbers of runs and labels and the metrics of each file."""
  lines = []
  for file in files(root):
    runs = load(root, file)
    num_labels = len(compare.group_by_label(runs))
    names = ", ".join(metrics(runs))
    lines.append(f"{file}: {len(runs)} runs of {num_labels} labels\n    {names}")
  return "\n".join(lines)


def metrics(runs: Iterable[Result]) -> list[str]:
  """Names of the runs' metrics, as `value` takes them."""
  return sorted({name for run in runs for name in _metric_names(run)})


def _metric_names(run: Result) -> list[str]:
  held_out = [name for name in run["evaluations"] if name.startswith("eval/")]
  numbers = [k for k, v in run.items() if isinstance(v, (int, float)) and k not in _NOT_MEASURED]
  return [
    *(name for name in held_out if not name.endswith(("_low", "_high"))),
    *(name for field in ("curves", "train") for name in run.get(field, {})),
    *numbers,
  ]


def value(run: Result, metric: str) -> float:
  """Value of a metric in a run: the last of a held-out metric, the mean of a training metric.

  Raises:
    ValueError: the run lacks the metric.
  """
  if metric in run["evaluations"]:
    return compare.final_value(run, metric)
  if isinstance(run.get(metric), (int, float)):
    return float(run[metric])
  return float(compare.result_curve(run, metric)[1].mean())


def values_by_seed(runs: Sequence[Result], metric: str) -> dict[str, dict[int, float]]:
  """Label → seed → `value`, for the runs that have the metric.

  Raises:
    ValueError: no run has the metric.
  """
  values: dict[str, dict[int, float]] = {}
  for run in runs:
    if metric in _metric_names(run):
      values.setdefault(run["label"], {})[run["seed"]] = value(run, metric)
  if not values:
    raise ValueError(f"no run has the metric {metric!r}; choose one of {metrics(runs)}")
  return values


# --- drawing --------------------------------------------------------------------------------------


def plot_differences(axes: Any, runs: Sequence[Result], metric: str, baseline: str) -> None:
  """Plots `compare.plot_differences` of the runs that have the metric, by `value`.

  Raises:
    ValueError: no run has the metric, or see `compare.others`.
  """
  values_by_seed(runs, metric)  # raises if no run has the metric
  with_metric = [run for run in runs if metric in _metric_names(run)]
  compare.plot_differences(axes, with_metric, baseline, lambda run: value(run, metric), name=metric)


def draw_differences(runs: Sequence[Result], metric: str, baseline: str) -> None:
  """Draws `plot_differences`."""
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(11, 1.2 + 0.27 * len(compare.other_labels(runs, baseline))))
  plot_differences(axes, runs, metric, baseline)


def draw_file(root: str | os.PathLike[str], metric: str, file: str) -> None:
  """Draws `plot_differences` of a file's runs, with its first label as baseline."""
  runs = load(root, file)
  draw_differences(runs, metric, runs[0]["label"])


def plot_pairs(axes: Any, runs: Sequence[Result], metric: str, baseline: str, label: str) -> None:
  """Plots the values of a label next to those of the baseline, with a line per seed.

  Raises:
    ValueError: see `values_by_seed` and `compare.other_labels`; or the labels share no seed.
  """
  values = values_by_seed(runs, metric)
  labels = compare.other_labels([run for run in runs if run["label"] in values], baseline)
  if label not in labels:
    raise ValueError(f"plot_pairs: label = {label!r} is unknown; choose one of {labels}")
  shared_seeds = sorted(values[baseline].keys() & values[label].keys())
  if not shared_seeds:
    raise ValueError(f"{baseline!r} and {label!r} share no seed; run both with the same seed")
  for seed in shared_seeds:
    pair = values[baseline][seed], values[label][seed]
    axes.plot([0, 1], pair, color=COLORS["reference"], zorder=0)
    axes.plot(0, pair[0], "o", color=COLORS["plain"])
    axes.plot(1, pair[1], "D", color=COLORS["result"])
    axes.annotate(f"seed {seed}", (1, pair[1]), (8, 0), textcoords="offset points", va="center")
  axes.set_xticks([0, 1], [baseline, label])
  title = _describe_difference(runs, metric, baseline, label)
  axes.set(xlim=(-0.4, 1.6), ylabel=metric, title=title)
  axes.grid(axis="x", visible=False)


def _describe_difference(runs: Sequence[Result], metric: str, baseline: str, label: str) -> str:
  pair_runs = [run for run in runs if run["label"] in (baseline, label)]
  difference = compare.differences(pair_runs, baseline, lambda run: value(run, metric))[label]
  if difference is None:
    return "one seed: no interval"
  return f"difference {difference.mean:+.3f}, 95 % [{difference.low:+.3f}, {difference.high:+.3f}]"


def draw_pairs(runs: Sequence[Result], metric: str, baseline: str, label: str) -> None:
  """Draws `plot_pairs`."""
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(6.5, 3.6))
  plot_pairs(axes, runs, metric, baseline, label)


def draw_curves(runs: Sequence[Result], metric: str, baseline: str, labels: Sequence[str]) -> None:
  """Draws a metric over updates, with a panel for each label and the baseline.

  A panel shows the means over seeds with their 95 % intervals, and single seeds.

  Args:
    runs: result of `load`.
    metric: name of a metric with a curve.
    baseline, labels: labels of runs.
  Raises:
    ValueError: a label or the metric is unknown, or a curve has fewer than two points.
  """
  from matplotlib import pyplot

  known = compare.other_labels(runs, baseline)
  unknown = [label for label in labels if label not in known]
  if unknown or not labels:
    raise ValueError(f"draw_curves: labels = {list(labels)}; choose some of {known}")
  runs_by_label = compare.group_by_label(runs)
  curves_by_label = {
    label: [compare.result_curve(run, metric) for run in runs_by_label[label]]
    for label in (baseline, *labels)
  }
  single_points = [
    label
    for label, label_curves in curves_by_label.items()
    if min(x.size for x, _ in label_curves) < 2
  ]
  if single_points:
    raise ValueError(f"draw_curves: {single_points} have one value of {metric}, not a curve")
  columns = min(3, len(labels))
  rows = -(-len(labels) // columns)
  size = (1.5 + 3.6 * columns, 0.4 + 2.9 * rows)
  figure, panels = pyplot.subplots(
    rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False
  )
  for axes, label in zip(panels.flat, labels, strict=False):
    pair = {name: curves_by_label[name] for name in (baseline, label)}
    colors = [COLORS["plain"], COLORS["result"]]
    curves.plot_curves(axes, pair, metric, "updates", colors=colors)
    axes.get_legend().remove()
    axes.set(title=label, ylabel=metric if axes in panels[:, 0] else "")
  for axes in panels.flat[len(labels) :]:
    axes.remove()
  handles, _ = panels[0, 0].get_legend_handles_labels()  # the means
  names = [f"baseline: {baseline}", "arm of the title"]
  figure.legend(handles, names, loc="outside upper left", ncols=2)
