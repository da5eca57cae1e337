"""Saves, keeps and restores checkpoints; survives kills, corrupted files and full disks.

Orbax writes into a temporary directory and renames it at the end, so that a step directory is
complete or absent; in a bucket it is complete if it has the last object, `COMMITTED`. The checksums
of `checkpoint_files` detect later damage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from rlvr_jax.storage.files import DiskFullError, is_disk_full, replace_file, shortage
from rlvr_jax.storage.places import Workdir, make_absolute, open_bucket, parse_path
from rlvr_jax.train.checkpointing.checkpoint_files import (
  COMMITTED,
  MANIFEST,
  CheckpointError,
  TornCheckpointError,
  items_to_save,
  read_manifest,
  read_state,
  saved_steps,
  shorten_error,
  silence_orbax,
  with_metric,
)
from rlvr_jax.train.cluster import multihost

_REMOVED = "removed"  # folder of checkpoints to be deleted; never the name of a step
# Orbax measures its waits by the wall clock: one that is set would end a save. What hangs ends by
# `process.deadline`. The wait for folders that are made asynchronously has a limit of its own.
_WAITS = ocp.AsyncOptions(timeout_secs=10**9, create_directories_asynchronously=False)
_SPARE_BYTES = 4 * 2**20  # space for the manifest and orbax's files


class Restored(NamedTuple):
  """A checkpoint read by `Checkpointer.restore`."""

  step: int
  state: Any  # as saved, with the shardings of `abstract_state`
  host: dict[str, Any]
  arrays: Any  # the tree passed to `save`, with tuples as lists; or None


class Checkpointer:
  """Asynchronous, atomic checkpoints of a training run; keeps the latest ones and the best one."""

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    keep: int = 2,
    workdir: Workdir | None = None,
    short_lived: bool = False,
  ):
    """Opens or creates `directory`, and removes what a killed save left behind.

    Args:
      directory: contains one directory per saved step and nothing else; may be in a bucket.
      keep: number of latest checkpoints to keep, ≥ 1; the one with the highest `metric` is kept
        too, as is that of `keep_at_or_before` in `save`.
      workdir: the run's, whose claim is checked before objects of a bucket are removed.
      short_lived: whether arrays are written quickly, neither compressed nor joined into few files.
    """
    if keep < 1:
      raise ValueError(f"keep = {keep}: at least one checkpoint must be kept; set keep >= 1.")
    silence_orbax()
    self.directory = make_absolute(parse_path("the folder of checkpoints", directory))
    self._bucket = open_bucket(self.directory, workdir)
    self._remove_leftovers()
    self._policy = _Preservation(keep, self._read_scores(), by_orbax=self._bucket is None)
    self._removed: set[int] = set()  # steps that orbax does not know are gone
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self._policy,
        save_root_metadata=False,
        # A kill during removal would leave an incomplete checkpoint that looks like a step. So
        # checkpoints are renamed first, atomically, and removed before the next save.
        todelete_subdir=_REMOVED,
        async_options=_WAITS,
      ),
      item_handlers={
        "arrays": ocp.PyTreeCheckpointHandler(
          use_compression=not short_lived, use_ocdbt=not short_lived
        ),
        "manifest": ocp.JsonCheckpointHandler(),
      },
    )

  def steps(self) -> list[int]:
    """The saved steps, ascending."""
    return sorted(set(self._manager.all_steps()) - self._removed)

  def save(
    self,
    step: int,
    state: Any,
    *,
    host: Mapping[str, Any],
    arrays: Any = None,
    metric: float | None = None,
    keep_at_or_before: int | None = None,
  ) -> bool:
    """Starts saving and returns once everything is copied; files are written in the background.

    The caller may donate `state` and change `arrays` as soon as this returns. Blocks while an
    earlier save is still being written; its error, if any, is raised here.

    Args:
      step: number of updates so far.
      state: pytree of jax arrays, with any sharding.
      host: JSON values (string keys, finite nesting), restored exactly, such as counters.
      arrays: nested dicts and lists of NumPy arrays, such as scores of pending rollouts, whose
        structure may change from step to step; None for no arrays.
      metric: the step with the highest metric is kept; None if it was not measured.
      keep_at_or_before: the greatest saved step ≤ this one is kept too, until the next save, so
        that the run can go back to it.
    Returns:
      False if the step was already saved, else True. If a saved step had no metric, `metric` and
      `host` are added to it.
    Raises:
      DiskFullError: too little space; earlier checkpoints are untouched.
      CheckpointError: the earlier save failed.
    """
    self.wait()
    old_metric = self._policy.scores.get(step)
    if metric is not None:
      self._policy.scores[step] = metric
    if step in self.steps():
      if old_metric is None and metric is not None:  # a shutdown had interrupted the evaluation
        self._amend(step, host, metric)
      return False
    values, manifest = items_to_save(step, state, host=host, arrays=arrays, metric=metric)
    self._check_space(values)
    if self._bucket is not None:
      self._bucket.allowed_s()  # checked here, since orbax writes the objects without the guard
    self._policy.keep_for_return(keep_at_or_before)
    # Orbax does not accept empty arrays; the manifest has their shape and dtype.
    stored = {name: value for name, value in values.items() if value.size}
    with self._convert_errors():
      self._manager.save(
        step,
        args=ocp.args.Composite(
          arrays=ocp.args.PyTreeSave(stored), manifest=ocp.args.JsonSave(manifest)
        ),
        force=True,
      )
    return True

  def restore(self, abstract_state: Any, *, step: int | None = None) -> Restored | None:
    """Loads a checkpoint and verifies every leaf; None if `step` is None and nothing is saved.

    Args:
      abstract_state: the state's structure: a pytree of `jax.ShapeDtypeStruct` with shardings
        (or of arrays), which may differ from those of the saved state.
      step: one of `steps()`; None for the latest.
    Raises:
      CheckpointError: there is no checkpoint of this step.
      TornCheckpointError: files are truncated, changed or missing; the message names all damaged
        checkpoints after the latest intact one.
      ForeignCheckpointError: the checkpoint is of another program, or of a state with another
        structure.
    """
    self.wait()
    steps = self.steps()
    if step is None and not steps:
      return None
    if step is not None and step not in steps:
      raise CheckpointError(f"{self.directory} has no checkpoint of step {step}, only of {steps}.")
    step = steps[-1] if step is None else step
    try:
      return self._read(step, abstract_state)
    except TornCheckpointError as error:
      messages = [str(error)]  # not the error itself, which refers to the arrays that were read
    remedy = "start from the beginning"
    for earlier in reversed([s for s in steps if s < step]):
      if jax.process_count() > 1:  # perhaps only this process failed, so none may read alone
        remedy = f"fall back to step {earlier}, unless that is damaged too"
        break
      try:
        self._read(earlier, abstract_state)
      except CheckpointError as error:
        messages.append(str(error))
      else:
        remedy = f"fall back to step {earlier}"
        break
    directories = "that directory" if len(messages) == 1 else "these directories"
    raise TornCheckpointError(f"{'; '.join(messages)}. Remove {directories} and rerun to {remedy}.")

  def _read(self, step: int, abstract_state: Any) -> Restored:
    remedy = "Use the configuration of the run that saved it, or another --workdir."
    folder = self.directory / str(step)
    return Restored(step, *read_state(folder, abstract_state, if_other=remedy))

  def discard_after(self, step: int) -> None:
    """Removes the checkpoints later than `step`, the latest first."""
    with self._convert_errors():
      discarded = [later for later in reversed(self.steps()) if later > step]
      if self._bucket is None:
        for later in discarded:
          self._manager.delete(later)
      else:
        multihost.run_on_first(lambda: self._remove_objects(discarded), None)
        self._manager.reload()
        self._removed.clear()
    self._remove_leftovers()

  def check(self) -> None:
    """Raises the error of the current save if that has failed; does not wait for it."""
    with self._convert_errors():
      self._manager.check_for_errors()

  def wait(self) -> None:
    """Blocks until the current save is committed; raises its error."""
    with self._convert_errors():
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
      if self._bucket is not None:
        preserved = self._policy.preserved_steps(self.steps())
        self._remove_objects([step for step in self.steps() if step not in preserved])
    self._remove_leftovers()

  def close(self) -> None:
    """`wait`, then ends the background threads."""
    try:
      self.wait()
    finally:
      with self._convert_errors():
        self._manager.close()

  def _amend(self, step: int, host: Mapping[str, Any], metric: float) -> None:
    """Adds a metric, and new values of the host, to a saved checkpoint."""
    if jax.process_index() != 0:
      return
    with self._convert_errors():
      data = with_metric(read_manifest(self.directory / str(step)), host, metric)
      if self._bucket is not None:
        self._bucket.put(f"{step}/{MANIFEST}", data)
        return
      with replace_file(self.directory / str(step) / MANIFEST) as file:
        file.write(data)

  def _remove_leftovers(self) -> None:
    """Removes old checkpoints and what killed saves left; call it while no save is running.

    Orbax has an option for the latter, but does it in the background, with no way to wait for it.
    """
    if jax.process_index() != 0:
      return
    if self._bucket is not None:
      names = self._bucket.names()
      complete = {name.partition("/")[0] for name in names if _is_commit(name)}
      self._bucket.delete_all(n for n in names if n.partition("/")[0] not in complete)
      return
    for path in [self.directory / _REMOVED, *self.directory.glob("*.orbax-checkpoint-tmp*")]:
      with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)

  def _remove_objects(self, steps: Sequence[int]) -> None:
    """Removes checkpoints from a bucket.

    Orbax would remove their objects in any order, so that a kill could leave a damaged checkpoint
    that looks complete. Here the object that marks it as complete is removed first.
    """
    self._removed.update(steps)
    if self._bucket is None or jax.process_index() != 0:
      return
    for step in steps:
      self._bucket.delete(f"{step}/{COMMITTED}")
      self._bucket.delete_all(self._bucket.names(f"{step}/"))

  def _read_scores(self) -> dict[int, float | None]:
    """The metric of each saved step, without unreadable ones, which `restore` reports."""
    scores: dict[int, float | None] = {}
    for step in saved_steps(self.directory):
      with contextlib.suppress(Exception):
        scores[step] = read_manifest(self.directory / str(step))["metric"]
    return scores

  def _check_space(self, values: Mapping[str, Any]) -> None:
    """Raises DiskFullError if the disk has too little space for these arrays."""
    if self._bucket is not None:
      return
    need = sum(x.nbytes for x in values.values()) + _SPARE_BYTES
    if detail := shortage(self.directory, need):
      raise DiskFullError(errno.ENOSPC, self._full_disk_message(detail))

  @contextlib.contextmanager
  def _convert_errors(self) -> Iterator[None]:
    """Converts orbax's errors into ours, which say how to fix them."""
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


class _Preservation(ocp.checkpoint_managers.PreservationPolicy):
  """Keeps the last `keep` steps, the best one, and the last step at or before a chosen one.

  The best step is the one with the highest score; of equal scores, the earliest.
  """

  def __init__(self, keep: int, scores: dict[int, float | None], *, by_orbax: bool):
    """`by_orbax`: whether orbax removes the other steps; see `Checkpointer._remove_objects`."""
    self.scores = scores
    self._keep = keep
    self._by_orbax = by_orbax
    self._return_to: int | None = None  # set by each save

  def keep_for_return(self, at_or_before: int | None) -> None:
    """Keeps the greatest step ≤ this one, until the next call; see `Checkpointer.save`."""
    self._return_to = at_or_before

  def best_step(self, steps: Sequence[int]) -> int | None:
    """The step with the highest score; None if none has a score."""
    scores = ((self.scores.get(step), step) for step in steps)
    scored = [(score, -step) for score, step in scores if score is not None and score == score]
    return -max(scored)[1] if scored else None

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    del context
    steps = [info.step for info in checkpoints]
    preserved = self.preserved_steps(steps) if self._by_orbax else steps
    return [step in preserved for step in steps]

  def preserved_steps(self, steps: Sequence[int]) -> set[int | None]:
    """The saved steps that are kept."""
    preserved = {*sorted(steps)[-self._keep :], self.best_step(steps)}
    if self._return_to is not None:
      preserved.add(max((step for step in steps if step <= self._return_to), default=None))
    return preserved


def _is_commit(name: str) -> bool:
  return name.partition("/")[2] == COMMITTED
