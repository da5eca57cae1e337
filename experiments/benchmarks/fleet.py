"""A fleet of 100 samplers, simulated: the trainer's utilisation, lags, idle slots, requests.

  python experiments/benchmarks/fleet.py

Discrete events in virtual time; nothing is computed and nobody waits. Samplers look, take leases
and renew them by the code of fleets (`train.fleet.desk`, `fleet.leases`), against objects in memory
whose requests take 20 to 500 ms. The rest is restated here, simplified:

* A token of a response takes the same time in every slot. Lengths are lognormal.
* A sampler takes leases ahead for its next free slots, and is preempted at random; another one
  comes later. With "finish" newer weights wait until all slots are empty; with "switch" they come
  at once.
* The trainer looks for finished groups, and an update takes the same time always.

Every random number follows from the seed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

import numpy as np

from experiments.benchmarks.tables import write_results
from rlvr_jax.fleet.leases import BEATS, LeaseBook
from rlvr_jax.fleet.records import TRAINER, Plan, TrainerRecord, draw_of, group_name, plan_name
from rlvr_jax.storage.bucket import DEADLINE_S, ChangedError
from rlvr_jax.train.fleet.desk import Taker, Watcher, Work

RESULTS = pathlib.Path(__file__).parent / "results" / "fleet"
PAGE = 1000  # names in one answer of a bucket
AT_ONCE = 16  # requests of the trainer
_PATIENCE_S = 0.5  # of a sampler that has enough leases ahead


class Setting(NamedTuple):
  """A fleet and its work; times in seconds."""

  new_weights: str = "finish"
  groups_per_lease: int = 8
  silent_s: float = 60.0
  poll_s: float = 1.0
  samplers: int = 100
  slots: int = 32  # of a sampler
  groups: int = 384  # of a batch
  group_size: int = 16
  median_tokens: int = 1000
  sigma: float = 0.8
  max_tokens: int = 8192
  token_s: float = 0.01  # of a slot
  max_lag: int = 4
  update_s: float = 32.0
  restore_s: float = 20.0  # from the end of an update until its weights are in a sampler
  preempted_per_minute: float = 0.05
  back_s: float = 120.0  # until a preempted sampler is replaced
  warmup_s: float = 600.0  # not counted
  end_s: float = 1800.0
  seed: int = 0


class Objects:
  """Objects in memory, with the interface of `storage.shared`.

  Attributes:
    requests: number so far, by kind.
    seconds: that they have taken, one after another.
  """

  def __init__(self, rng: np.random.Generator):
    self.requests: collections.Counter[str] = collections.Counter()
    self.seconds = 0.0
    self._rng, self._generations = rng, itertools.count(1)
    self._objects: dict[str, dict[str, tuple[bytes, int]]] = collections.defaultdict(dict)

  def names(self, prefix: str = "") -> list[str]:
    return [*self.generations(prefix)]

  def generations(self, prefix: str = "") -> dict[str, int]:
    folder = self._objects[prefix.partition("/")[0]]
    found = sorted(name for name in folder if name.startswith(prefix))
    self._count("list", 1 + len(found) // PAGE)
    return {name: folder[name][1] for name in found}

  def read_generation(self, name: str) -> tuple[bytes, int]:
    self._count("read")
    folder = self._objects[name.partition("/")[0]]
    if name not in folder:
      raise FileNotFoundError(name)
    return folder[name]

  def put(
    self,
    name: str,
    data: bytes,
    *,
    generation: int | None = None,
    deadline_s: float = DEADLINE_S,
  ) -> int:
    self._count("write")
    folder = self._objects[name.partition("/")[0]]
    _, present = folder.get(name, (b"", 0))
    if generation is not None and generation != present:
      raise ChangedError(name)
    folder[name] = data, next(self._generations)
    return folder[name][1]

  def delete(self, name: str, *, generation: int | None = None) -> None:
    self._count("delete")
    folder = self._objects[name.partition("/")[0]]
    if name in folder and generation in (None, folder[name][1]):
      del folder[name]

  def _count(self, kind: str, requests: int = 1) -> None:
    self.requests[kind] += requests
    latencies = self._rng.lognormal(np.log(0.06), 0.8, requests)
    self.seconds += float(np.clip(latencies, 0.02, 0.5).sum())


@dataclasses.dataclass
class Sampler:
  """One sampler, from its start until it is preempted.

  Attributes:
    watcher, book, taker: of its desk.
    free: f64[slots], when each slot is free.
    versions: (when, version) of its weights.
    coming: a version that is being restored, or waits; None: there is none.
    drains: whether it waits until all slots are empty.
    waits: number of the wait after it found no lease; 0: it does not wait.
    ahead: leases that it has not begun.
    left: unfinished groups of the leases that it has begun.
    alive: whether it has not been preempted.
  """

  watcher: Watcher
  book: LeaseBook
  taker: Taker
  free: np.ndarray
  versions: list[tuple[float, int]]
  coming: int | None = None
  drains: bool = False
  waits: int = 0
  ahead: collections.deque[Work] = dataclasses.field(default_factory=collections.deque)
  left: dict[Any, int] = dataclasses.field(default_factory=dict)
  alive: bool = True

  @property
  def version(self) -> int:
    return self.versions[-1][1]


class Fleet:
  """The simulation; `run` gives its figures."""

  def __init__(self, setting: Setting):
    self.s, self.now = setting, 0.0
    self._rng = np.random.default_rng(setting.seed)
    self._files = Objects(np.random.default_rng(setting.seed + 1))
    self._events: list[tuple[float, int, Callable[[], None]]] = []
    self._order = itertools.count()
    self._lags: collections.Counter[int] = collections.Counter()  # tokens
    self._count: collections.Counter[str] = collections.Counter()
    self._tokens: dict[str, list[tuple[int, int]]] = {}  # (version, tokens) of finished groups
    self._version = 0
    self._beat = 0

  def run(self) -> dict[str, Any]:
    """Runs until the end; returns a row of the table."""
    s = self.s
    for batch in range(s.max_lag + 1):
      self._open(batch)
    self._write_record()
    for _ in range(s.samplers):
      self._start()
    self._look_for_groups()
    before: collections.Counter[str] = collections.Counter()
    while self._events and self._events[0][0] < s.end_s:
      self.now, _, event = heapq.heappop(self._events)
      if not before and self.now >= s.warmup_s:
        before = self._count + self._files.requests
        self._lags.clear()
      event()
    found = self._count + self._files.requests
    during = lambda name: found[name] - before[name]
    seconds, tokens = s.end_s - s.warmup_s, max(1, sum(self._lags.values()))
    kinds = ("list", "read", "write", "delete")
    return {
      "new weights": s.new_weights,
      "max_lag": s.max_lag,
      "preempted per minute": f"{s.preempted_per_minute:.0%}",
      "groups per lease": s.groups_per_lease,
      "silent after, s": s.silent_s,
      "looks every, s": s.poll_s,
      "trainer busy": f"{during('update') * s.update_s / seconds:.0%}",
      "slots idle": f"{during('idle') / max(1, during('idle') + during('used')):.1%}",
      "mean lag": sum(lag * n for lag, n in self._lags.items()) / tokens,
      "largest lag": max(self._lags, default=0),
      "tokens sampled twice or lost": f"{during('lost') / max(1, during('sampled')):.1%}",
      "requests per s": during("list") / seconds + sum(map(during, kinds[1:])) / seconds,
      **{f"{kind}s per s": during(kind) / seconds for kind in kinds},
    }

  def _at(self, when: float, event: Callable[[], None]) -> None:
    heapq.heappush(self._events, (when, next(self._order), event))

  def _timed(self, requests: Callable[[], Any]) -> tuple[Any, float]:
    """The result of requests, and the seconds that they took."""
    before = self._files.seconds
    return requests(), self._files.seconds - before

  # --- trainer ------------------------------------------------------------------------------------

  def _open(self, batch: int) -> None:
    s = self.s
    firsts = range(0, s.groups, s.groups_per_lease)
    leases = [[first, min(first + s.groups_per_lease, s.groups)] for first in firsts]
    lowest = max(0, batch - s.max_lag)
    plan = Plan(batch, batch, lowest, [], {}, lowest, leases)
    self._files.put(plan_name(plan), plan.encode(), generation=0)

  def _write_record(self) -> None:
    self._beat += 1
    policies = [[self._version, f"{self._version:08x}"]]
    draws = [self._version, self._version + self.s.max_lag]
    record = TrainerRecord("", "", "", "", policies, draws, False, self._beat)
    self._files.put(TRAINER, record.encode())

  def _look_for_groups(self) -> None:
    """The trainer looks whether its next batch is complete."""
    names = [n for n in self._files.names("groups/") if draw_of(n) == self._version]
    if len(names) < self.s.groups:
      self._at(self.now + self.s.poll_s, self._look_for_groups)
      return
    _, seconds = self._timed(lambda: [self._files.read_generation(name) for name in names])
    for version, tokens in itertools.chain.from_iterable(map(self._tokens.pop, names)):
      self._lags[self._version - version] += tokens
    self._at(self.now + self.s.update_s + seconds / AT_ONCE, self._end_update)

  def _end_update(self) -> None:
    self._count["update"] += 1
    self._version += 1
    for kind in ("plans", "leases", "groups"):
      for name in self._files.names(f"{kind}/"):
        if draw_of(name) < self._version:
          self._files.delete(name)
    self._open(self._version + self.s.max_lag)
    self._write_record()
    self._look_for_groups()

  # --- samplers -----------------------------------------------------------------------------------

  def _start(self) -> None:
    s = self.s
    watcher = Watcher(self._files)  # type: ignore[arg-type]  # the interface is the same
    book = LeaseBook(self._files, "", limit_s=s.silent_s, clock=lambda: self.now)  # type: ignore[arg-type]
    taker = Taker(self._files, book, watcher)  # type: ignore[arg-type]
    free = np.full(s.slots, self.now)
    sampler = Sampler(watcher, book, taker, free, [(self.now, self._version)])
    self._at(self.now + self._rng.exponential(60 / s.preempted_per_minute), lambda: end())
    self._at(self.now + self._rng.uniform(0, s.silent_s / BEATS), lambda: self._renew(sampler))
    self._at(self.now + self._rng.uniform(0, s.poll_s), lambda: self._watch(sampler))
    self._at(self.now + self._rng.uniform(s.poll_s, 2 * s.poll_s), lambda: self._take(sampler, 0))

    def end() -> None:
      sampler.alive = False
      self._at(self.now + s.back_s, self._start)

  def _renew(self, sampler: Sampler) -> None:
    if sampler.alive:
      sampler.book.beat()
      self._files.put(f"samplers/{id(sampler)}", b"")
      self._at(self.now + self.s.silent_s / BEATS, lambda: self._renew(sampler))

  def _watch(self, sampler: Sampler) -> None:
    """Looks at trainer and plans; newer weights are there after they are restored."""
    if not sampler.alive:
      return
    before = sampler.watcher.view.plans.keys()
    sampler.watcher.look()
    newest = sampler.watcher.view.newest()
    if sampler.waits and sampler.watcher.view.plans.keys() != before:
      self._take(sampler, sampler.waits)
    if newest is not None and newest.version > max(sampler.version, sampler.coming or 0):
      sampler.coming = newest.version
      self._at(self.now + self.s.restore_s, lambda: self._swap(sampler))
    self._at(self.now + self.s.poll_s, lambda: self._watch(sampler))

  def _swap(self, sampler: Sampler) -> None:
    """The weights that come are restored: they sample now, or when all slots are empty."""
    if not sampler.alive or sampler.coming is None:
      return
    if self.s.new_weights == "finish" and (end := sampler.free.max()) > self.now:
      sampler.drains = True
      self._at(end, lambda: self._swap(sampler))
      return
    sampler.versions.append((self.now, sampler.coming))
    sampler.coming = None
    sampler.drains = False
    self._fill(sampler)
    if sampler.waits:
      self._take(sampler, sampler.waits)

  def _take(self, sampler: Sampler, wait: int) -> None:
    """Takes leases ahead, as the thread of a desk; `wait`: the one that ends."""
    if not sampler.alive or wait != sampler.waits:
      return
    sampler.waits, wait_s = 0, _PATIENCE_S
    if len(sampler.ahead) < self._wanted():
      work, wait_s = self._timed(lambda: next(sampler.taker.find(sampler.version), None))
      if work is None:  # until there are other plans or weights, or leases may be silent
        sampler.waits = next(self._order) + 1
        wait_s += self.s.silent_s / BEATS
      else:
        sampler.left[work.lease] = len(work.groups)
        self._at(self.now + wait_s, functools.partial(self._add, sampler, work))
    self._at(self.now + wait_s, functools.partial(self._take, sampler, sampler.waits))

  def _wanted(self) -> int:
    """Leases ahead, as a sampler asks for: as many as fill its slots."""
    return max(1, -(-self.s.slots // (self.s.groups_per_lease * self.s.group_size)))

  def _add(self, sampler: Sampler, work: Work) -> None:
    sampler.ahead.append(work)
    self._fill(sampler)

  def _fill(self, sampler: Sampler) -> None:
    """Begins leases while slots are free."""
    s = self.s
    while sampler.alive and sampler.ahead and not sampler.drains and sampler.free.min() <= self.now:
      work = sampler.ahead.popleft()
      for group in work.groups:
        lengths = self._rng.lognormal(np.log(s.median_tokens), s.sigma, s.group_size)
        lengths = np.clip(lengths, 1, s.max_tokens).astype(int)
        spans = [self._decode(sampler, int(length)) for length in lengths]
        end = max(end for _, end in spans)
        self._at(end, functools.partial(self._finish, sampler, work, group, spans))
    if sampler.ahead and sampler.alive and not sampler.drains:
      self._at(float(sampler.free.min()), lambda: self._fill(sampler))

  def _decode(self, sampler: Sampler, length: int) -> tuple[float, float]:
    """(start, end) of a response in the slot that is free first."""
    slot = int(np.argmin(sampler.free))
    start = max(self.now, float(sampler.free[slot]))
    end = start + length * self.s.token_s
    self._count["idle"] += start - float(sampler.free[slot])
    self._count["used"] += end - start
    sampler.free[slot] = end
    return start, end

  def _finish(
    self, sampler: Sampler, work: Work, group: int, spans: list[tuple[float, float]]
  ) -> None:
    tokens = round(sum(end - start for start, end in spans) / self.s.token_s)
    self._count["sampled"] += tokens
    if not sampler.alive:
      self._count["lost"] += tokens
      return
    name = group_name(work.lease.draw, group)
    try:
      self._files.put(name, b"", generation=0)
      if work.lease.draw >= self._version:
        self._tokens[name] = list(self._versions_of(sampler, spans))
    except ChangedError:
      self._count["lost"] += tokens
    sampler.left[work.lease] -= 1
    if not sampler.left[work.lease]:
      del sampler.left[work.lease]
      sampler.book.forget(work.lease)

  def _versions_of(
    self, sampler: Sampler, spans: list[tuple[float, float]]
  ) -> Iterator[tuple[int, int]]:
    """(version, tokens) of a group: of the weights that sampled each token."""
    ends = [*(when for when, _ in sampler.versions[1:]), np.inf]
    for (begin, version), until in zip(sampler.versions, ends, strict=True):
      for start, end in spans:
        seconds = min(end, until) - max(start, begin)
        if seconds > 0:
          yield version, round(seconds / self.s.token_s)


def main() -> None:
  base = Setting()
  settings = [
    *(base._replace(groups_per_lease=n) for n in (8, 4, 2, 1)),
    *(base._replace(groups_per_lease=2, silent_s=t) for t in (20.0, 30.0, 180.0)),
    base._replace(groups_per_lease=2, poll_s=5.0),
    base._replace(groups_per_lease=2, new_weights="switch"),
    base._replace(groups_per_lease=2, max_lag=8),
    base._replace(groups_per_lease=2, preempted_per_minute=1e-6),
  ]
  rows = []
  for setting in settings:
    rows.append(Fleet(setting).run())
    print(rows[-1], flush=True)
  shown = {name: value for name, value in base._asdict().items() if name not in _VARIED}
  print(write_results(RESULTS, "A fleet of 100 samplers, simulated", rows, shown))


_VARIED = (
  *("new_weights", "max_lag", "preempted_per_minute"),
  *("groups_per_lease", "silent_s", "poll_s"),
)

if __name__ == "__main__":
  main()
