"""Reads a first run: its errors, and its time by phase."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlvr_jax.colab.display import COLORS, legend_outside
from rlvr_jax.colab.rollouts import Rollout, batches
from rlvr_jax.evaluate.curves import time_table
from rlvr_jax.evaluate.learning_curves import Panel, panels_with_data
from rlvr_jax.evaluate.run_files import read_metrics

FARTHEST = 10  # larger errors count as ±10


def read_records(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads all records of the run's metrics.jsonl, for `evaluate.learning_curves`."""
  return list(read_metrics(workdir))


def summary(workdir: str | os.PathLike[str]) -> str:
  """Text with one line per evaluation on the held-out problems."""
  lines = [
    f"after {r['step']:3} updates: held-out pass@1 {r['eval/pass@1']:.3f}"
    f" [{r['eval/pass@1_low']:.3f}, {r['eval/pass@1_high']:.3f}]"
    for r in read_metrics(workdir)
    if r["phase"] == "eval"
  ]
  return "\n".join(lines)


def draw_panels(records: Sequence[dict[str, Any]], panels: Iterable[Panel]) -> None:
  """Draws a row of those panels of `learning_curves` that have data."""
  from matplotlib import pyplot

  panels = panels_with_data(records, panels)
  _, grid = pyplot.subplots(1, len(panels), figsize=(13, 3.5), squeeze=False)
  for axes, panel in zip(grid.flat, panels, strict=True):
    panel(axes, records)


def answer_errors(rollouts: Iterable[Rollout]) -> np.ndarray:
  """Answer minus reference, i64[N], of the N rollouts with integer answers; within ±FARTHEST."""
  integers = [r for r in rollouts if _is_integer(r.completion)]
  errors = [_parse_integer(r.completion) - int(r.answer) for r in integers]
  return np.clip(np.array(errors, int), -FARTHEST, FARTHEST)


def _is_integer(text: str) -> bool:
  return text.strip().removeprefix("-").isdecimal()


def _parse_integer(text: str) -> int:
  return int(text.strip())


def draw_errors(rollouts: Sequence[Rollout], batch: int, width: int = 10) -> None:
  """Draws the errors of `width` batches from `batch` on, and those of the first `width` batches.

  Raises:
    ValueError: the batch does not exist.
  """
  from matplotlib import pyplot

  numbers = batches(rollouts)
  first = numbers[0]
  last = numbers[-1]
  if not first <= batch <= last:
    raise ValueError(f"draw_errors: there is no batch {batch}; choose one of {first} to {last}")
  _, axes = pyplot.subplots(figsize=(8, 3.2))
  bins = np.arange(-FARTHEST, FARTHEST + 1)
  for start, meaning, style in ((first, "plain", "--"), (batch, "result", "-")):
    errors = answer_errors(r for r in rollouts if start <= r.batch < start + width)
    shares = np.bincount(errors + FARTHEST, minlength=bins.size) / max(1, errors.size)
    label = f"batches {start} to {min(start + width - 1, last)}"
    axes.step(bins, shares, where="mid", color=COLORS[meaning], linestyle=style, label=label)
  axes.set(xlabel="answer − correct answer (±10 and beyond)", ylabel="share of the rollouts")
  axes.set_ylim(bottom=0)
  axes.set_xticks(bins[::5])
  legend_outside(axes)


def plot_seconds(axes: Any, run: Sequence[dict[str, Any]]) -> None:
  """Plots seconds by phase of the run, as bars with their share of the wall-clock time."""
  table = {phase: row for phase, row in time_table(run).items() if row[1] >= 0.005}
  phases = sorted(table, key=lambda phase: table[phase][0])
  bars = axes.barh(phases, [table[phase][0] for phase in phases], color=COLORS["plain"])
  axes.bar_label(bars, [f" {table[phase][1]:.0%}" for phase in phases])
  axes.margins(x=0.12)
  axes.set(xlabel="seconds, and their share of the wall-clock time")
  axes.grid(axis="y", visible=False)
