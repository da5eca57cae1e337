"""A sampler's objects of a fleet, which threads of its first process read and write."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rlvr_jax.fleet.leases import Lease, LeaseBook
from rlvr_jax.fleet.records import (
  TRAINER,
  FailureRecord,
  Plan,
  SamplerRecord,
  TrainerRecord,
  draw_of,
  group_name,
  index_of,
)
from rlvr_jax.storage.bucket import ChangedError, UnreachableError
from rlvr_jax.storage.shared import SharedFiles
from rlvr_jax.train.fleet.board import BEAT_S
from rlvr_jax.train.fleet.policies import Policy

_PATIENCE_S = 0.02
LIMIT_S = 60.0  # without a new record of the trainer, after which it is silent


class Work(NamedTuple):
  """Groups to sample."""

  lease: Lease
  plan: Plan
  groups: list[int]  # indices in the draw, without those that are finished already


class View(NamedTuple):
  """What the fleet's objects say now."""

  trainer: TrainerRecord | None  # None: there was none yet
  silent_s: float  # since the trainer's record changed, by this machine's clock
  plans: Mapping[str, Plan]  # by name, those that are needed
  answered_s: float  # since the storage answered

  def newest(self) -> Policy | None:
    """The newest policy that can be restored."""
    if self.trainer is None or not self.trainer.policies:
      return None
    return Policy(*self.trainer.policies[-1])


@dataclasses.dataclass
class Counts:
  """What a sampler has done.

  Attributes:
    groups, duplicate_groups, duplicate_tokens: see `SamplerRecord`.
  """

  groups: int = 0
  duplicate_groups: int = 0
  duplicate_tokens: int = 0

  def count(self, tokens: int, *, duplicate: bool) -> None:
    """Counts a finished group."""
    self.groups += not duplicate
    self.duplicate_groups += duplicate
    self.duplicate_tokens += tokens * duplicate


class Desk:
  """Watches trainer and plans, takes leases ahead, writes groups, and beats."""

  def __init__(
    self,
    files: SharedFiles,
    name: str,
    describe: Callable[[Counts, int], SamplerRecord],
    *,
    ahead: int,
    poll_s: float,
    limit_s: float = LIMIT_S,
  ):
    """Starts the threads.

    Args:
      files: of the fleet.
      name: of this sampler.
      describe: (counts, number of leases) → its record.
      ahead: number of leases to take ahead, ≥ 1.
      poll_s: seconds between two looks at trainer and plans.
      limit_s: after which a lease or a trainer that has not changed is silent.
    """
    self._files, self._name = files, name
    self._book = LeaseBook(files, name, limit_s=limit_s)
    self._counts = Counts()
    self._view = View(None, 0.0, {}, 0.0)
    self._to_write: queue.Queue[tuple[Lease, str, bytes, int] | None] = queue.Queue()
    self._ahead: queue.Queue[Work] = queue.Queue()
    self._nothing = threading.Event()
    self._wanted = -1
    self._closing = threading.Event()
    loops = {
      "lease": lambda: self._take_ahead(ahead, poll_s),
      "watch": lambda: self._watch(poll_s),
      "write": self._write,
      "beat": lambda: self._beat(describe),
    }
    self._threads = ThreadPoolExecutor(len(loops), "desk")
    self._loops = [self._threads.submit(loop) for loop in loops.values()]

  @property
  def view(self) -> View:
    """What the fleet's objects say now; raises the error of a thread that has failed."""
    for loop in self._loops:
      if loop.done() and (error := loop.exception()) is not None:
        raise error
    return self._view

  @property
  def counts(self) -> Counts:
    return self._counts

  def want(self, version: int) -> None:
    """Lets a thread take one lease ahead that this version may sample; −1: none."""
    self._wanted = version

  def take(self) -> Work | None:
    """A lease that was taken ahead; None if there is none now. Waits while the thread looks."""
    while True:
      nothing = self._nothing.is_set()
      with contextlib.suppress(queue.Empty):
        return self._ahead.get(block=not nothing, timeout=_PATIENCE_S)
      if nothing:
        return None

  def write(self, lease: Lease, group: int, data: bytes, tokens: int) -> None:
    """Lets a thread write a finished group of so many tokens."""
    self._to_write.put((lease, group_name(lease.draw, group), data, tokens))

  def finish(self, lease: Lease) -> None:
    """Ends a lease whose groups are all written, or to be written."""
    self._to_write.put((lease, "", b"", 0))

  def fail(self, message: str) -> None:
    """Publishes an error that must end the run."""
    self._files.put(f"failures/{self._name}", FailureRecord(message).encode())

  def close(self) -> None:
    """Writes what is finished, gives the leases back, and leaves the fleet."""
    self._to_write.put(None)
    self._closing.set()
    self._threads.shutdown()
    with contextlib.suppress(OSError, ChangedError):
      self._book.release()
      self._files.delete(f"samplers/{self._name}")

  # --- threads ------------------------------------------------------------------------------------

  def _watch(self, poll_s: float) -> None:
    """Reads the trainer's record, and the plans."""
    generation, changed, answered = -1, time.monotonic(), time.monotonic()
    trainer: TrainerRecord | None = None
    plans: dict[str, Plan] = {}
    while True:
      try:
        with contextlib.suppress(FileNotFoundError):
          data, newest = self._files.read(TRAINER)
          if newest != generation:
            generation, changed = newest, time.monotonic()
            trainer = TrainerRecord.decode(data, TRAINER)
        first = 0 if trainer is None else trainer.first_draw
        names = [name for name in self._files.names("plans/") if draw_of(name) >= first]
        plans = {name: plan for name, plan in plans.items() if name in names}
        for name in names:
          if name not in plans:
            with contextlib.suppress(FileNotFoundError):
              plans[name] = Plan.decode(self._files.read(name)[0], name)
        answered = time.monotonic()
      except UnreachableError:
        pass  # `answered_s` says so
      now = time.monotonic()
      self._view = View(trainer, now - changed, dict(plans), now - answered)
      if self._closing.wait(poll_s):
        return

  def _take_ahead(self, number: int, poll_s: float) -> None:
    """Takes leases, as many ahead as fill the slots."""
    while not self._closing.is_set():
      self._nothing.clear()
      found = 0
      with contextlib.suppress(UnreachableError):
        for work in self._find(self._wanted):
          self._ahead.put(work)
          found += 1
          if self._ahead.qsize() >= number:
            break
      self._nothing.set()
      self._closing.wait(_PATIENCE_S if found else poll_s)
      while self._ahead.qsize() >= number and not self._closing.wait(_PATIENCE_S):
        pass

  def _find(self, version: int) -> Iterator[Work]:
    """Takes leases that have groups to sample, the earliest draws first."""
    for plan in sorted(self._view.plans.values()):
      if version < plan.lowest_version:
        continue
      prefix = f"{plan.draw:08d}-"
      finished = set(map(index_of, self._files.names(f"groups/{prefix}")))
      missing = {
        Lease(plan.draw, index): [g for g in range(first, end) if g not in finished]
        for index, (first, end) in enumerate(plan.leases)
      }
      wanted = [lease for lease, groups in missing.items() if groups]
      if wanted:
        taken = {Lease(plan.draw, index_of(n)) for n in self._files.names(f"leases/{prefix}")}
        while (lease := self._book.take(wanted, taken)) is not None:
          yield Work(lease, plan, missing[lease])

  def _write(self) -> None:
    """Writes finished groups, first writer wins."""
    while (entry := self._to_write.get()) is not None:
      lease, name, data, tokens = entry
      if not name:
        self._book.forget(lease)
        continue
      while True:
        try:
          self._files.put(name, data, generation=0)
          self._counts.count(tokens, duplicate=False)
        except ChangedError:
          self._counts.count(tokens, duplicate=True)
        except UnreachableError:
          if not self._closing.wait(1.0):
            continue
        break

  def _beat(self, describe: Callable[[Counts, int], SamplerRecord]) -> None:
    """Renews leases, and rewrites this sampler's record."""
    while True:
      with contextlib.suppress(UnreachableError, ChangedError):
        self._book.beat()
        record = describe(self._counts, len(self._book.own()))
        self._files.put(f"samplers/{self._name}", record.encode())
      if self._closing.wait(BEAT_S):
        return
