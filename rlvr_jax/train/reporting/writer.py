"""The records of a run: metrics.jsonl, rollouts.jsonl, TensorBoard, arrays of geometry."""

from __future__ import annotations

import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
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
from rlvr_jax.storage.files import replace_file, report_full_disk
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.reporting.records import BEFORE_FIRST_STEP, Records


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
    with report_full_disk(self.workdir / TENSORBOARD_FOLDER):
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
    with report_full_disk(path):
      path.parent.mkdir(exist_ok=True)
    with replace_file(path) as file:
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


class NoWriter(MetricWriter):
  """A MetricWriter that writes nothing, for all processes except the first."""

  def __init__(self, workdir: pathlib.Path):
    self.workdir = workdir

  def write(self, *args: Any, **kwargs: Any) -> None:
    pass

  def write_rollouts(self, *args: Any, **kwargs: Any) -> None:
    pass

  def write_geometry(self, *args: Any, **kwargs: Any) -> None:
    pass

  def written(self, step: int) -> dict[str, Any]:
    del step
    return {}

  def close(self) -> None:
    pass


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
