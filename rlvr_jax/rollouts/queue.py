"""Queue of the batches to train on: in memory or in the store, checked by fingerprints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rlvr_jax.rollouts.batch import RolloutBatch, from_groups
from rlvr_jax.rollouts.store import RolloutStore

_MAX_CACHED = 16  # batches kept in memory; the others are read from the store for their update
_SCORES = ("reference_logprobs", "proximal_logprobs")


class FingerprintError(RuntimeError):
  """Rollouts that were not sampled by the policy of their version."""


class RolloutQueue:
  """Pending batches by number, and the fingerprints of the policies that may have sampled them.

  Every batch is in the store already, so only some of them need to be cached in memory.

  Attributes:
    batches: by number; `graded` is None if a batch is not cached, see `load`.
    store: has all batches.
  """

  def __init__(self, store: RolloutStore):
    self.batches: dict[int, RolloutBatch] = {}
    self.store = store
    self._fingerprints: dict[int, Callable[[], str]] = {}  # by version

  def __contains__(self, number: int) -> bool:
    return number in self.batches

  def __len__(self) -> int:
    return len(self.batches)

  def put(self, batch: RolloutBatch) -> None:
    """Adds a batch that is in the store; the first ones are cached, since they are needed first."""
    is_full = self._num_cached() >= _MAX_CACHED
    self.batches[batch.number] = dataclasses.replace(batch, graded=None) if is_full else batch

  def update(self, batch: RolloutBatch) -> None:
    """Replaces a pending batch by one with further log-probabilities."""
    self.batches[batch.number] = batch

  def load(self, number: int) -> RolloutBatch:
    """Loads a pending batch with its contents, from memory or from the store.

    Raises:
      TornShardError: its shard was damaged after it was written.
    """
    batch = self.batches[number]
    if batch.graded is None:
      stored = from_groups(number, *self.store.read(number))
      batch = dataclasses.replace(batch, graded=stored.graded, versions=stored.versions)
      self.batches[number] = batch
    return batch

  def release(self, number: int) -> None:
    """Removes a batch's contents from memory if the cache is over its limit."""
    if self._num_cached() > _MAX_CACHED:
      self.batches[number] = dataclasses.replace(self.batches[number], graded=None)

  def _num_cached(self) -> int:
    return sum(batch.graded is not None for batch in self.batches.values())

  def forget(self, *, before: int, versions_before: int) -> None:
    """Forgets batches, and fingerprints of policies, that no later update needs.

    Args:
      before: batches with a lower number are forgotten.
      versions_before: so are fingerprints of lower versions, unless a remaining batch needs them.
    """
    self.batches = {n: batch for n, batch in self.batches.items() if n >= before}
    oldest = min([versions_before, *(batch.version for batch in self.batches.values())])
    self._fingerprints = {v: f for v, f in self._fingerprints.items() if v >= oldest}

  def record(self, version: int, fingerprint: Callable[[], str]) -> None:
    """Records the trainer's fingerprint of a version; the function is called only if needed."""
    self._fingerprints[version] = fingerprint

  def fingerprint(self, version: int) -> str | None:
    """The trainer's fingerprint of a version; None if it is not recorded, or forgotten."""
    compute = self._fingerprints.get(version)
    return compute() if compute else None

  def check_fingerprint(self, number: int) -> None:
    """Raises FingerprintError unless the policy of the batch's version sampled it."""
    batch = self.batches[number]
    for version, fingerprint in batch.fingerprints.items():
      expected = self.fingerprint(version)
      if expected == fingerprint:
        continue
      raise FingerprintError(
        f"rollouts {number} of version {version} were sampled by parameters with fingerprint"
        f" {fingerprint}; the trainer's parameters of that version have {expected}. These"
        f" rollouts have not been trained on; they are in {self.store.directory}. Either parameters"
        " changed without a weight sync, or the rollouts are another run's. If the run was resumed"
        " on another kind of machine, move this batch and later ones elsewhere and rerun, which"
        " samples them again"
      )

  def remove_used(self, *, before: int) -> None:
    """Removes batches with a number below `before` from the store."""
    self.store.remove(*(number for number in self.store.numbers() if number < before))

  def oldest_version(self) -> int | None:
    """The lowest version of the pending batches; None if there are none."""
    return min((batch.version for batch in self.batches.values()), default=None)

  def rewind(self, batches: Mapping[int, RolloutBatch]) -> None:
    """Goes back to earlier pending batches, an earlier copy of `batches`."""
    self.batches = dict(batches)

  # --- checkpoints --------------------------------------------------------------------------------

  def state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """(JSON values, arrays) for `restore`, without the contents that the store has."""
    pending = {}
    arrays = {}
    for number, batch in sorted(self.batches.items()):
      names = ("version", "fingerprint", "scored_at", *(["others"] if batch.others else []))
      pending[str(number)] = {name: getattr(batch, name) for name in names}
      scores = {name: getattr(batch, name) for name in _SCORES}
      arrays[str(number)] = {name: x for name, x in scores.items() if x is not None}
    fingerprints = {str(version): compute() for version, compute in self._fingerprints.items()}
    return {"pending": pending, "fingerprints": fingerprints}, arrays

  def restore(
    self,
    state: Mapping[str, Any],
    arrays: Mapping[str, Mapping[str, np.ndarray]],
    damaged: Collection[int] = (),
  ) -> int | None:
    """Restores what `state` returned, up to the first damaged batch.

    Args:
      state: JSON values from `state`.
      arrays: from `state`, by number of the batch.
      damaged: numbers of the batches that the store no longer has intact.
    Returns:
      The number of the first damaged batch; None if all batches are restored.
    """
    for version, fingerprint in state["fingerprints"].items():
      self.record(int(version), functools.partial(str, fingerprint))
    for number in sorted(map(int, state["pending"])):
      if number in damaged:
        return number
      fields = state["pending"][str(number)] | dict(arrays.get(str(number), {}))
      self.batches[number] = RolloutBatch(number=number, **fields)
    return None
