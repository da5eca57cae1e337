"""Leases: which sampler samples which groups of a plan, decided by conditional writes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from rlvr_jax.fleet.records import lease_name
from rlvr_jax.storage.bucket import ChangedError
from rlvr_jax.storage.shared import SharedFiles

BEATS = 6  # signs of life of a program within the time after which it is silent


class Lease(NamedTuple):
  """Some groups of a draw."""

  draw: int
  number: int  # in the plan


class LeaseBook:
  """The leases of one sampler."""

  def __init__(
    self,
    files: SharedFiles,
    sampler: str,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._files, self._sampler, self._limit_s, self._clock = files, sampler, limit_s, clock
    self._own: dict[Lease, int] = {}  # generation
    self._seen: dict[Lease, tuple[int, float]] = {}  # of others: generation, since when
    self._beats = 0
    self._lock = threading.Lock()

  def take(self, open_leases: Iterable[Lease], taken: Collection[Lease]) -> Lease | None:
    """Takes the first free lease, or else the first silent one; None if there is neither."""
    candidates = [lease for lease in open_leases if lease not in self._own]
    for lease in candidates:
      if lease not in taken and (generation := self._put(lease, 0)) is not None:
        with self._lock:
          self._own[lease] = generation
        return lease
    for lease in candidates:
      try:
        _, generation = self._files.read_generation(lease_name(*lease))
      except FileNotFoundError:
        continue
      now = self._clock()
      before = self._seen.get(lease)
      if before is None or before[0] != generation:
        self._seen[lease] = generation, now
      elif now - before[1] > self._limit_s:
        if (new := self._put(lease, generation)) is not None:
          with self._lock:
            self._own[lease] = new
          return lease
    return None

  def beat(self) -> list[Lease]:
    """Renews the own leases; returns those that others have taken meanwhile."""
    self._beats += 1
    with self._lock:
      own = dict(self._own)
    lost = []
    for lease, generation in own.items():
      new = self._put(lease, generation)
      with self._lock:
        if new is None:
          self._own.pop(lease, None)
          lost.append(lease)
        elif lease in self._own:
          self._own[lease] = new
    return lost

  def own(self) -> Mapping[Lease, int]:
    with self._lock:
      return dict(self._own)

  def forget(self, lease: Lease) -> None:
    """Ends a lease whose groups are all written."""
    with self._lock:
      self._own.pop(lease, None)

  def release(self, lease: Lease) -> None:
    """Gives a lease back, so that another sampler takes it at once."""
    with self._lock:
      generation = self._own.pop(lease, None)
    if generation is not None:
      self._files.delete(lease_name(*lease), generation=generation)

  def _put(self, lease: Lease, generation: int) -> int | None:
    content = json.dumps({"sampler": self._sampler, "beat": self._beats}).encode()
    try:
      return self._files.put(lease_name(*lease), content, generation=generation)
    except ChangedError:
      return None
