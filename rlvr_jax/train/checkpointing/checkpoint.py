"""Saves, keeps and restores checkpoints; survives kills, corrupted files and full disks.

Orbax writes into a temporary directory and renames it at the end, so that a step directory is
complete or absent. In a bucket, a step is complete once orbax has written its last object,
`COMMITTED`. The checksums of `checkpoint_files` detect later damage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp

from rlvr_jax.storage.files import JSON, DiskFullError, is_disk_full, replace_file, shortage
from rlvr_jax.storage.places import Workdir, make_absolute, open_bucket, parse_path
from rlvr_jax.train.checkpointing.checkpoint_files import (
  COMMITTED,
  MANIFEST,
  CheckpointError,
  Restored,
  TornCheckpointError,
  items_to_save,
  read_manifest,
  read_state,
  saved_steps,
  shorten_error,
  silence_orbax,
  verify_state,
  with_metric,
)
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.reporting.progress import warn
from rlvr_jax.types import Array

_REMOVED = "removed"  # folder into which checkpoints are moved before they are deleted
_DAMAGED = "damaged-"  # prefix of the names of damaged checkpoints that a run has skipped
# No time limit for orbax: it uses the wall clock, so setting the clock would end a save.
# `process.deadline` ends a save that hangs. Folders are made synchronously, since waiting for them
# has another time limit.
_WAITS = ocp.AsyncOptions(timeout_secs=10**9, create_directories_asynchronously=False)
_SPARE_BYTES = 4 * 2**20  # space for the manifest and orbax's files


class Checkpointer:
  """Asynchronous, atomic checkpoints of a training run; keeps the latest and the best."""

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    keep: int = 2,
    workdir: Workdir | None = None,
    short_lived: bool = False,
  ):
    """Opens or creates `directory`, and removes files that a killed save left behind.

    Args:
      directory: contains one directory per saved step, damaged steps included; may be in a
        bucket.
      keep: number of latest checkpoints to keep, ≥ 1. The checkpoint with the highest `metric` is
        kept, too, and the checkpoint that `keep_at_or_before` of `save` selects.
      workdir: the workdir of the run; its claim is checked before objects in a bucket are removed.
      short_lived: whether arrays are written quickly, neither compressed nor joined into few files.
    """
    if keep < 1:
      raise ValueError(f"keep = {keep}: at least one checkpoint must be kept; set keep >= 1.")
    silence_orbax()
    self.directory = make_absolute(parse_path("the folder of checkpoints", directory))
    self._bucket = open_bucket(self.directory, workdir)
    self._keep, self._return_to = keep, -1
    # All processes use the list of the first process, which may be removing files now.
    found = multihost.result_of_first(self._open)
    # Metrics by step, of the complete checkpoints and of the checkpoint that is being written.
    self._metrics: dict[int, float | None] = dict(map(tuple, found))
    self._writing: dict[int, float | None] = {}
    self._damaged: set[int] = set()  # steps of damaged checkpoints that `intact` has found
    self._writer = ocp.AsyncCheckpointer(
      ocp.CompositeCheckpointHandler(
        arrays=ocp.PyTreeCheckpointHandler(
          use_compression=not short_lived, use_ocdbt=not short_lived
        ),
        manifest=ocp.JsonCheckpointHandler(),
        composite_options=ocp.CompositeOptions(async_options=_WAITS),
      ),
      async_options=_WAITS,
    )

  def steps(self) -> list[int]:
    """The steps of the complete checkpoints, ascending."""
    return sorted(self._metrics)

  def save(
    self,
    step: int,
    state: object,
    *,
    host: Mapping[str, JSON],
    arrays: Mapping[str, np.ndarray] | None = None,
    metric: float | None = None,
    keep_at_or_before: int | None = None,
  ) -> bool:
    """Starts saving: copies the state, then writes files in the background.

    The caller may donate `state` and change `arrays` as soon as this returns. Blocks while an
    earlier save is still being written; if the earlier save has failed, its error is raised here.

    Args:
      step: number of updates so far.
      state: pytree of jax arrays, with any sharding.
      host: JSON values such as counters (string keys, finite nesting), restored exactly.
      arrays: the host's arrays by name, such as scores of pending rollouts.
      metric: the metric by which the best step is kept; None if it was not measured.
      keep_at_or_before: the latest saved step at or before this step is also kept until the next
        save, so that the run can go back to it.
    Returns:
      False if the step was already saved, else True. If the step was saved without a metric, and
      `metric` is given, the saved step gets `metric` and `host`.
    Raises:
      DiskFullError: too little space; earlier checkpoints are untouched.
      CheckpointError: the earlier save failed.
    """
    self.wait()
    if step in self._metrics:
      if metric is not None and self._metrics[step] is None:  # the evaluation was interrupted
        self._metrics[step] = metric
        self._amend(step, host, metric)
      return False
    values, manifest = items_to_save(step, state, host=host, arrays=arrays or {}, metric=metric)
    self._check_space(values)
    if self._bucket is not None:
      self._bucket.allowed_s()  # checked here, since orbax writes the objects without the guard
    self._return_to = -1 if keep_at_or_before is None else keep_at_or_before
    with self._convert_errors():
      self._writer.save(
        self.directory / str(step),
        args=ocp.args.Composite(
          arrays=ocp.args.PyTreeSave(values), manifest=ocp.args.JsonSave(manifest)
        ),
      )
    self._writing = {step: metric}
    return True

  def restore(self, abstract_state: object) -> Restored | None:
    """Loads the latest intact checkpoint; None if nothing is saved. For arguments see `intact`."""
    return next(self.intact(abstract_state), None)

  def intact(self, abstract_state: object) -> Iterator[Restored]:
    """Yields the intact checkpoints, the latest first; a warning names each damaged checkpoint.

    Args:
      abstract_state: the state's structure: a pytree of `jax.ShapeDtypeStruct` (or of arrays), with
        the shardings to restore, which may differ from the saved shardings.
    Raises:
      TornCheckpointError: there are checkpoints, and all are damaged.
      ForeignCheckpointError: a checkpoint is of another program, or of a state with another
        structure.
    """
    self.wait()
    steps = self.steps()
    for step in reversed(steps):
      try:
        restored = self._read(step, abstract_state)
      except TornCheckpointError as error:
        self._damaged.add(step)
        if self._damaged.issuperset(steps):
          raise TornCheckpointError(
            f"{error}. {self.directory} has no intact checkpoint; remove that folder and rerun to"
            " start from the beginning."
          ) from error
        warn(f"{error}; the run goes on from an earlier checkpoint")
        continue
      yield restored
      del restored  # free its memory before an earlier checkpoint is read

  def _read(self, step: int, abstract_state: object) -> Restored:
    """Loads a checkpoint; if one process finds damage, all processes raise TornCheckpointError."""
    folder = self.directory / str(step)
    remedy = "Use the configuration of the run that saved it, or another --workdir."
    with _damage_of_any():
      found = read_state(folder, abstract_state, if_other=remedy, verifies=False)
    with _damage_of_any():
      verify_state(folder, found.state)
    return found

  def discard_after(self, step: int) -> None:
    """Removes checkpoints after `step`, the latest first.

    On a disk, damaged checkpoints are only renamed.
    """
    later = [number for number in reversed(self.steps()) if number > step]
    with self._convert_errors():
      multihost.run_on_first(lambda: self._remove(later), None)
    self._metrics = {number: x for number, x in self._metrics.items() if number <= step}
    self._damaged.clear()

  def check(self) -> None:
    """Raises the error of the current save if it has failed; does not wait for the save."""
    with self._convert_errors():
      try:
        self._writer.check_for_errors()
      except BaseException:
        self._writing = {}  # the step is not complete, and the error is raised once
        raise

  def wait(self) -> None:
    """Blocks until the current save is committed, and removes checkpoints that are not kept.

    Raises:
      DiskFullError, CheckpointError: the save has failed.
    """
    with self._convert_errors():
      writing, self._writing = self._writing, {}
      self._writer.wait_until_finished()
      if not writing:
        return
      self._metrics |= writing
      kept = self._kept()
      if jax.process_index() == 0:
        self._remove(step for step in self.steps() if step not in kept)
      self._metrics = {step: self._metrics[step] for step in kept}

  def close(self) -> None:
    """Waits as `wait` does, then ends the background threads."""
    try:
      self.wait()
    finally:
      with self._convert_errors():
        self._writer.close()

  def _kept(self) -> set[int]:
    """The steps to keep: the latest, the best (the earliest of equals), and one to go back to."""
    steps = self.steps()
    scored = [(x, -step) for step, x in self._metrics.items() if x is not None and x == x]
    best = [-max(scored)[1]] if scored else []
    before = [step for step in steps if step <= self._return_to][-1:]
    return {*steps[-self._keep :], *best, *before}

  def _amend(self, step: int, host: Mapping[str, JSON], metric: float) -> None:
    """Adds a metric to a saved checkpoint, and replaces its host values."""
    if jax.process_index() != 0:
      return
    with self._convert_errors():
      data = with_metric(read_manifest(self.directory / str(step)), host, metric)
      if self._bucket is not None:
        self._bucket.put(f"{step}/{MANIFEST}", data)
        return
      with replace_file(self.directory / str(step) / MANIFEST) as file:
        file.write(data)

  # --- the folder, in the first process -----------------------------------------------------------

  def _open(self) -> list[tuple[int, float | None]]:
    """Removes files left by killed saves and removals; returns (step, metric) of the checkpoints.

    Checkpoints whose manifest cannot be read have no metric; `intact` reports them.
    """
    if self._bucket is not None:
      names = self._bucket.names()
      complete = {name.partition("/")[0] for name in names if name.partition("/")[2] == COMMITTED}
      self._bucket.delete_all(n for n in names if n.partition("/")[0] not in complete)
    else:
      self.directory.mkdir(parents=True, exist_ok=True)
      for path in [self.directory / _REMOVED, *self.directory.glob("*.orbax-checkpoint-tmp*")]:
        with contextlib.suppress(FileNotFoundError):
          shutil.rmtree(path)
    found: list[tuple[int, float | None]] = []
    for step in saved_steps(self.directory):
      metric = None
      # `intact` reports a damaged manifest; errors of other types are raised here.
      with contextlib.suppress(CheckpointError, ValueError, KeyError, FileNotFoundError):
        metric = read_manifest(self.directory / str(step))["metric"]
      found.append((step, metric))
    return found

  def _remove(self, steps: Iterable[int]) -> None:
    """Removes checkpoints; even after a kill, no partly removed checkpoint looks complete."""
    for step in steps:
      if self._bucket is not None:
        self._bucket.delete(f"{step}/{COMMITTED}")
        self._bucket.delete_all(self._bucket.names(f"{step}/"))
      elif step in self._damaged:
        free = (self.directory / f"{_DAMAGED}{step}.{k}" for k in range(10**6))
        (self.directory / str(step)).rename(next(path for path in free if not path.exists()))
      else:
        (self.directory / _REMOVED).mkdir(exist_ok=True)
        (self.directory / str(step)).rename(self.directory / _REMOVED / str(step))
        shutil.rmtree(self.directory / _REMOVED)

  def _check_space(self, values: Mapping[str, Array | np.ndarray]) -> None:
    """Raises DiskFullError if the disk has too little space for these arrays."""
    if self._bucket is not None:
      return
    need = sum(x.nbytes for x in values.values()) + _SPARE_BYTES
    if detail := shortage(self.directory, need):
      raise DiskFullError(errno.ENOSPC, self._full_disk_message(detail))

  @contextlib.contextmanager
  def _convert_errors(self) -> Iterator[None]:
    """Converts errors of orbax into DiskFullError or CheckpointError, which name the folder."""
    try:
      yield
    except Exception as error:
      if is_disk_full(error):
        message = self._full_disk_message("the disk became full while writing a checkpoint")
        raise DiskFullError(errno.ENOSPC, message) from error
      raise CheckpointError(f"saving to {self.directory} failed: {shorten_error(error)}") from error

  def _full_disk_message(self, detail: str) -> str:
    steps = saved_steps(self.directory)
    outcome = f"resumes from step {max(steps)}" if steps else "starts from the beginning"
    return (
      f"no space for a checkpoint in {self.directory}: {detail}. Earlier checkpoints are untouched."
      " Free some space or lower the number of checkpoints kept, then rerun: the run"
      f" {outcome}."
    )


@contextlib.contextmanager
def _damage_of_any() -> Iterator[None]:
  """Context that, at its end, raises the TornCheckpointError of one process in all processes."""
  try:
    yield
  except TornCheckpointError as error:
    multihost.exchange(str(error))
    raise
  if damage := next(filter(None, multihost.exchange("")), ""):
    raise TornCheckpointError(damage)
