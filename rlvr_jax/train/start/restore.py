"""Finds where a run resumes: its checkpoint, its rollouts, and the sources with which it began."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from rlvr_jax.evaluate.run_files import METRICS_FILE, read_metrics
from rlvr_jax.rollouts.sources import Sources
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.rollouts.store import RolloutStore, StoreError
from rlvr_jax.storage.files import JSON, is_as_written, replace_file, with_crc32
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.checkpoint_files import Restored
from rlvr_jax.train.checkpointing.claim import WorkdirError
from rlvr_jax.train.checkpointing.host_state import HostState
from rlvr_jax.train.checkpointing.workdir import run_file_names
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.reporting.progress import progress, say, warn
from rlvr_jax.train.reporting.writer import BEFORE_FIRST_STEP
from rlvr_jax.train.setup.compiler_options import CompilerOptions, format_options
from rlvr_jax.types import TrainState

SOURCES_FILE = "sources.json"

# The records that a resumed run keeps: (last step, result of `MetricWriter.written`).
LastRecords: TypeAlias = tuple[int | None, Mapping[str, Sequence[int]] | None]


def restore_sources(
  sources: Sources, make_sources: Callable[..., Sources], workdir: Path
) -> Sources:
  """Sources that read the same checkpoint and batches of other runs as when this run began.

  Args:
    sources: the sources made from the present configuration.
    make_sources: makes sources again; takes `pins`, the `Source.pin` of each source by name.
    workdir: the workdir of the run.
  Raises:
    StoreError: a checkpoint or batch no longer exists.
    WorkdirError: this run has begun before, and its record of these sources is lost.
  """
  path = workdir / SOURCES_FILE
  pins = {source.name: source.pin for source in sources if source.pin is not None}
  if not pins:
    return sources

  def read() -> dict[str, JSON]:
    if not path.exists() and not run_file_names(workdir):
      with replace_file(path) as file:
        file.write(json.dumps(with_crc32(pins)).encode())
    return _read_pins(path, pins.keys())

  # The other processes may have no access to the file.
  pinned = multihost.result_of_first(read)
  if pinned == pins:
    return sources
  try:
    return make_sources(pins=pinned)
  except ValueError as error:
    raise StoreError(f"{error} (this run began with the sources in {path})") from error


def _read_pins(path: Path, names: Collection[str]) -> dict[str, JSON]:
  """The pins of the sources with these names, from sources.json."""
  try:
    pins = json.loads(path.read_text())
    if not isinstance(pins, dict) or pins.keys() - {"crc32"} != set(names):
      raise ValueError(f"it must name exactly the sources {', '.join(sorted(names))}")
    if not is_as_written(pins):
      raise ValueError("it does not match its checksum")
    return {name: pins[name] for name in names}
  except (OSError, ValueError) as error:
    raise WorkdirError(
      f"{path}, which records the checkpoint and batches of other runs that this run uses,"
      f" cannot be read: {error}. Put back a copy, or start again in another --workdir"
    ) from error


class Resumed(NamedTuple):
  """A checkpoint to resume from."""

  step: int
  state: TrainState
  host: HostState
  arrays: dict[str, np.ndarray]  # the arrays that `Scorer.state` returned
  damaged: list[int]  # pending batches that are to be sampled again


def find_resumable(
  checkpointer: Checkpointer,
  abstract: TrainState,
  schedule: Schedule,
  store: RolloutStore,
  layout: Mapping[str, JSON],
) -> Resumed | None:
  """The latest intact checkpoint with intact pending rollouts; None if there is no checkpoint.

  Pending rollouts were sampled before the checkpoint, for updates after it. Later checkpoints are
  removed; damaged checkpoints are renamed on a disk, and removed in a bucket. From an earlier
  checkpoint the run repeats itself bit for bit: it samples damaged batches again with the same
  policy, and reads other batches from the store. If sampling goes on during updates, pending
  rollouts may be damaged, since any policy may sample them again.

  Args:
    checkpointer, schedule, store: checkpointer, schedule and store of the run.
    abstract: shapes, dtypes and shardings of the train state.
    layout: the layout of this start, from `describe_layout`.
  Raises:
    StoreError: the run cannot go on from any intact checkpoint: for each one, pending batches are
      damaged, or the next batches need earlier policies.
    TornCheckpointError: all checkpoints are damaged.
  """
  for restored in checkpointer.intact(abstract):
    step, host = restored.step, HostState.from_json(restored.host)
    pending = range(schedule.first(step), host.position.number)
    torn = lambda pending=pending: [n for n in pending if not store.is_intact(n)]
    damaged = multihost.result_of_first(torn)
    if (recorded := schedule.recorded) and recorded.oldest_needed(step) < step:
      continue  # the next batches have tokens of policies before this checkpoint
    # In real time any policy may sample the damaged batches again.
    if not damaged or schedule.threaded:
      # Otherwise the next resume would use a later checkpoint, whose records are gone.
      checkpointer.discard_after(step)
      first = min(pending.start, pending.stop)
      multihost.run_on_first(functools.partial(_report_damaged, store, first), None)
      _report_move(host, layout)
      return Resumed(step, restored.state, host, restored.arrays, damaged)
    warn(
      f"rollouts {damaged} of {store.directory}, pending at update {step}, are damaged or missing;"
      " the run continues from an earlier checkpoint, to sample them again"
    )
  if checkpointer.steps():
    raise StoreError(
      f"rollouts of {store.directory} that are still to be trained on are damaged or missing, or"
      " need earlier policies, and there is no checkpoint from which the run can sample them again."
      " Put back copies of damaged or missing rollouts and checkpoints, or start again in another"
      " --workdir"
    )
  return None


def describe_layout(
  placement: Placement, compiler_options: CompilerOptions, *, slots: int
) -> dict[str, JSON]:
  """The machine and the layout of work on it, which change results only by rounding.

  The run's rows also change rounding, see `rows.row_fields`.

  Args:
    placement, compiler_options: placement and compiler options of the run.
    slots: `config.sampling.slots`.
  """
  meshes = {"mesh": placement.mesh, "generation_mesh": placement.generation_mesh}
  return {
    "processes": jax.process_count(),
    "device": jax.devices()[0].device_kind,
    **{name: dict(mesh.shape) for name, mesh in meshes.items()},
    "sampling.slots": slots,
    **{
      f"compiler_options.{kind}": format_options(options)
      for kind, options in compiler_options._asdict().items()
      if options
    },
  }


def _report_move(host: HostState, now: Mapping[str, JSON]) -> None:
  """Prints a line if the checkpoint was saved on another machine, or with another layout."""
  then = host.layout
  changed = [
    f"{name} {then.get(name)} → {now[name]}"
    for name in now
    if then.get(name) != now[name] and then.get(name, 0) is not None  # rows not chosen yet
  ]
  if changed:
    say(
      f"resumed with {', '.join(changed)}: from here on results differ by rounding from those of a"
      " run that was not moved"
    )


def last_records(resumed: Resumed | None, warm: Restored | None) -> LastRecords:
  """(last step, `MetricWriter.written`) of the records to keep, see `open_writer`."""
  if resumed:
    return resumed.step, resumed.host.written
  return (BEFORE_FIRST_STEP, warm.host["written"]) if warm else (None, None)


def _report_damaged(store: RolloutStore, first: int) -> None:
  """Reports damaged batches of the store that the run no longer needs.

  Args:
    store: the store of the run.
    first: number of the first batch that the run still needs.
  """
  numbers = range(first)
  with progress(numbers, "checking the store", unit="batches") as bar:
    damaged = [*store.find_damaged(bar)]
  if damaged:
    warn(
      f"rollouts {damaged} of {store.directory}, on which this run has trained, are damaged or"
      " missing; the run continues without them. Restore a copy if you still need them"
    )


def elapsed_seconds(workdir: Path) -> float:
  """Seconds that a run has taken up to its last record; 0 before the first record."""
  if not (workdir / METRICS_FILE).exists():
    return 0.0
  times = [record.get("time/elapsed_seconds", 0.0) for record in read_metrics(workdir)]
  return max(times, default=0.0)
