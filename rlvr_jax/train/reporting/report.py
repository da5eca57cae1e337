"""The report at the end of a run: a table, the learning curves, and the paths of the files."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable, Sequence

from rlvr_jax.evaluate import learning_curves
from rlvr_jax.evaluate.curves import phase_seconds
from rlvr_jax.evaluate.held_out import GAP
from rlvr_jax.evaluate.run_files import (
  METRICS_FILE,
  ROLLOUTS_FILE,
  TENSORBOARD_FOLDER,
  read_metrics,
)
from rlvr_jax.storage.files import JsonObject

CURVES_FILE = "learning_curves.png"
_COUNTERS = (  # label, prefix of the keys, format
  ("tokens", "counter/tokens_", "{:,.0f}"),
  ("model FLOPs", "counter/flops_", "{:.3g}"),
)

Record = JsonObject


def write_report(
  workdir: str | os.PathLike[str], kept: str | os.PathLike[str] | None = None
) -> str:
  """Plots `learning_curves.png`, and returns the final table and the paths of the run's files.

  The numbers come from the workdir's metrics.jsonl. Without matplotlib (extra `plot`) there is no
  plot, and the text says how to install matplotlib.

  Args:
    workdir: local workdir of the run.
    kept: final place of the files, for the paths in the text; None for `workdir`.
  Raises:
    FileNotFoundError: the workdir has no metrics.jsonl.
  """
  workdir = pathlib.Path(workdir)
  kept = workdir if kept is None else kept
  records = list(read_metrics(workdir))
  train = [record for record in records if record["phase"] == "train"]
  held_out = [record for record in records if record["phase"] == "eval"]
  lines = [*_table(train, held_out), ""]
  try:
    if learning_curves.draw(records, workdir / CURVES_FILE):
      lines.append(f"learning curves  {kept}/{CURVES_FILE}")
  except ImportError:
    lines.append('learning curves  not plotted, no matplotlib: pip install "rlvr_jax[plot]"')
  lines.append(f"every metric     {kept}/{METRICS_FILE}")
  lines.append(f"rollouts         {kept}/{ROLLOUTS_FILE}")
  lines.append(f"TensorBoard      {kept}/{TENSORBOARD_FOLDER}")
  return "\n".join(lines)


# --- the table ------------------------------------------------------------------------------------


def _table(train: Sequence[Record], held_out: Sequence[Record]) -> list[str]:
  rows = [("", "start", "best", "final")]
  ks = sorted(
    {int(name.removeprefix("eval/pass@")) for r in held_out for name in r if _is_pass_at_k(name)}
  )
  for k in ks:
    rows.append(_row(f"held-out pass@{k}", held_out, f"eval/pass@{k}", max, "{:.3f}"))
  rows.append(_row("below best play", held_out, GAP, min, "{:.3f}"))
  rows.append(_row("train reward", train, "reward/mean", max, "{:.3f}"))
  rows.append(_row("entropy (nats/token)", train, "policy/entropy", None, "{:.3f}"))
  rows = [row for row in rows if any(row[1:])]
  widths = [max(len(row[column]) for row in rows) for column in range(4)]
  lines = [
    "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for row in rows
  ]
  if train:
    records = [*train, *held_out]
    seconds = [f", {phase} {value:.0f} s" for phase, value in phase_seconds(records).items()]
    lines.append(f"updates: {train[-1]['step']}{''.join(seconds)}")
    lines += _totals(records)
  return lines


def _totals(records: Sequence[Record]) -> list[str]:
  """A line on tokens and a line on model FLOPs; the largest value of a counter is its total."""
  lines = []
  for title, prefix, form in _COUNTERS:
    names = dict.fromkeys(name for r in records for name in r if name.startswith(prefix))
    totals = [(name, max(r[name] for r in records if name in r)) for name in names]
    if totals:
      parts = [f"{name.removeprefix(prefix)} {form.format(total)}" for name, total in totals]
      lines.append(f"{title}: {', '.join(parts)}")
  return lines


def _is_pass_at_k(name: str) -> bool:
  return name.startswith("eval/pass@") and name.removeprefix("eval/pass@").isdigit()


def _row(
  label: str,
  records: Sequence[Record],
  key: str,
  best: Callable[..., Record] | None,
  form: str,
) -> tuple[str, str, str, str]:
  """(label, start, best, final) of `key`, each value with its interval if it has one."""
  with_key = [record for record in records if key in record]
  if not with_key:
    return (label, "", "", "")

  def show(record: Record, at_step: bool = False) -> str:
    text = form.format(record[key])
    if f"{key}_low" in record:
      text += f" [{form.format(record[f'{key}_low'])}, {form.format(record[f'{key}_high'])}]"
    return f"{text} at {record['step']}" if at_step else text

  finite = [record for record in with_key if math.isfinite(record[key])]
  top = show(best(finite, key=lambda record: record[key]), at_step=True) if best and finite else ""
  return (label, show(with_key[0]), top, show(with_key[-1]))
