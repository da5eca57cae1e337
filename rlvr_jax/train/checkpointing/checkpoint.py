"""Saving, keeping and restoring checkpoints, robust to kills, corrupted files and full disks.

Orbax writes into a temporary directory and renames it at the end, so that a step directory is
complete or absent; in a bucket it is complete if it has a last object, `COMMITTED`. The checksums
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

from rlvr_jax.storage.files import DiskFullError, is_disk_full, replacing, shortage
from rlvr_jax.storage.places import Workdir, absolute, bucket_of, place
from rlvr_jax.train.checkpointing.checkpoint_files import (
  COMMITTED,
  MANIFEST,
  CheckpointError,
  TornCheckpointError,
  items_to_save,
  read_manifest,
  read_state,
  saved_steps,
  short,
  silence_orbax,
  with_metric,
)
from rlvr_jax.train.cluster import multihost

_REMOVED = "removed"  # folder of checkpoints to be deleted; cannot be the name of a step
_SPARE_BYTES = 4 * 2**20  # space for the manifest and orbax's own files


class Restored(NamedTuple):
  """A checkpoint that `Checkpointer.restore` has read."""

  step: int
  state: Any  # as saved, with the shardings of `abstract_state`
  host: dict[str, Any]
  arrays: Any  # the tree given to `save`, with tuples as lists; None if none was given


class Checkpointer:
  """Asynchronous, atomic checkpoints of a training run; keeps the latest ones and the best one."""

  def __init__(
    self, directory: str | os.PathLike[str], *, keep: int = 2, workdir: Workdir | None = None
  ):
    """Opens or creates `directory`, and removes what a killed save left behind.

    Args:
      directory: has one directory per saved step, and nothing else; may be in a bucket.
      keep: number of latest checkpoints to keep, ≥ 1; the one with the highest `metric`, and one
        that `save` chooses, are kept too.
      workdir: of the run, whose claim is checked before objects of a bucket are removed.
    """
    if keep < 1:
      raise ValueError(f"keep = {keep}: at least one checkpoint must be kept; set keep >= 1.")
    silence_orbax()
    self.directory = absolute(place("the folder of checkpoints", directory))
    self._bucket = bucket_of(self.directory, workdir)
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
      ),
      item_handlers={
        "arrays": ocp.PyTreeCheckpointHandler(),
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
    """Starts saving and returns when everything is copied; the files are written in background.

    The caller may donate `state` and change `arrays` as soon as this returns. Blocks while an
    earlier save is still being written; its error, if any, is raised here.

    Args:
      step: number of updates so far.
      state: pytree of jax arrays, with any sharding.
      host: JSON values (string keys, finite nesting) that restore exactly, such as counters.
      arrays: nested dicts and lists of NumPy arrays, whose structure may change from step to step,
        such as scores of pending rollouts; None for no arrays.
      metric: the step with the highest metric is kept; None if it was not measured.
      keep_at_or_before: the greatest saved step ≤ this one is kept too, until the next save, so
        that the run can go back to it.
    Returns:
      False if the step is already saved, else True. A saved step that had no metric and now has
      one gets it, and `host`; otherwise nothing is done.
    Raises:
      DiskFullError: too little space; earlier checkpoints are untouched.
      CheckpointError: the earlier save failed.
    """
    self.wait()
    known = self._policy.scores.get(step)
    if metric is not None:
      self._policy.scores[step] = metric
    if step in self.steps():
      if known is None and metric is not None:  # the run was asked to end within the evaluation
        self._amend(step, host, metric)
      return False
    values, manifest = items_to_save(step, state, host=host, arrays=arrays, metric=metric)
    self._check_space(values)
    if self._bucket is not None:
      self._bucket.allowed_s()  # orbax, which writes the objects, knows nothing of claims
    self._policy.keep_for_return(keep_at_or_before)
    # Orbax does not accept arrays without elements; the manifest has their shape and dtype.
    stored = {name: value for name, value in values.items() if value.size}
    with self._reporting_failures():
      self._manager.save(
        step,
        args=ocp.args.Composite(
          arrays=ocp.args.PyTreeSave(stored), manifest=ocp.args.JsonSave(manifest)
        ),
        force=True,
      )
    return True

  def restore(self, abstract_state: Any, *, step: int | None = None) -> Restored | None:
    """Loads a checkpoint and verifies every leaf; None if `step` is None and there is none.

    Args:
      abstract_state: the state's structure: a pytree of `jax.ShapeDtypeStruct` with shardings
        (or of arrays), which may differ from the shardings that were saved.
      step: one of `steps()`; None for the latest.
    Raises:
      CheckpointError: there is no checkpoint of this step.
      TornCheckpointError: files are truncated, changed or missing; the message names all such
        checkpoints, up to the last one that is intact.
      ForeignCheckpointError: not a checkpoint of this package, or of a state with another
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
      damaged = [str(error)]  # not the error, which refers to what has been read
    then = "start from the beginning"
    for earlier in reversed([s for s in steps if s < step]):
      if jax.process_count() > 1:  # of which only this one may have failed
        then = f"fall back to step {earlier}, unless that is damaged too"
        break
      try:
        self._read(earlier, abstract_state)
      except CheckpointError as error:
        damaged.append(str(error))
      else:
        then = f"fall back to step {earlier}"
        break
    which = "that directory" if len(damaged) == 1 else "these directories"
    raise TornCheckpointError(f"{'; '.join(damaged)}. Remove {which} and rerun to {then}.")

  def _read(self, step: int, abstract_state: Any) -> Restored:
    other = "Use the configuration of the run that saved it, or another --workdir."
    folder = self.directory / str(step)
    return Restored(step, *read_state(folder, abstract_state, if_other=other))

  def discard_after(self, step: int) -> None:
    """Removes the checkpoints later than `step`, the last one first."""
    with self._reporting_failures():
      discarded = [later for later in reversed(self.steps()) if later > step]
      if self._bucket is None:
        for later in discarded:
          self._manager.delete(later)
      else:
        multihost.on_first(lambda: self._remove_objects(discarded), None)
        self._manager.reload()
        self._removed.clear()
    self._remove_leftovers()

  def wait(self) -> None:
    """Blocks until the current save is committed; raises its error."""
    with self._reporting_failures():
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
      if self._bucket is not None:
        kept = self._policy.kept(self.steps())
        self._remove_objects([step for step in self.steps() if step not in kept])
    self._remove_leftovers()

  def close(self) -> None:
    """`wait`, then ends the background threads."""
    try:
      self.wait()
    finally:
      with self._reporting_failures():
        self._manager.close()

  def _amend(self, step: int, host: Mapping[str, Any], metric: float) -> None:
    if jax.process_index() != 0:
      return
    with self._reporting_failures():
      data = with_metric(read_manifest(self.directory / str(step)), host, metric)
      if self._bucket is not None:
        self._bucket.put(f"{step}/{MANIFEST}", data)
        return
      with replacing(self.directory / str(step) / MANIFEST) as file:
        file.write(data)

  def _remove_leftovers(self) -> None:
    """Removes old checkpoints and what killed saves left; call it while nothing is being saved.

    Orbax has an option for the latter, but does it in the background without a way to wait for it.
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

    Orbax would remove their objects in any order, and a kill leave a damaged checkpoint that looks
    complete. Here the object that makes it complete is the first.
    """
    self._removed.update(steps)
    if self._bucket is None or jax.process_index() != 0:
      return
    for step in steps:
      self._bucket.delete(f"{step}/{COMMITTED}")
      self._bucket.delete_all(self._bucket.names(f"{step}/"))

  def _read_scores(self) -> dict[int, float | None]:
    """The metric of each saved step; one that cannot be read is left out (`restore` says why)."""
    scores: dict[int, float | None] = {}
    for step in saved_steps(self.directory):
      with contextlib.suppress(Exception):
        scores[step] = read_manifest(self.directory / str(step))["metric"]
    return scores

  def _check_space(self, values: Mapping[str, Any]) -> None:
    if self._bucket is not None:
      return
    need = sum(x.nbytes for x in values.values()) + _SPARE_BYTES
    if what := shortage(self.directory, need):
      raise DiskFullError(errno.ENOSPC, self._full_message(what))

  @contextlib.contextmanager
  def _reporting_failures(self) -> Iterator[None]:
    """Converts orbax's errors into ours, which say how to fix them."""
    try:
      yield
    except Exception as error:
      if is_disk_full(error):
        message = self._full_message("the disk became full while writing a checkpoint")
        raise DiskFullError(errno.ENOSPC, message) from error
      raise CheckpointError(f"saving to {self.directory} failed: {short(error)}") from error

  def _full_message(self, what: str) -> str:
    complete = saved_steps(self.directory)
    then = f"resumes from step {max(complete)}" if complete else "starts from the beginning"
    return (
      f"no space for a checkpoint in {self.directory}: {what}. Earlier checkpoints are untouched. "
      f"Free some space or lower the number of checkpoints kept, then rerun: it {then}."
    )


class _Preservation(ocp.checkpoint_managers.PreservationPolicy):
  """Keeps the last `keep` steps, the step with the highest score, and the last at or before one.

  Of steps with equal scores, the earliest is kept.
  """

  def __init__(self, keep: int, scores: dict[int, float | None], *, by_orbax: bool):
    """`by_orbax`: whether orbax removes the others; see `Checkpointer._remove_objects`."""
    self.scores = scores
    self._keep, self._by_orbax = keep, by_orbax
    self._return_to: int | None = None  # of the last save; nothing is removed without one

  def keep_for_return(self, at_or_before: int | None) -> None:
    """Keeps the greatest step ≤ this one, until the next call; see `Checkpointer.save`."""
    self._return_to = at_or_before

  def best(self, steps: Sequence[int]) -> int | None:
    scores = ((self.scores.get(step), step) for step in steps)
    scored = [(score, -step) for score, step in scores if score is not None and score == score]
    return -max(scored)[1] if scored else None

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    del context
    steps = [info.step for info in checkpoints]
    kept = self.kept(steps) if self._by_orbax else steps
    return [step in kept for step in steps]

  def kept(self, steps: Sequence[int]) -> set[int | None]:
    """Those of the saved steps that are kept."""
    kept = {*sorted(steps)[-self._keep :], self.best(steps)}
    if self._return_to is not None:
      kept.add(max((step for step in steps if step <= self._return_to), default=None))
    return kept


def _is_commit(name: str) -> bool:
  return name.partition("/")[2] == COMMITTED
