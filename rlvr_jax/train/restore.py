"""From where a run goes on: which checkpoint, with which rollouts, and what it began with."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvr_jax.evaluate.run_files import METRICS_FILE, read_metrics
from rlvr_jax.files import replacing
from rlvr_jax.rollouts.store import RolloutStore, StoreError
from rlvr_jax.train import multihost
from rlvr_jax.train.build import Parts, with_sources_as_begun
from rlvr_jax.train.checkpoint import Checkpointer, Restored
from rlvr_jax.train.metrics import progress, say


def as_begun(parts: Parts, workdir: Path) -> Parts:
  """The parts with the checkpoint and the batches of other runs that this one began with.

  Raises:
    StoreError: they are there no more.
  """
  path = workdir / "sources.json"
  pins = {source.name: source.pin for source in parts.sources if source.pin is not None}
  if not pins:
    return parts

  def write() -> None:
    if not path.exists():
      with replacing(path) as file:
        file.write(json.dumps(pins).encode())

  multihost.on_first(write, None)
  pinned = json.loads(path.read_text())
  if pinned == pins:
    return parts
  try:
    return with_sources_as_begun(parts, pinned)
  except ValueError as error:
    raise StoreError(f"{error} (this run began with what {path} names)") from error


def resumable(checkpointer: Checkpointer, parts: Parts, store: RolloutStore) -> Restored | None:
  """The latest checkpoint whose pending rollouts are whole; None where there is no checkpoint.

  Later ones are removed. From an earlier checkpoint the run repeats itself to the bit, draws what
  is damaged again with the policy that drew it, and reads the rest from the store.

  Raises:
    StoreError: no checkpoint is old enough for that.
  """
  for step in reversed(checkpointer.steps()):
    restored = checkpointer.restore(parts.abstract_state, step=step)
    assert restored is not None  # the step is there
    pending = restored.host["queue"]["pending"]
    damaged = [number for number in pending if not store.is_intact(int(number))]
    damaged = multihost.exchange(damaged)[0]
    # In real time any policy may draw a batch, see `Trainer.resume`.
    if not damaged or parts.schedule.real_time:
      # Later ones would be taken up by the next resume, although their records are gone.
      checkpointer.discard_after(step)
      multihost.on_first(functools.partial(_report_damaged, store, restored.host), None)
      return restored
    say(
      f"rollouts {damaged} of {store.directory}, pending at update {step}, are damaged or missing:"
      " going back to an earlier checkpoint, to draw them again"
    )
  if checkpointer.steps():
    raise StoreError(
      f"rollouts of {store.directory} that are still to be trained on are damaged or missing, and"
      " no checkpoint is old enough to draw them again. Put them back, or begin anew in another"
      " --workdir"
    )
  return None


def records_of(restored: Restored | None, warm: Restored | None) -> tuple[int | None, Any]:
  """(step, what `MetricWriter.written` returned) of that with which a run goes on, or begins."""
  begun = restored or warm
  return restored.step if restored else None, begun.host.get("written") if begun else None


def _report_damaged(store: RolloutStore, host: Mapping[str, Any]) -> None:
  """Says which used batches of the store are damaged; the run needs them no more."""
  numbers = range(min(map(int, host["queue"]["pending"]), default=host["after"]["number"]))
  with progress(numbers, "checking the store", unit="batch") as bar:
    damaged = [number for number in bar if not (store.removed(number) or store.is_intact(number))]
  if damaged:
    say(
      f"rollouts {damaged} of {store.directory}, on which this run has trained, are damaged or"
      " missing: put back a copy if they are still of use; the run goes on without them"
    )


def elapsed_seconds(workdir: Path) -> float:
  """What a run has taken up to its last record; 0 before the first."""
  if not (workdir / METRICS_FILE).exists():
    return 0.0
  times = [record.get("time/elapsed_seconds", 0.0) for record in read_metrics(workdir)]
  return max(times, default=0.0)
