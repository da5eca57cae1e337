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

from rlvr_jax.fleet.leases import BEATS, Lease, LeaseBook
from rlvr_jax.fleet.records import (
  TRAINER,
  DamagedError,
  FailureRecord,
  Plan,
  SamplerRecord,
  TrainerRecord,
  draw_of,
  group_name,
  index_of,
  plan_name,
)
from rlvr_jax.storage.bucket import ChangedError, UnreachableError
from rlvr_jax.storage.shared import SharedFiles
from rlvr_jax.train.fleet.policies import DAMAGED_S, Policy

_PATIENCE_S = 0.02


class Work(NamedTuple):
  """Groups to sample."""

  lease: Lease
  plan: Plan
  groups: list[int]  # indices in the draw, without those that are finished already


class View(NamedTuple):
  """What the fleet's objects say now."""

  trainer: TrainerRecord | None  # None: there was none yet
  was_alive: bool  # whether the trainer's record has changed since this sampler began
  silent_s: float  # since the trainer's record changed, by this machine's clock
  plans: Mapping[str, Plan]  # by name, those that are needed
  answered: float  # when the storage last answered, by this machine's clock

  def newest(self) -> Policy | None:
    """The newest policy that can be restored."""
    if self.trainer is None or not self.trainer.policies:
      return None
    return Policy(*self.trainer.policies[-1])


@dataclasses.dataclass
class Counts:
  """What a sampler has written.

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
    limit_s: float,
  ):
    """Starts the threads.

    Args:
      files: of the fleet.
      name: of this sampler.
      describe: (counts, number of leases) → its record.
      ahead: number of leases to take ahead, ≥ 1.
      poll_s: seconds between two looks at trainer and plans.
      limit_s: seconds after which a lease that has not changed is silent.
    """
    self._files, self._name = files, name
    self._book = LeaseBook(files, name, limit_s=limit_s)
    self._watcher = Watcher(files)
    self._writer = _Writer(files, self._book)
    self._taker = Taker(files, self._book, self._watcher)
    self._closing = threading.Event()
    loops = (
      lambda: self._watcher.run(poll_s, self._closing),
      lambda: self._taker.run(ahead, poll_s, limit_s, self._closing),
      lambda: self._writer.run(self._closing),
      lambda: self._beat(describe, limit_s / BEATS),
    )
    pool = ThreadPoolExecutor(len(loops), "desk")
    self._loops = [pool.submit(loop) for loop in loops]
    pool.shutdown(wait=False)  # after the last of them

  def view(self) -> View:
    """What the fleet's objects say now; raises the error of a thread that has failed."""
    for loop in self._loops:
      if loop.done() and (error := loop.exception()) is not None:
        raise error
    return self._watcher.view

  def want(self, version: int) -> None:
    """Lets leases be taken that a policy of this version may sample; −1: none."""
    self._taker.want(version)

  def take(self) -> Work | None:
    """A lease that was taken ahead; None if there is none now."""
    return self._taker.take()

  def give_back(self, lease: Lease) -> None:
    """Gives a lease back that this sampler may not sample any more."""
    self._book.release(lease)

  def write(self, lease: Lease, group: int, data: bytes, tokens: int) -> None:
    """Lets a thread write a finished group of so many tokens."""
    self._writer.put(_Finished(lease, group, data, tokens))

  def finish(self, lease: Lease) -> None:
    """Ends a lease whose groups have all been passed to `write`."""
    self._writer.put(_Finished(lease))

  def fail(self, message: str) -> None:
    """Publishes an error that must end the run."""
    self._files.put(f"failures/{self._name}", FailureRecord(message).encode())

  def close(self) -> None:
    """Writes what is finished, gives the leases back, and leaves the fleet."""
    self._writer.put(None)
    self._closing.set()
    for loop in self._loops:
      loop.exception()  # waits for its end
    with contextlib.suppress(OSError, ChangedError):
      for lease in self._book.own():
        self._book.release(lease)
      self._files.delete(f"samplers/{self._name}")

  def _beat(self, describe: Callable[[Counts, int], SamplerRecord], beat_s: float) -> None:
    """Renews leases, and rewrites this sampler's record."""
    while True:
      with contextlib.suppress(UnreachableError):
        self._book.beat()
        record = describe(self._writer.counts, len(self._book.own()))
        self._files.put(f"samplers/{self._name}", record.encode())
      if self._closing.wait(beat_s):
        return


class Watcher:
  """Reads the trainer's record, and the plans.

  Attributes:
    view: what they say.
  """

  def __init__(self, files: SharedFiles):
    self._files = files
    self._plans: dict[str, Plan] = {}
    self._damaged: dict[str, float] = {}  # plans by name, since when
    self._looked = False
    self._generation, self._changed = -1, time.monotonic()  # of the trainer's record
    self.view = View(None, False, 0.0, {}, time.monotonic())

  def run(self, poll_s: float, closing: threading.Event) -> None:
    """Looks until it is closed."""
    while True:
      self.look()
      if closing.wait(poll_s):
        return

  def look(self) -> None:
    """Reads what has changed."""
    trainer, was_alive, answered = self.view.trainer, self.view.was_alive, self.view.answered
    with contextlib.suppress(UnreachableError):  # `answered` says so
      data = b""
      with contextlib.suppress(FileNotFoundError):
        data, generation = self._files.read_generation(TRAINER)
      if data and generation != self._generation:  # also where there is another plan
        decoded = None
        with contextlib.suppress(DamagedError):  # it is rewritten soon
          decoded = TrainerRecord.decode(data, TRAINER)
        if decoded is not None:
          trainer, was_alive = decoded, was_alive or self._looked
          self._read_plans(trainer.draws[0])
          self._generation, self._changed = generation, time.monotonic()
      self._looked = True
      answered = time.monotonic()
    silent_s = time.monotonic() - self._changed
    self.view = View(trainer, was_alive, silent_s, dict(self._plans), answered)

  def _read_plans(self, first_draw: int) -> None:
    names = [name for name in self._files.names("plans/") if draw_of(name) >= first_draw]
    self._plans = {name: plan for name, plan in self._plans.items() if name in names}
    for name in names:
      if name not in self._plans:
        with contextlib.suppress(FileNotFoundError):
          if plan := self._read_plan(name):
            self._plans[name] = plan

  def _read_plan(self, name: str) -> Plan | None:
    """A plan; None while it is damaged, for as long as a trainer that starts may write it anew."""
    try:
      plan = Plan.decode(self._files.read_generation(name)[0], name)
    except DamagedError as error:
      since = self._damaged.setdefault(name, time.monotonic())
      if time.monotonic() - since > DAMAGED_S:
        raise DamagedError(f"{error}; start the trainer again, which writes it anew") from error
      return None
    self._damaged.pop(name, None)
    return plan


class Taker:
  """Takes leases, as many ahead as fill the slots."""

  def __init__(self, files: SharedFiles, book: LeaseBook, watcher: Watcher):
    self._files, self._book, self._watcher = files, book, watcher
    self._version = -1
    self._taken: queue.Queue[Work] = queue.Queue()
    self._looked = threading.Event()  # and found nothing more

  def want(self, version: int) -> None:
    """See `Desk.want`."""
    self._version = version

  def take(self) -> Work | None:
    """See `Desk.take`; waits while the thread finds more."""
    while True:
      looked = self._looked.is_set()
      try:
        work = self._taken.get(block=not looked, timeout=_PATIENCE_S)
      except queue.Empty:
        if looked:
          return None
        continue
      if plan_name(work.plan) in self._watcher.view.plans:
        return work
      self._book.release(work.lease)  # others have finished its groups meanwhile

  def run(self, ahead: int, poll_s: float, limit_s: float, closing: threading.Event) -> None:
    """Takes leases until it is closed; where there are none, it looks again for new plans.

    Now and then it looks for leases that others have given back, or are silent.
    """
    while not closing.is_set():
      self._looked.clear()
      found, sought = 0, (self._version, self._watcher.view.plans.keys())
      try:
        for work in self.find(self._version):
          self._taken.put(work)
          found += 1
          if self._taken.qsize() >= ahead or closing.is_set():
            break
      except UnreachableError:  # the watcher's `answered` says so
        pass
      finally:
        self._looked.set()  # also where another error ends this thread: `take` does not wait for it
      again = time.monotonic() + (0.0 if found else limit_s / BEATS)
      while time.monotonic() < again and not closing.wait(poll_s):
        if sought != (self._version, self._watcher.view.plans.keys()):
          break
      while self._taken.qsize() >= ahead and not closing.wait(_PATIENCE_S):
        pass

  def find(self, version: int) -> Iterator[Work]:
    """Takes leases that a policy of this version may sample, the earliest draws first."""
    for plan in sorted(self._watcher.view.plans.values()):
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
        present = self._files.generations(f"leases/{prefix}")
        taken = {Lease(plan.draw, index_of(name)): present[name] for name in present}
        while (lease := self._book.take(wanted, taken)) is not None:
          yield Work(lease, plan, missing[lease])


class _Finished(NamedTuple):
  """A finished group; or, without data, the end of a lease."""

  lease: Lease
  group: int = 0
  data: bytes = b""
  tokens: int = 0


class _Writer:
  """Writes finished groups; the first writer of a group wins.

  Attributes:
    counts: of what was written.
  """

  def __init__(self, files: SharedFiles, book: LeaseBook):
    self._files, self._book = files, book
    self._entries: queue.Queue[_Finished | None] = queue.Queue()
    self.counts = Counts()

  def put(self, entry: _Finished | None) -> None:
    """Adds an entry; None ends `run`."""
    self._entries.put(entry)

  def run(self, closing: threading.Event) -> None:
    """Writes until the end; when it is closed, each group is tried once."""
    while (entry := self._entries.get()) is not None:
      if not entry.data:
        self._book.forget(entry.lease)
      while entry.data:
        try:
          self._write(entry)
        except UnreachableError:
          if not closing.wait(1.0):
            continue
        break

  def _write(self, entry: _Finished) -> None:
    try:
      name = group_name(entry.lease.draw, entry.group)
      self._files.put(name, entry.data, generation=0)
      self.counts.count(entry.tokens, duplicate=False)
    except ChangedError:
      self.counts.count(entry.tokens, duplicate=True)
