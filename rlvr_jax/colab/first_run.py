"""Reading a first run: its errors, and where its time went."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlvr_jax.colab.display import COLORS, legend_outside
from rlvr_jax.colab.rollouts import Rollout, batches
from rlvr_jax.evaluate.curves import time_table
from rlvr_jax.evaluate.learning_curves import Panel, with_data
from rlvr_jax.evaluate.run_files import read_metrics

FARTHEST = 10  # errors beyond are counted at ±10


def records(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """All records of the run's metrics.jsonl, for `evaluate.learning_curves`."""
  return list(read_metrics(workdir))


def summary(workdir: str | os.PathLike[str]) -> str:
  """One line per evaluation on the held-out problems."""
  lines = [
    f"after {r['step']:3} updates: held-out pass@1 {r['eval/pass@1']:.3f}"
    f" [{r['eval/pass@1_low']:.3f}, {r['eval/pass@1_high']:.3f}]"
    for r in read_metrics(workdir)
    if r["phase"] == "eval"
  ]
  return "\n".join(lines)


def draw_panels(records: Sequence[dict[str, Any]], panels: Iterable[Panel]) -> None:
  """Makes a figure of those panels of `learning_curves` that have something to show, in a row."""
  from matplotlib import pyplot

  shown = with_data(records, panels)
  _, places = pyplot.subplots(1, len(shown), figsize=(13, 3.5), squeeze=False)
  for axes, panel in zip(places.flat, shown, strict=True):
    panel(axes, records)


def errors(rollouts: Iterable[Rollout]) -> np.ndarray:
  """i64[N], answer less reference of the rollouts whose answer is an integer, within ±FARTHEST."""
  found = [_integer(r.completion) - int(r.answer) for r in rollouts if _is_integer(r.completion)]
  return np.clip(np.array(found, int), -FARTHEST, FARTHEST)


def _is_integer(text: str) -> bool:
  return text.strip().removeprefix("-").isdecimal()


def _integer(text: str) -> int:
  return int(text.strip())


def draw_errors(rollouts: Sequence[Rollout], batch: int, width: int = 10) -> None:
  """Makes the figure of the errors of `width` batches from `batch` on, next to those of the first.

  Raises:
    ValueError: there is no such batch.
  """
  from matplotlib import pyplot

  first, last = batches(rollouts)[0], batches(rollouts)[-1]
  if not first <= batch <= last:
    raise ValueError(f"draw_errors: there is no batch {batch}; choose one of {first} to {last}")
  _, axes = pyplot.subplots(figsize=(8, 3.2))
  bins = np.arange(-FARTHEST, FARTHEST + 1)
  for start, meaning, style in ((first, "plain", "--"), (batch, "result", "-")):
    found = errors(r for r in rollouts if start <= r.batch < start + width)
    shares = np.bincount(found + FARTHEST, minlength=bins.size) / max(1, found.size)
    label = f"batches {start} to {min(start + width - 1, last)}"
    axes.step(bins, shares, where="mid", color=COLORS[meaning], linestyle=style, label=label)
  axes.set(xlabel="answer − correct answer (±10 and beyond)", ylabel="share of the rollouts")
  axes.set_ylim(bottom=0)
  axes.set_xticks(bins[::5])
  legend_outside(axes)


def plot_seconds(axes: Any, run: Sequence[dict[str, Any]]) -> None:
  """Seconds by phase of the run, as bars with their share of the wall-clock."""
  table = {phase: row for phase, row in time_table(run).items() if row[1] >= 0.005}
  phases = sorted(table, key=lambda phase: table[phase][0])
  bars = axes.barh(phases, [table[phase][0] for phase in phases], color=COLORS["plain"])
  axes.bar_label(bars, [f" {table[phase][1]:.0%}" for phase in phases])
  axes.margins(x=0.12)
  axes.set(xlabel="seconds, and their share of the wall-clock")
  axes.grid(axis="y", visible=False)
