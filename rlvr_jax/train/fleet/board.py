"""The trainer's objects of a fleet, which a thread of its first process reads and writes."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from rlvr_jax.fleet.records import (
  TRAINER,
  FailureRecord,
  Plan,
  RecordError,
  SamplerRecord,
  TrainerRecord,
  draw_of,
  group_name,
  lease_name,
  plan_name,
)
from rlvr_jax.storage.bucket import MAX_CONCURRENT_REQUESTS, ChangedError, UnreachableError
from rlvr_jax.storage.shared import SharedFiles
from rlvr_jax.train.fleet.policies import Policy

GONE_S = 600.0  # without a change, until a sampler's record is removed
UNREACHABLE_S = 600.0  # without any answer of the storage, until the trainer ends


@dataclasses.dataclass
class _Found:
  """What the thread has read.

  Attributes:
    groups: names of the finished groups that were read.
    samplers: the last record of each, and when it changed, on this machine's clock.
    late: groups of draws that were not needed any more, so far.
    first_draw: whose predecessors' objects have been removed.
    failure: of a sampler, which must end the run; "" if there is none.
    error: of the thread; None while it works.
  """

  groups: set[str] = dataclasses.field(default_factory=set)
  samplers: dict[str, tuple[SamplerRecord, float]] = dataclasses.field(default_factory=dict)
  late: int = 0
  first_draw: int = -1
  failure: str = ""
  error: Exception | None = None

  def count_removed(self, names: Collection[str], first_draw: int) -> None:
    """Notes that the objects of all draws before `first_draw` are removed: these names."""
    groups = {name for name in names if name.startswith("groups/")}
    self.late += len(groups - self.groups)
    self.groups -= groups
    self.first_draw = first_draw

  def discard(self, names: Collection[str]) -> None:
    """Forgets that these groups were read, since they are sampled again."""
    self.groups.difference_update(names)

  def fail(self, *, failure: str = "", error: Exception | None = None) -> None:
    """Notes what must end the run."""
    self.failure, self.error = failure or self.failure, error or self.error


class Board:
  """Publishes plans and the trainer's record, and reads what samplers write."""

  def __init__(
    self,
    files: SharedFiles,
    record: TrainerRecord,
    published: Callable[[], list[Policy]],
    *,
    beat_s: float,
    poll_s: float,
  ):
    """Removes the failures of an earlier start, and starts the thread.

    Args:
      files: of the fleet.
      record: the first one of this trainer.
      published: the policies that can be restored.
      beat_s: seconds between two records of the trainer, and two looks at those of samplers.
      poll_s: seconds between two looks for finished groups.
    """
    self._files, self._record, self._published = files, record, published
    self._new: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
    self._found = _Found()
    self._draws = record.draws  # as in the record that is to be written next
    for name in files.names("failures/"):
      files.delete(name)
    self._write_record()
    self._closing = threading.Event()
    self._thread = threading.Thread(
      target=self._run, args=(beat_s, poll_s), name="board", daemon=True
    )
    self._thread.start()

  # --- plans --------------------------------------------------------------------------------------

  def publish_plan(self, plan: Plan) -> None:
    """Writes a plan, unless an earlier trainer has written the same."""
    name = plan_name(plan)
    others = [n for n in self._files.names(f"plans/{plan.draw:08d}-") if n != name]
    if others:  # updates that were lost came out differently, and a curriculum drew otherwise
      self._delete(others)
      self.discard(plan.draw)
    try:
      self._files.put(name, plan.encode(), generation=0)
    except ChangedError:  # an earlier trainer has written the same; its file may be damaged
      if self._read_if_there(name) != plan.encode():
        self._files.put(name, plan.encode())
    self._draws = [self._draws[0], plan.draw]

  def discard(self, draw: int, group: int | None = None, lease: int | None = None) -> None:
    """Removes a finished group of a draw and its lease, or all, so that they are sampled again."""
    prefix = f"{draw:08d}-"
    groups = self._files.names(f"groups/{prefix}") if group is None else [group_name(draw, group)]
    leases = self._files.names(f"leases/{prefix}") if lease is None else [lease_name(draw, lease)]
    self._delete([*groups, *leases])
    self._found.discard(groups)

  def forget(self, *, before: int) -> None:
    """Lets the thread remove everything of draws with a lower number."""
    self._draws = [before, self._draws[1]]

  # --- what samplers say --------------------------------------------------------------------------

  def take_groups(self) -> list[tuple[str, bytes]]:
    """(name, content) of the groups that were finished since the last call."""
    taken = []
    with contextlib.suppress(queue.Empty):
      while True:
        taken.append(self._new.get_nowait())
    return taken

  def samplers(self, *, within_s: float) -> Mapping[str, SamplerRecord]:
    """The last record of each sampler whose record has changed in the last seconds."""
    now = time.monotonic()
    return {
      name: record
      for name, (record, changed) in sorted(self._found.samplers.items())
      if now - changed < within_s
    }

  def late_groups(self) -> int:
    """Number of groups so far that were finished after their draw was complete."""
    return self._found.late

  def failure(self) -> str:
    """The message of a sampler's error that must end the run; "" if there is none."""
    if self._found.error is not None:
      raise self._found.error
    return self._found.failure

  def close(self, *, ended: bool) -> None:
    """Ends the thread; `ended`: whether the samplers are to end too."""
    self._closing.set()
    self._thread.join()
    self._record = self._record._replace(ended=ended)
    with contextlib.suppress(OSError, ChangedError):
      self._write_record()

  # --- the thread ---------------------------------------------------------------------------------

  def _run(self, beat_s: float, poll_s: float) -> None:
    answered = time.monotonic()
    beat = read = 0.0
    while not self._closing.wait(poll_s):
      try:
        now = time.monotonic()
        policies = [[p.version, p.fingerprint] for p in self._published()]
        if now - read > beat_s / 2:
          self._read_samplers()
          read = now
        draws = self._draws
        news = self._record._replace(policies=policies, draws=draws)
        if now - beat > beat_s or news != self._record:
          self._record = news._replace(beat=news.beat + 1)
          self._write_record()
          beat = now
        self._read_groups(draws[0])
        answered = time.monotonic()
      except UnreachableError as error:
        if time.monotonic() - answered > UNREACHABLE_S:
          self._found.fail(error=error)
          return
      except Exception as error:  # of any kind: `failure` raises it in the trainer
        self._found.fail(error=error)
        return

  def _write_record(self) -> None:
    self._files.put(TRAINER, self._record.encode())

  def _read_samplers(self) -> None:
    now = time.monotonic()
    present = self._files.names("samplers/")
    for name, data in self._read(present):
      with contextlib.suppress(RecordError):
        record = SamplerRecord.decode(data, name)
        key = name.partition("/")[2]
        before = self._found.samplers.get(key)
        if before is None or before[0] != record:
          self._found.samplers[key] = record, now
    for key in self._found.samplers.keys() - {name.partition("/")[2] for name in present}:
      del self._found.samplers[key]
    gone = [key for key, (_, changed) in self._found.samplers.items() if now - changed > GONE_S]
    self._delete([f"samplers/{key}" for key in gone])  # of killed ones; a live one writes it again
    for name in self._files.names("failures/"):
      message = FailureRecord.decode(self._files.read_generation(name)[0], name).message
      self._found.fail(failure=f"sampler {name.partition('/')[2]} failed: {message}")

  def _read_groups(self, first: int) -> None:
    """Reads new groups, and removes what belongs to draws before the first that is needed.

    By then the record says so, so that no sampler begins their groups again.
    """
    names = self._files.names("groups/")
    old = [name for name in names if draw_of(name) < first]
    new = [n for n in names if n not in self._found.groups and draw_of(n) >= first]
    for name, data in self._read(new):
      self._found.groups.add(name)
      self._new.put((name, data))
    if first != self._found.first_draw:
      others = [*self._files.names("plans/"), *self._files.names("leases/")]
      old += [name for name in others if draw_of(name) < first]
    self._delete(old)
    self._found.count_removed(old, first)

  def _read(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of those of the objects that are there."""
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
      for name, data in zip(names, pool.map(self._read_if_there, names), strict=True):
        if data is not None:
          yield name, data

  def _read_if_there(self, name: str) -> bytes | None:
    try:
      return self._files.read_generation(name)[0]
    except FileNotFoundError:
      return None

  def _delete(self, names: Collection[str]) -> None:
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
      list(pool.map(self._files.delete, names))
