"""Figures of the runs behind the reproduction page: differences and curves.

They are read from experiments/*/results.json and testbed.json, under the folder of a checkout,
which functions take as `root`.
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
  """Files of runs under experiments/, such as "mu_grpo/results.json".

  Raises:
    FileNotFoundError: `root` is not a checkout.
  """
  folder = pathlib.Path(root) / "experiments"
  found = sorted(path for name in _FILES for path in folder.glob(f"*/{name}") if _has_runs(path))
  if not found:
    raise FileNotFoundError(f"{folder} has no results; set root to the folder of a checkout")
  return [path.relative_to(folder).as_posix() for path in found]


def _has_runs(path: pathlib.Path) -> bool:
  return isinstance(json.loads(path.read_text(encoding="utf-8")), list)


def load(root: str | os.PathLike[str], file: str) -> list[Result]:
  """The runs of one of `files`.

  Raises:
    ValueError: there is no such file.
  """
  known = files(root)
  if file not in known:
    raise ValueError(f"load: file = {file!r} is unknown; choose one of {known}")
  return list(compare.read_results(pathlib.Path(root) / "experiments" / file))


def overview(root: str | os.PathLike[str]) -> str:
  """One line per file: its runs, labels, and metrics."""
  lines = []
  for file in files(root):
    runs = load(root, file)
    labels, names = len(compare.by_label(runs)), ", ".join(metrics(runs))
    lines.append(f"{file}: {len(runs)} runs of {labels} labels\n    {names}")
  return "\n".join(lines)


def metrics(runs: Iterable[Result]) -> list[str]:
  """Names of the runs' metrics, which `value` takes."""
  return sorted({name for run in runs for name in _measured(run)})


def _measured(run: Result) -> list[str]:
  held_out = [name for name in run["evaluations"] if name.startswith("eval/")]
  numbers = [k for k, v in run.items() if isinstance(v, (int, float)) and k not in _NOT_MEASURED]
  return [
    *(name for name in held_out if not name.endswith(("_low", "_high"))),
    *(name for field in ("curves", "train") for name in run.get(field, {})),
    *numbers,
  ]


def value(run: Result, metric: str) -> float:
  """One number of a run: of a held-out metric the last value, of one in training the mean.

  Raises:
    ValueError: the run lacks the metric.
  """
  if metric in run["evaluations"]:
    return compare.final(run, metric)
  if isinstance(run.get(metric), (int, float)):
    return float(run[metric])
  return float(compare.curve_of(run, metric)[1].mean())


def by_seed(runs: Sequence[Result], metric: str) -> dict[str, dict[int, float]]:
  """Label → seed → `value`, of the runs that have the metric.

  Raises:
    ValueError: none has.
  """
  found: dict[str, dict[int, float]] = {}
  for run in runs:
    if metric in _measured(run):
      found.setdefault(run["label"], {})[run["seed"]] = value(run, metric)
  if not found:
    raise ValueError(f"no run has the metric {metric!r}; choose one of {metrics(runs)}")
  return found


# --- drawing --------------------------------------------------------------------------------------


def plot_differences(axes: Any, runs: Sequence[Result], metric: str, baseline: str) -> None:
  """`compare.plot_differences` of the runs that have the metric, by `value`.

  Raises:
    ValueError: no run has the metric, or see `compare.others`.
  """
  by_seed(runs, metric)
  having = [run for run in runs if metric in _measured(run)]
  compare.plot_differences(axes, having, baseline, lambda run: value(run, metric), name=metric)


def draw_differences(runs: Sequence[Result], metric: str, baseline: str) -> None:
  """Makes the figure of `plot_differences`."""
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(11, 1.2 + 0.27 * len(compare.others(runs, baseline))))
  plot_differences(axes, runs, metric, baseline)


def draw_file(root: str | os.PathLike[str], metric: str, file: str) -> None:
  """Makes the figure of `plot_differences` of a file's runs to those of its first label."""
  runs = load(root, file)
  draw_differences(runs, metric, runs[0]["label"])


def plot_pairs(axes: Any, runs: Sequence[Result], metric: str, baseline: str, label: str) -> None:
  """Plots the values of a label next to the baseline's, a line per seed.

  Raises:
    ValueError: see `by_seed` and `compare.others`; or they share no seed.
  """
  values = by_seed(runs, metric)
  compared = compare.others([run for run in runs if run["label"] in values], baseline)
  if label not in compared:
    raise ValueError(f"plot_pairs: label = {label!r} is unknown; choose one of {compared}")
  shared = sorted(values[baseline].keys() & values[label].keys())
  if not shared:
    raise ValueError(f"{baseline!r} and {label!r} share no seed; run one of both")
  for seed in shared:
    pair = values[baseline][seed], values[label][seed]
    axes.plot([0, 1], pair, color=COLORS["reference"], zorder=0)
    axes.plot(0, pair[0], "o", color=COLORS["plain"])
    axes.plot(1, pair[1], "D", color=COLORS["result"])
    axes.annotate(f"seed {seed}", (1, pair[1]), (8, 0), textcoords="offset points", va="center")
  axes.set_xticks([0, 1], [baseline, label])
  axes.set(xlim=(-0.4, 1.6), ylabel=metric, title=_stated(runs, metric, baseline, label))
  axes.grid(axis="x", visible=False)


def _stated(runs: Sequence[Result], metric: str, baseline: str, label: str) -> str:
  of_both = [run for run in runs if run["label"] in (baseline, label)]
  found = compare.differences(of_both, baseline, lambda run: value(run, metric))[label]
  if found is None:
    return "one seed: no interval"
  return f"difference {found.mean:+.3f}, 95 % [{found.low:+.3f}, {found.high:+.3f}]"


def draw_pairs(runs: Sequence[Result], metric: str, baseline: str, label: str) -> None:
  """Makes the figure of `plot_pairs`."""
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(6.5, 3.6))
  plot_pairs(axes, runs, metric, baseline, label)


def draw_curves(runs: Sequence[Result], metric: str, baseline: str, labels: Sequence[str]) -> None:
  """Makes the figure of a metric over updates, a panel for each label with the baseline.

  A panel has the means over seeds with their 95 % intervals, and single seeds.

  Args:
    runs: of `load`.
    metric: of a curve.
    baseline, labels: of the runs.
  Raises:
    ValueError: a label or the metric is unknown, or a label has no curve of two points.
  """
  from matplotlib import pyplot

  known = compare.others(runs, baseline)
  unknown = [label for label in labels if label not in known]
  if unknown or not labels:
    raise ValueError(f"draw_curves: labels = {list(labels)}; choose some of {known}")
  found = compare.by_label(runs)
  by_label = {
    label: [compare.curve_of(run, metric) for run in found[label]] for label in (baseline, *labels)
  }
  points = [label for label, of_label in by_label.items() if min(x.size for x, _ in of_label) < 2]
  if points:
    raise ValueError(f"draw_curves: {points} have one value of {metric}, which is not a curve")
  columns = min(3, len(labels))
  rows = -(-len(labels) // columns)
  size = (1.5 + 3.6 * columns, 0.4 + 2.9 * rows)
  figure, panels = pyplot.subplots(
    rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False
  )
  for axes, label in zip(panels.flat, labels, strict=False):
    pair = {name: by_label[name] for name in (baseline, label)}
    colors = [COLORS["plain"], COLORS["result"]]
    curves.plot_curves(axes, pair, metric, "updates", colors=colors)
    axes.get_legend().remove()
    axes.set(title=label, ylabel=metric if axes in panels[:, 0] else "")
  for axes in panels.flat[len(labels) :]:
    axes.remove()
  handles, _ = panels[0, 0].get_legend_handles_labels()  # of the means
  names = [f"baseline: {baseline}", "arm of the title"]
  figure.legend(handles, names, loc="outside upper left", ncols=2)
