"""Writers of a run's records: lines of JSON, TensorBoard, trackers, arrays of geometry.

`MetricWriter` passes each record to the writers that take it.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import re
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias

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
from rlvr_jax.storage.files import (
  JSON,
  JsonLines,
  parse_line,
  read_lines,
  replace_file,
  replace_lines,
  report_full_disk,
)
from rlvr_jax.train.reporting.progress import say, warn
from rlvr_jax.types import Array

WARM_START = "warm_start"  # a phase with its own counter of steps, before step 0
BEFORE_FIRST_STEP = -1
TRACKERS = ("trackio", "wandb")  # their pip extras have the same names
TRACKED_FILE = "tracked.json"  # in a workdir: the run's id in trackers, kept when it is resumed

Value: TypeAlias = float | str | np.generic | np.ndarray | Array  # arrays of no dimensions


class Writer(Protocol):
  """An object that takes the records of a run."""

  def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
    """Records the numbers of one step of a phase."""

  def close(self) -> None:
    """Closes the writer."""


class MetricWriter:
  """Passes the records of a run to the run's writers; only the first process has writers.

  Write every record of step N before saving the checkpoint of step N, which stores the result of
  `written`.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    lines: Mapping[str, Records] | None = None,
    others: Sequence[Writer] = (),
    publish: Callable[[], None] = lambda: None,
  ):
    """Keeps the writers, which `close` closes.

    Args:
      workdir: the workdir of the run.
      lines: files of records by name, METRICS_FILE and ROLLOUTS_FILE; None: nothing is written.
      others: writers that get the numbers of every record of metrics, too.
      publish: copies the files to the place where they are kept, such as a bucket. It is called
        before a checkpoint is saved.
    """
    self.workdir = pathlib.Path(workdir)
    self._lines, self._others, self._publish = lines or {}, others, publish

  def write(self, step: int, phase: str, values: Mapping[str, Value]) -> None:
    """Writes one record {"step", "phase", values…}, which is in its file when this returns.

    Args:
      step: the step of the phase's own counter.
      phase: "train", "eval", "stage" or "warm_start".
      values: numbers (also 0-d arrays) or strings; a float reads back exactly, and a non-finite
        float is written as "nan", "inf" or "-inf".
    Raises:
      DiskFullError: no space is left.
    """
    if not self._lines:
      return
    plain = {name: _plain(value) for name, value in values.items()}
    self._lines[METRICS_FILE].append(step, phase, [plain])
    numbers = {name: value for name, value in plain.items() if not isinstance(value, str)}
    for writer in self._others:
      writer.write(step, phase, numbers)

  def write_rollouts(
    self, step: int, rollouts: Sequence[Mapping[str, JSON]], *, phase: str = "train"
  ) -> None:
    """Writes one line per rollout: {"step", "phase", fields…}; fields are JSON values."""
    if self._lines:
      self._lines[ROLLOUTS_FILE].append(step, phase, rollouts)

  def write_geometry(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays of one measurement as geometry/STEP.npz; the file is complete or absent.

    Raises:
      DiskFullError: no space is left.
    """
    if not self._lines:
      return
    path = self.workdir / GEOMETRY_FOLDER / f"{step:06d}.npz"
    with report_full_disk(path):
      path.parent.mkdir(exist_ok=True)
    with replace_file(path) as file:
      named: dict[str, Any] = {**arrays}  # for type checkers, a key may be savez's `allow_pickle`
      np.savez(file, **named)

  def write_stage(self, step: int, length: int) -> None:
    """Writes the record of a stage of `length` updates that ends with this step."""
    if self._lines:
      self.write(step, "stage", stage_summary(self.workdir, step, length))

  def written(self, step: int) -> dict[str, Sequence[int]]:
    """Syncs the records to disk; returns, for a checkpoint, how much of each file to keep.

    For each file, the result has the size and the checksum of the records up to `step`. Later
    records belong to an update that was prepared but not performed.
    """
    found: dict[str, Sequence[int]]
    found = {name: records.written(step) for name, records in self._lines.items()}
    self._publish()
    return found

  def close(self) -> None:
    """Closes the files."""
    for records in self._lines.values():
      records.close()
    for writer in self._others:
      writer.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def open_writer(
  workdir: str | os.PathLike[str],
  last_step: int | None = None,
  written: Mapping[str, Sequence[int]] | None = None,
  *,
  trackers: Sequence[Writer] = (),
  publish: Callable[[], None] = lambda: None,
  kept: str | os.PathLike[str] | None = None,
) -> MetricWriter:
  """A writer of the files of `workdir`; a killed and resumed run ends with the same files.

  Args:
    workdir: created if needed.
    last_step: the last step whose records are kept; `BEFORE_FIRST_STEP` keeps only the warm start's
      records; None keeps no record.
    written: the result of `MetricWriter.written` from when the checkpoint of `last_step` was saved.
    trackers: writers that get a copy of every number.
    publish: see `MetricWriter`.
    kept: the final folder of the files, for messages; None for `workdir`.
  """
  folder = pathlib.Path(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  lines = {
    name: Records(
      folder / name, last_step, (written or {}).get(name), os.path.join(kept or workdir, name)
    )
    for name in (METRICS_FILE, ROLLOUTS_FILE)
  }
  board = TensorBoard(folder / TENSORBOARD_FOLDER, last_step)
  return MetricWriter(folder, lines, [board, *trackers], publish)


class Records:
  """Appends records to a file of lines.

  A checkpoint stores the size in bytes, and the checksum, of the records up to its step. A resumed
  run cuts the file to this size, since it writes the later records again.
  """

  def __init__(
    self, path: pathlib.Path, last_step: int | None, written: Sequence[int] | None, shown: str
  ):
    """Opens or creates the file; if it was damaged, says so and keeps the records that are left.

    Args:
      path: the path of the file.
      last_step: the last step whose records are kept; None: no record is kept.
      written: the result of `written` when the checkpoint was saved; None: an empty file.
      shown: path for messages.
    """
    size, checksum = written or (0, 0)
    data = path.read_bytes() if path.exists() else b""
    lines, kept = data[:size].splitlines(keepends=True), size
    if len(data) < size or zlib.crc32(data[:size]) != checksum:
      lines = [line for line in read_lines(path) if _is_until(line, last_step)]
      damaged = _move_away(path)
      say(
        f"{shown} differs from what the checkpoint recorded: {size:,} bytes with another checksum."
        f" The run goes on with the {len(lines)} records that are left"
        + (f"; the old file is {shown}{damaged}" if damaged else ", since the file was removed")
      )
      kept = sum(map(len, lines))
    replace_lines(path, lines)
    self._lines = JsonLines(path)
    self._end = kept, zlib.crc32(b"".join(lines))  # bytes, and their checksum
    self._ends = {BEFORE_FIRST_STEP if last_step is None else last_step: self._end}

  def append(self, step: int, phase: str, records: Sequence[Mapping[str, JSON]]) -> None:
    """Appends one line per record, {"step", "phase", values…}.

    Raises:
      DiskFullError: no space is left.
    """
    with_step = [{"step": step, "phase": phase, **record} for record in records]
    for line in self._lines.append(with_step):
      size, checksum = self._end
      self._end = size + len(line), zlib.crc32(line, checksum)
    self._ends[BEFORE_FIRST_STEP if phase == WARM_START else step] = self._end

  def written(self, step: int) -> tuple[int, int]:
    """Syncs the file to disk; returns (bytes, checksum) of the records up to a step."""
    os.fsync(self._lines.fileno())
    return self._ends[max(number for number in self._ends if number <= step)]

  def close(self) -> None:
    """Closes the file."""
    self._lines.close()


def _is_until(line: bytes, step: int | None) -> bool:
  """Whether a line is a complete record of this or an earlier step, or of the warm start."""
  record = parse_line(line) if line.endswith(b"\n") else None
  if record is None or step is None or type(record.get("step")) is not int:
    return False
  return record.get("phase") == WARM_START or record["step"] <= step


def _move_away(path: pathlib.Path) -> str:
  """Renames a file to a free name, and returns the suffix that it added; "" without a file."""
  if not path.exists():
    return ""
  names = (f"{path.name}.damaged-{k}" for k in itertools.count(1))
  moved = path.rename(next(p for p in map(path.with_name, names) if not p.exists()))
  return moved.name.removeprefix(path.name)


class TensorBoard:
  """Writes TensorBoard's event files: one folder per phase, since each phase counts its own steps.

  `tensorboardX.SummaryWriter` passes events to a thread that dies on a full disk, and the next
  caller then waits for it indefinitely; here the caller gets the error.
  """

  def __init__(self, folder: pathlib.Path, last_step: int | None):
    """Makes TensorBoard hide events after `last_step` in earlier files; None: all their events."""
    self._folder, self._last_step = folder, last_step
    self._files: dict[str, EventsWriter] = {}

  def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
    """Appends one event of numbers.

    Raises:
      DiskFullError: no space is left.
    """
    with report_full_disk(self._folder):
      if phase not in self._files:
        self._files[phase] = self._open(phase)
      event = Event(wall_time=time.time(), step=step)
      for name, value in values.items():
        # TensorBoard does not allow "@" in a name, and would print a warning for each name.
        event.summary.MergeFrom(summary.scalar(name.replace("@", "_at_"), value))
      self._files[phase].write_event(event)
      self._files[phase].flush()

  def _open(self, phase: str) -> EventsWriter:
    """Opens a new file; its first event names the first step that is hidden in earlier files."""
    folder, last = self._folder / phase, self._last_step
    folder.mkdir(parents=True, exist_ok=True)
    purge = 0 if last is None else max(last + 1, 0)
    # File names have a resolution of one second; a quick restart must not overwrite.
    file = EventsWriter(str(folder / "events"), f".from-{purge}")
    if phase != WARM_START or last is None:
      session = SessionLog(status=SessionLog.START)
      file.write_event(Event(wall_time=time.time(), step=purge, session_log=session))
    return file

  def close(self) -> None:
    """Closes the files."""
    for file in self._files.values():
      file.close()


class Tracker:
  """A run of wandb, or of trackio, which has the same functions.

  After its first error, which is printed, the tracker gets no more metrics; the run continues.
  """

  def __init__(self, name: str, workdir: pathlib.Path, config: Mapping[str, JSON]):
    """Opens the run of this workdir, or resumes it.

    Args:
      name: the name of the tracker.
      workdir: the workdir of the run.
      config: the run's configuration; JSON.

    Raises:
      ValueError: the tracker is unknown, or not installed.
    """
    check_tracker(name)
    self.name, self._failed = name, False
    module = importlib.import_module(name)
    identity = _tracked_id(workdir)
    if name == "wandb":  # a run has an id besides its name
      specific = {"id": identity, "name": workdir.name, "dir": str(workdir)}
    else:
      specific = {"name": f"{workdir.name}-{identity}"}
    self._run = module.init(project="rlvr_jax", resume="allow", config=dict(config), **specific)

  def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
    """Sends the numbers of one record; every phase has its own counter, such as train/step."""
    if self._failed:
      return
    try:
      of_phase = {name.removeprefix(f"{phase}/"): value for name, value in values.items()}
      named = {f"{phase}/{name}": value for name, value in {"step": step, **of_phase}.items()}
      self._run.log(named)
    except Exception as error:  # the tracker's network, disk or site has failed
      self._failed = True
      warn(f"{self.name} gets no more metrics of this run: {error}; metrics.jsonl has all metrics")

  def close(self) -> None:
    """Waits until all logged numbers have been sent."""
    self._run.finish()


def check_tracker(name: str) -> None:
  """Raises ValueError unless the tracker is known and installed."""
  if name not in TRACKERS:
    raise ValueError(f"--trackers={name} is unknown; allowed: {', '.join(TRACKERS)}")
  if importlib.util.find_spec(name) is None:
    raise ValueError(f'--trackers={name} is not installed: pip install "rlvr_jax[{name}]"')


def _tracked_id(workdir: pathlib.Path) -> str:
  path = workdir / TRACKED_FILE
  if not path.exists():
    with replace_file(path) as file:
      file.write(json.dumps({"id": uuid.uuid4().hex[:8]}).encode())
  identity: str = json.loads(path.read_text())["id"]
  return identity


def _plain(value: object) -> float | str:
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
  """Means of metrics over a stage's updates; maxima or minima if the name has "max" or "min"."""
  records = [
    record
    for record in read_metrics(workdir)
    if record["phase"] == "train" and step - length < record["step"] <= step
  ]
  chosen = ("veto/", "behavior/", "staleness/", "loss/", "policy/", "reward/", "stage/number")
  reduce = {"max": max, "min": min}
  found = {}
  for name in dict.fromkeys(name for record in records for name in record):
    if name.startswith(chosen):
      how = next((reduce[part] for part in re.split("[/_]", name) if part in reduce), np.mean)
      found[name] = float(how([record[name] for record in records if name in record]))
  return found
