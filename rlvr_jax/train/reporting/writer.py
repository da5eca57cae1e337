"""A run's output: metrics.jsonl, rollouts.jsonl, TensorBoard, printed lines, progress bars."""

from __future__ import annotations

import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import tqdm
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from rlvr_jax.evaluate.run_files import (
  GEOMETRY_FOLDER,
  METRICS_FILE,
  ROLLOUTS_FILE,
  TENSORBOARD_FOLDER,
  read_metrics,
)
from rlvr_jax.storage.files import replacing, reporting_full_disk
from rlvr_jax.train.reporting.records import BEFORE_FIRST_STEP, Records

_LINE = (  # label, key, format
  ("reward", "reward/mean", "{:.3f}"),
  ("pass", "reward/pass_rate", "{:.1%}"),
  ("groups", "groups/effective", "{:g}"),
  ("entropy", "policy/entropy", "{:.3f}"),
  ("kl", "behavior/kl_k3", "{:.1e}"),
  ("clip", "loss/clip_fraction", "{:.1%}"),
  ("grad", "update/gradient_norm", "{:.3g}"),
  ("length p50", "response/length_p50", "{:.0f}"),
  ("p99", "response/length_p99", "{:.0f}"),
  ("truncated", "response/truncated", "{:.1%}"),
  ("slots busy", "time/slots_busy", "{:.0%}"),
  ("drain", "time/drain_share", "{:.0%}"),
  ("rollout tok/s", "time/rollout_tokens_per_second", "{:,.0f}"),
  ("update tok/s", "time/update_tokens_per_second", "{:,.0f}"),
  ("stale", "staleness/mean", "{:.1f}"),
)


class MetricWriter:
  """Appends the records of a run, so that a killed and resumed run ends with the same files.

  Write every record of step N before saving the checkpoint of step N, which stores what `written`
  returns. Resuming from it keeps the records up to step N, drops later ones and a torn last line,
  and reports damage.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    resume_step: int | None,
    written: Mapping[str, Any] | None = None,
    trackers: Sequence[Any] = (),
    publish: Callable[[], None] = lambda: None,
    kept: str | os.PathLike[str] | None = None,
  ):
    """Opens the files of `workdir`.

    Args:
      workdir: created if needed.
      resume_step: the restored step; None for a new run.
      written: what `written` returned when the checkpoint, or the warm start of a new run, was
        saved. If None, a new run drops every record, and a resumed run does not look for damage.
      trackers: of `train.reporting.trackers`; they get a copy of every number.
      publish: puts the files where they stay; called when a checkpoint will name their records.
      kept: the folder where they stay, for messages; None for `workdir`.
    """
    self.workdir, shown = pathlib.Path(workdir), os.fspath(kept or workdir)
    self.workdir.mkdir(parents=True, exist_ok=True)
    self._purge_step = 0 if resume_step is None else resume_step + 1
    self._keep_warm_start = written is not None or resume_step is not None
    last_step = BEFORE_FIRST_STEP if resume_step is None and written is not None else resume_step

    def open_records(name: str) -> Records:
      records = Records(self.workdir / name, last_step, written and written[name])
      if records.damage:
        say(records.damage.replace(os.fspath(self.workdir), shown))
      return records

    self._metrics, self._rollouts = open_records(METRICS_FILE), open_records(ROLLOUTS_FILE)
    self._boards: dict[str, _Board] = {}
    self._trackers, self._publish = trackers, publish

  def write(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
    """Writes and flushes one record {"step", "phase", values…}; numbers also go to TensorBoard.

    Args:
      step: of the phase's own counter.
      phase: "train", "eval", "stage" or "warm_start".
      values: numbers (also 0-d arrays) or strings; a float reads back exactly, and a non-finite
        one is written as "nan", "inf" or "-inf".
    Raises:
      DiskFullError: no space is left.
    """
    values = {name: _plain(value) for name, value in values.items()}
    self._metrics.append([{"step": step, "phase": phase, **values}])
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    with reporting_full_disk(self.workdir / TENSORBOARD_FOLDER):
      self._board(phase).append(step, numbers)
    for tracker in self._trackers:
      tracker.log(step, phase, numbers)

  def write_rollouts(
    self, step: int, rollouts: Sequence[Mapping[str, Any]], *, phase: str = "train"
  ) -> None:
    """Writes one line per rollout: {"step", "phase", fields…}; fields are JSON values."""
    self._rollouts.append([{"step": step, "phase": phase, **rollout} for rollout in rollouts])

  def write_geometry(self, step: int, arrays: Mapping[str, Any]) -> None:
    """Writes the arrays of one measurement as geometry/STEP.npz; the file is complete or absent.

    Raises:
      DiskFullError: no space is left.
    """
    path = self.workdir / GEOMETRY_FOLDER / f"{step:06d}.npz"
    with reporting_full_disk(path):
      path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
      np.savez(file, **arrays)

  def written(self, step: int) -> dict[str, Any]:
    """Syncs the records to disk; returns what a checkpoint stores of those up to a step; JSON.

    Later ones were written in preparing an update that was not made.
    """
    files = {METRICS_FILE: self._metrics, ROLLOUTS_FILE: self._rollouts}
    written = {name: records.written(step) for name, records in files.items()}
    self._publish()
    return written

  def close(self) -> None:
    """Closes the files."""
    self._metrics.close()
    self._rollouts.close()
    for opened in (*self._boards.values(), *self._trackers):
      opened.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _board(self, phase: str) -> _Board:
    """One TensorBoard run per phase: a purge in one must not touch another's step counter."""
    if phase not in self._boards:
      keep_all = phase == "warm_start" and self._keep_warm_start
      self._boards[phase] = _Board(
        self.workdir / TENSORBOARD_FOLDER / phase, None if keep_all else self._purge_step
      )
    return self._boards[phase]


class _Board:
  """A TensorBoard event file, written synchronously.

  `tensorboardX.SummaryWriter` passes events to a thread that dies on a full disk, and the next
  caller then waits for it indefinitely; here the caller gets the error.
  """

  def __init__(self, folder: pathlib.Path, purge_step: int | None):
    """Opens a new file; TensorBoard then hides earlier files' events from `purge_step` on."""
    folder.mkdir(parents=True, exist_ok=True)
    # File names have a resolution of one second; a quick restart must not overwrite.
    self._writer = EventsWriter(str(folder / "events"), f".from-{purge_step}")
    if purge_step is not None:
      session = SessionLog(status=SessionLog.START)
      self._writer.write_event(Event(wall_time=time.time(), step=purge_step, session_log=session))

  def append(self, step: int, values: Mapping[str, float]) -> None:
    event = Event(wall_time=time.time(), step=step)
    for name, value in values.items():
      # TensorBoard does not allow "@" in a name, and would log a line for each.
      event.summary.MergeFrom(summary.scalar(name.replace("@", "_at_"), value))
    self._writer.write_event(event)
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


def _plain(value: Any) -> Any:
  """A JSON value: exact int or float; text for a float that is not finite."""
  if isinstance(value, str):
    return value
  if hasattr(value, "item"):
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if not isinstance(value, (bool, int, float)):
    raise TypeError(f"a metric must be a number or text, got {type(value).__name__}: {value!r}")
  return value


def stage_summary(workdir: str | os.PathLike[str], step: int, length: int) -> dict[str, float]:
  """Means of metrics over a stage's updates; max or min if the name says so."""
  records = [
    record
    for record in read_metrics(workdir)
    if record["phase"] == "train" and step - length < record["step"] <= step
  ]
  chosen = ("veto/", "behavior/", "staleness/", "loss/", "policy/", "reward/", "stage/number")
  reduce = {"max": max, "min": min}
  summary = {}
  for name in dict.fromkeys(name for record in records for name in record):
    if name.startswith(chosen):
      how = next((reduce[part] for part in re.split("[/_]", name) if part in reduce), np.mean)
      summary[name] = float(how([record[name] for record in records if name in record]))
  return summary


# --- printed output -------------------------------------------------------------------------------


def compact_line(step: int, total: int, values: Mapping[str, Any]) -> str:
  """The printed line of one step; missing values are left out."""
  parts = [f"step {step:>{len(str(total))}}/{total}"]
  parts += [
    f"{label} {form.format(float(values[key]))}" for label, key, form in _LINE if key in values
  ]
  return "  ".join(parts)


def say(line: str) -> None:
  """Prints a line, above the progress bars if there are any."""
  tqdm.tqdm.write(line, file=sys.stdout)
  sys.stdout.flush()


def progress(
  iterable_or_total: Iterable[Any] | int, description: str, *, unit: str = "it", initial: int = 0
) -> tqdm.tqdm:
  """A progress bar; if stderr is not a terminal, plain lines at most every ten seconds.

  Args:
    iterable_or_total: what to iterate over, or the number of units to report with `update(n)`.
    description: name of the phase.
    unit: name of what is counted.
    initial: units already done, if the phase was resumed.
  """
  kind = tqdm.tqdm if sys.stderr.isatty() else _PlainProgress
  known = {"desc": description, "unit": unit, "initial": initial, "dynamic_ncols": True}
  if isinstance(iterable_or_total, int):
    return kind(total=iterable_or_total, **known)
  return kind(iterable_or_total, **known)


class _PlainProgress(tqdm.tqdm):
  """Prints "warm start: 20/60 it, 3.1 s" as lines, for logs."""

  def __init__(self, *args: Any, **kwargs: Any):
    self._last_line: tuple[float, str] = (-math.inf, "")
    super().__init__(*args, **kwargs, mininterval=10, leave=False)

  def display(self, msg: str | None = None, pos: int | None = None) -> None:
    del pos
    if msg == "":  # tqdm clears the bar
      return
    of = f"/{self.total}" if self.total is not None else ""
    line = f"{self.desc}: {self.n}{of} {self.unit}"
    if line != self._last_line[1]:
      self._last_line = (time.monotonic(), line)
      print(f"{line}, {self.format_dict['elapsed']:.1f} s", file=self.fp, flush=True)

  def close(self) -> None:
    if not self.disable:
      self.display()
    super().close()
