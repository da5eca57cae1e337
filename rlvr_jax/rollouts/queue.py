"""Batches that updates will train on: which, sampled by which policy, in memory or in the store."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlvr_jax.rollouts.batch import RolloutBatch, from_shard
from rlvr_jax.rollouts.store import RolloutStore

_CACHED = 16  # batches kept in memory; a long stage's others are read when their update comes
_SCORES = ("reference_logprobs", "proximal_logprobs")


class FingerprintError(RuntimeError):
  """Rollouts are not of the policy whose version they bear."""


class RolloutQueue:
  """Pending batches by number, and the fingerprints of the policies that may have sampled them.

  Every batch is in the store before it comes here, so that memory holds only some of them.

  Attributes:
    batches: by number; of some `graded` is None, see `load`.
    store: that holds them all.
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
    """Takes a batch that the store has; the first ones are cached: they are trained on first."""
    full = self._cached() >= _CACHED
    self.batches[batch.number] = dataclasses.replace(batch, graded=None) if full else batch

  def load(self, number: int) -> RolloutBatch:
    """A pending batch with what it holds, from memory or from the store.

    Raises:
      TornShardError: it was damaged since it was written.
    """
    batch = self.batches[number]
    if batch.graded is None:
      stored = from_shard(number, *self.store.read(number))
      batch.graded, batch.versions = stored.graded, stored.versions
    return batch

  def release(self, number: int) -> None:
    """Lets go of what a batch holds, where the cache is over-full."""
    if self._cached() > _CACHED:
      self.batches[number].graded = None

  def _cached(self) -> int:
    return sum(batch.graded is not None for batch in self.batches.values())

  def forget(self, *, before: int, versions_before: int) -> None:
    """Drops batches, and fingerprints of policies, that no later update needs.

    Args:
      before: batches with a lower number go.
      versions_before: fingerprints of lower versions go, but those of batches that stay.
    """
    self.batches = {n: batch for n, batch in self.batches.items() if n >= before}
    oldest = min([versions_before, *(batch.version for batch in self.batches.values())])
    self._fingerprints = {v: f for v, f in self._fingerprints.items() if v >= oldest}

  def record(self, version: int, fingerprint: Callable[[], str]) -> None:
    """Notes the trainer's own fingerprint of a version; asked for when it is compared."""
    self._fingerprints[version] = fingerprint

  def check_fingerprint(self, number: int) -> None:
    """Raises FingerprintError unless the batch is of the policy whose version it bears."""
    batch = self.batches[number]
    known = self._fingerprints.get(batch.version)
    found = known() if known else None
    if found != batch.fingerprint:
      raise FingerprintError(
        f"rollouts {number} bear version {batch.version} and were sampled by parameters with"
        f" fingerprint {batch.fingerprint}; the trainer's of that version have {found}."
        " Parameters changed without being handed over, or the rollouts are of another run; nothing"
        f" was trained on them. They are in {self.store.directory}; where a run was resumed on"
        " another kind of machine, move that batch and later ones elsewhere and rerun: they are"
        " sampled again"
      )

  def remove_used(self, *, before: int) -> None:
    """Removes the batches before a number from the store."""
    for number in self.store.numbers():
      if number < before:
        self.store.remove(number)

  def oldest_version(self) -> int | None:
    """Of the policies that sampled pending batches."""
    return min((batch.version for batch in self.batches.values()), default=None)

  # --- checkpoints --------------------------------------------------------------------------------

  def state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """(JSON values, arrays) that `restore` takes, without what the store has."""
    pending, arrays = {}, {}
    for number, batch in sorted(self.batches.items()):
      names = ("version", "fingerprint", "scored_at")
      pending[str(number)] = {name: getattr(batch, name) for name in names}
      scores = {name: getattr(batch, name) for name in _SCORES}
      arrays[str(number)] = {name: x for name, x in scores.items() if x is not None}
    known = {str(version): of() for version, of in self._fingerprints.items()}
    return {"pending": pending, "fingerprints": known}, arrays

  def restore(
    self,
    state: Mapping[str, Any],
    arrays: Mapping[str, Mapping[str, np.ndarray]],
    keep: Callable[[int], bool] = lambda number: True,
  ) -> int | None:
    """Takes what `state` said, up to the first batch that `keep` refuses.

    Returns:
      The number of that one; None if there is none.
    """
    for version, fingerprint in state["fingerprints"].items():
      self.record(int(version), functools.partial(str, fingerprint))
    for number in sorted(map(int, state["pending"])):
      if not keep(number):
        return number
      fields = state["pending"][str(number)] | dict(arrays.get(str(number), {}))
      self.batches[number] = RolloutBatch(number=number, **fields)
    return None
