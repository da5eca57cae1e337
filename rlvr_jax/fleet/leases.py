"""Leases: which sampler samples which groups of a draw, decided by conditional writes.

A lease is an object that its sampler rewrites as a sign of life. One that does not change is
silent, and another sampler may take it. An observer measures that by its own clock, from when it
first saw the object as it is. No time that another machine has written is read.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from rlvr_jax.fleet.records import lease_name
from rlvr_jax.storage.bucket import ChangedError
from rlvr_jax.storage.shared import SharedFiles

BEATS = 6  # signs of life of a program within the time after which it is silent


class Lease(NamedTuple):
  """Some groups of a draw, see `Plan.leases`."""

  draw: int
  number: int  # in the plan


class _Seen(NamedTuple):
  """What an observer knows of another sampler's lease."""

  generation: int
  since: float  # when it first saw this generation


class LeaseBook:
  """The leases of one sampler; safe to use from several threads."""

  def __init__(
    self,
    files: SharedFiles,
    sampler: str,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Has no lease yet.

    Args:
      files: of the fleet.
      sampler: name of this sampler, for people.
      limit_s: seconds without a change after which a lease is silent.
      clock: seconds, of this machine.
    """
    self._files, self._sampler, self._limit_s, self._clock = files, sampler, limit_s, clock
    self._own: dict[Lease, int] = {}  # generation
    self._seen: dict[Lease, _Seen] = {}
    self._lock = threading.Lock()  # guards `_own`
    self._changing = threading.Lock()  # held while an own lease is written

  def take(self, wanted: Iterable[Lease], taken: Mapping[Lease, int]) -> Lease | None:
    """Takes a lease: the first that is free, or else the first that is silent.

    Args:
      wanted: leases with groups to sample, in order of preference.
      taken: generations of those that have an object; others are tried.
    Returns:
      The lease; None if all have a sampler.
    """
    others = [lease for lease in wanted if lease not in self.own()]
    silent = [lease for lease in others if lease in taken and self._is_silent(lease, taken[lease])]
    for lease in others:
      if lease not in taken and self._take(lease, 0):
        return lease
    for lease in silent:
      if self._take(lease, taken[lease]):
        return lease
    return None

  def beat(self) -> list[Lease]:
    """Renews the leases, and returns those that others have taken meanwhile."""
    return [lease for lease in self.own() if not self._renew(lease)]

  def own(self) -> list[Lease]:
    """The leases that this sampler has."""
    with self._lock:
      return [*self._own]

  def forget(self, lease: Lease) -> None:
    """Ends a lease whose groups are all finished; its object stays, so that nobody takes it."""
    with self._lock:
      self._own.pop(lease, None)

  def release(self, lease: Lease) -> None:
    """Gives a lease back, so that another sampler takes it at once."""
    with self._changing:
      with self._lock:
        generation = self._own.pop(lease, None)
      if generation is not None:
        self._files.delete(lease_name(*lease), generation=generation)

  def _is_silent(self, lease: Lease, generation: int) -> bool:
    """Whether another sampler's lease has had this generation for too long."""
    seen = self._seen.get(lease)
    if seen is None or seen.generation != generation:
      seen = self._seen[lease] = _Seen(generation, self._clock())
    return self._clock() - seen.since > self._limit_s

  def _take(self, lease: Lease, generation: int) -> bool:
    """Takes a lease that has this generation; False if another sampler was faster."""
    if not (written := self._put(lease, generation)):
      return False
    with self._lock:
      self._own[lease] = written
    return True

  def _renew(self, lease: Lease) -> bool:
    """Writes an own lease again; False if another sampler has taken it."""
    with self._changing:
      with self._lock:
        generation = self._own.get(lease)
      if generation is None:
        return True  # it has ended meanwhile
      written = self._put(lease, generation)
      with self._lock:
        if lease in self._own and written:
          self._own[lease] = written
        else:
          self._own.pop(lease, None)
      return written > 0

  def _put(self, lease: Lease, generation: int) -> int:
    """Writes a lease that has this generation; returns the new one, or 0 if it has another."""
    content = json.dumps({"sampler": self._sampler}).encode()
    try:
      return self._files.put(lease_name(*lease), content, generation=generation)
    except ChangedError:
      return 0
