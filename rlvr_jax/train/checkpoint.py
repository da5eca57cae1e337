"""Checkpoints that survive kills, torn files and full disks: when they are made, which are kept.

Orbax writes into a temporary directory and renames it at the end, so that a step directory is whole
or absent; the checksums of `checkpoint_files` tell later damage from good data.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from rlvr_jax.files import DiskFullError, is_disk_full, shortage
from rlvr_jax.train.checkpoint_files import (
  CheckpointError,
  items_to_save,
  read_manifest,
  read_state,
  short,
  silence_orbax,
)

_REMOVED = "removed"  # folder of the checkpoints that are no longer kept; no name of a step
_SPARE_BYTES = 4 * 2**20  # room for the manifest and orbax's own files


class Restored(NamedTuple):
  """What `Checkpointer.restore` returns."""

  step: int
  state: Any  # as saved, with the shardings asked for
  host: dict[str, Any]
  arrays: Any  # the tree given to `save`, tuples as lists; None where none was given


class Checkpointer:
  """Asynchronous, atomic checkpoints of a training run; keeps the last ones and the best."""

  def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2):
    """Opens (or creates) `directory`, and clears what a killed save left behind.

    Args:
      directory: holds one directory per saved step, and nothing else.
      keep: number of latest checkpoints kept, ≥ 1; the one with the highest `metric` is kept too,
        and the one that `save` is told to keep.
    """
    if keep < 1:
      raise ValueError(f"keep = {keep}: at least one checkpoint must be kept; set keep >= 1.")
    silence_orbax()
    self.directory = pathlib.Path(directory).absolute()
    _remove_leftovers(self.directory)
    self._policy = _Preservation(keep, _read_scores(self.directory))
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self._policy,
        save_root_metadata=False,
        # A kill in the middle of removing would leave half a checkpoint that looks like a step:
        # they are renamed in one go, and removed before the next save.
        todelete_subdir=_REMOVED,
      ),
      item_handlers={
        "arrays": ocp.PyTreeCheckpointHandler(),
        "manifest": ocp.JsonCheckpointHandler(),
      },
    )

  def steps(self) -> list[int]:
    """The saved steps, ascending."""
    return sorted(self._manager.all_steps())

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
    """Starts saving and returns when everything is copied; the files are written behind.

    The caller may donate `state` and change `arrays` as soon as this returns. Blocks while an
    earlier save is still being written; an error of that one is raised here.

    Args:
      step: number of updates done.
      state: pytree of jax arrays, of any sharding.
      host: JSON values (string keys, finite nesting) that restore exactly; data position, counters.
      arrays: nested dicts and lists of NumPy arrays, of a structure that may change from step to
        step (rollouts collected and not yet used); None for nothing.
      metric: the step with the highest is kept; None where it was not measured.
      keep_at_or_before: the greatest saved step ≤ this one is kept, too, until a save says
        otherwise; to go back to it later.
    Returns:
      False if the step is already saved (and nothing is done), else True.
    Raises:
      DiskFullError: too little space; earlier checkpoints are untouched.
      CheckpointError: the earlier save failed.
    """
    self.wait()
    if step in self._manager.all_steps():
      return False
    values, manifest = items_to_save(step, state, host=host, arrays=arrays, metric=metric)
    self._check_space(values)
    self._policy.scores[step] = metric
    self._policy.keep_at_or_before = keep_at_or_before
    # Orbax refuses arrays without elements; the manifest says all there is to know of them.
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
    """A checkpoint, checked leaf by leaf; None where there is none and no step is asked for.

    Args:
      abstract_state: the state's structure: a pytree of `jax.ShapeDtypeStruct` with shardings
        (or of arrays), which need not be the shardings that were saved.
      step: which of `steps()`; None for the latest.
    Raises:
      CheckpointError: the step asked for is not there.
      TornCheckpointError: files are cut, changed or missing.
      ForeignCheckpointError: not a checkpoint of ours, or of another state.
    """
    self.wait()
    steps = self.steps()
    if step is None and not steps:
      return None
    if step is not None and step not in steps:
      raise CheckpointError(f"{self.directory} holds no checkpoint of step {step}; it has {steps}.")
    step = steps[-1] if step is None else step
    earlier = [s for s in steps if s < step]
    then = f"fall back to step {max(earlier)}" if earlier else "start afresh"
    state, host, arrays = read_state(
      self.directory / str(step),
      abstract_state,
      if_other="Use the configuration it was made with, or another --workdir.",
      if_damaged=f"Remove that directory and rerun to {then}.",
    )
    return Restored(step, state, host, arrays)

  def discard_after(self, step: int) -> None:
    """Removes the checkpoints later than `step`, the last one first."""
    with self._reporting_failures():
      for later in [s for s in reversed(self.steps()) if s > step]:
        self._manager.delete(later)
    _remove_leftovers(self.directory)

  def wait(self) -> None:
    """Blocks until the save under way is committed; raises its error."""
    with self._reporting_failures():
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    _remove_leftovers(self.directory)

  def close(self) -> None:
    """`wait`, then ends the background threads."""
    try:
      self.wait()
    finally:
      with self._reporting_failures():
        self._manager.close()

  def _check_space(self, values: Mapping[str, Any]) -> None:
    need = sum(x.nbytes for x in values.values()) + _SPARE_BYTES
    if what := shortage(self.directory, need):
      raise DiskFullError(errno.ENOSPC, self._full_message(what))

  @contextlib.contextmanager
  def _reporting_failures(self) -> Iterator[None]:
    """Turns orbax's errors into ours, which say what to do."""
    try:
      yield
    except Exception as error:
      if is_disk_full(error):
        message = self._full_message("the disk became full while a checkpoint was written")
        raise DiskFullError(errno.ENOSPC, message) from error
      raise CheckpointError(f"saving to {self.directory} failed: {short(error)}") from error

  def _full_message(self, what: str) -> str:
    whole = _step_directories(self.directory)
    then = f"goes on from step {max(whole)}" if whole else "starts afresh"
    return (
      f"no space for a checkpoint in {self.directory}: {what}. Earlier checkpoints are untouched. "
      f"Free some space or lower the number of checkpoints kept, then rerun: it {then}."
    )


class _Preservation(ocp.checkpoint_managers.PreservationPolicy):
  """Keeps the last `keep` steps, the one with the highest score (the earliest of equals), and the
  last one at or before a given step."""

  def __init__(self, keep: int, scores: dict[int, float | None]):
    self.keep, self.scores = keep, scores
    self.keep_at_or_before: int | None = None  # of the last save; nothing is removed without one

  def best(self, steps: Sequence[int]) -> int | None:
    scores = ((self.scores.get(step), step) for step in steps)
    scored = [(score, -step) for score, step in scores if score is not None and score == score]
    return -max(scored)[1] if scored else None

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    del context
    steps = [info.step for info in checkpoints]
    kept = {*sorted(steps)[-self.keep :], self.best(steps)}
    if self.keep_at_or_before is not None:
      kept.add(max((step for step in steps if step <= self.keep_at_or_before), default=None))
    return [step in kept for step in steps]


def _step_directories(directory: pathlib.Path) -> list[int]:
  return [int(p.name) for p in directory.glob("*") if p.name.isdigit()]


def _remove_leftovers(directory: pathlib.Path) -> None:
  """Removes checkpoints no longer kept, and what killed saves left; while nothing is being saved.

  Orbax's own option for the latter does it in the background, unwaited for.
  """
  if jax.process_index() == 0:
    for path in [directory / _REMOVED, *directory.glob("*.orbax-checkpoint-tmp*")]:
      with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _read_scores(directory: pathlib.Path) -> dict[int, float | None]:
  """The metric of each saved step; None for a step that cannot be read (restore will say why)."""
  scores: dict[int, float | None] = {}
  for step in _step_directories(directory):
    with contextlib.suppress(Exception):
      scores[step] = read_manifest(directory / str(step))["metric"]
  return scores
