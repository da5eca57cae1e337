"""The program of a sampler: samples groups of the trainer's draws until the run ends.

The names of the living samplers determine which sampler takes which group, see `Orders`; samplers
need no messages for this. If a group is late, other samplers may also take it. If two samplers then
finish the group, the first file counts.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from rlvr_jax.fleet.exchange import (
  Exchange,
  Place,
  RecordError,
  SamplerRecord,
  View,
  WantedDraw,
  Watch,
)
from rlvr_jax.rollouts.group import Draw, Group, Policy, Sampler
from rlvr_jax.types import Params

_UNKNOWN = -2
BEATS = 6  # number of records that a sampler writes per `silent_s`
SAY_EVERY_S = 30.0
# A living sampler may take this long for a group that it has begun, the longer of two times:
_BEGUN = 4  # × `Settings.patience_s`
_LONG = 8.0  # × the median time of a group; few groups take longer
_REMEMBERED = 64  # number of the latest groups over which the median is taken


class PolicyGoneError(RuntimeError):
  """A policy cannot be restored: it was removed or replaced, or cannot be read at present."""


class RefusedError(RuntimeError):
  """This sampler must not sample for the trainer: its code, configuration or data differ."""


class Settings(NamedTuple):
  """The settings of a sampler in a fleet."""

  name: str
  identity: Mapping[str, str]  # code, configuration, data …: must equal the trainer's identity
  capacity: int  # the most groups in progress, ≥ 1: one more than the number that fills the slots
  silent_s: float = 30.0  # seconds without a new record after which a sampler counts as dead
  patience_s: float = 30.0  # seconds after which a group of the oldest draw is late
  poll_s: float = 0.1  # seconds between two polls of the exchange, while there is nothing to do
  settle_s: float = 60.0  # seconds to wait for another trainer if the first ended or does not match
  idle_s: float = 3600.0  # seconds without a sign of the trainer after which the sampler ends


class Known(NamedTuple):
  """The term, version and fingerprint of an announced policy."""

  term: int
  version: int
  fingerprint: str


class Step(NamedTuple):
  """The next step that a sampler takes."""

  ended: bool = False  # whether the sampler is to end
  restore: Known | None = None  # a newer policy to restore
  want: Sequence[tuple[Draw, list[int]]] = ()  # groups to begin
  message: str = ""  # what the sampler does or waits for


class Orders:
  """An order of samplers for each group: the first takes it; if it is late, the next may take it.

  Which of two samplers comes first does not depend on the other samplers. So a sampler that joins
  takes some groups from the others, and all other groups stay with their samplers. When a sampler
  dies, only the groups of this sampler go to other samplers.
  """

  def __init__(self, names: Sequence[str]):
    self.names = [*names]
    hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    self._hashes = np.frombuffer(b"".join(hashes), np.uint64)
    self._of: dict[Place, list[str]] = {}

  def of(self, place: Place) -> list[str]:
    """The samplers in the order in which they may take a group."""
    if place not in self._of:
      key = _mix(np.array([(place[0] << 32 | place[1]) & (2**64 - 1)], np.uint64))
      self._of[place] = [self.names[i] for i in np.argsort(_mix(self._hashes ^ key))]
    return self._of[place]


def _mix(x: np.ndarray) -> np.ndarray:
  """u64[n] → u64[n], a permutation of all numbers that looks random (SplitMix64)."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return np.asarray(x ^ (x >> np.uint64(31)))


class Pace:
  """Measures how long groups take and which groups are late, by the clock of this machine."""

  def __init__(self, patience_s: float, clock: Callable[[], float]):
    """Starts without any observation.

    Args:
      patience_s: seconds after which a group of the oldest draw is late if nobody has begun it.
      clock: this machine's clock, in seconds.
    """
    self._patience_s, self._clock = patience_s, clock
    self._oldest = (-1, 0.0)  # (oldest draw that lacks groups, time since which it is the oldest)
    self._begun: dict[tuple[Place, str], float] = {}  # (group, sampler) → when it was seen to begin
    self._times: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)

  def note_lacking(self, number: int, numbers: Sequence[int]) -> None:
    """Notes that some groups of a draw have not been sampled yet.

    Args:
      number: the number of the draw.
      numbers: the numbers of the draws up to this draw, ascending.
    """
    if self._oldest[0] not in numbers:
      self._oldest = number, self._clock()

  def note_begun(self, place: Place, name: str) -> None:
    """Notes that a sampler has begun a group."""
    self._begun.setdefault((place, name), self._clock())

  def note_finished(self, place: Place, name: str) -> None:
    """Notes that this sampler, whose name is `name`, has finished a group."""
    self._times.append(self._clock() - self._begun.pop((place, name)))

  def keep(self, numbers: Sequence[int], name: str) -> None:
    """Forgets the begun groups of samplers other than `name`, except in the draws `numbers`."""
    self._begun = {
      key: since for key, since in self._begun.items() if key[0][0] in numbers or key[1] == name
    }

  def patiences(self, number: int) -> int:
    """How many times `patience_s` has passed since this draw became the oldest that lacks groups.

    The number is rounded down; it is 0 for a draw that is not the oldest.
    """
    oldest, since = self._oldest
    return int((self._clock() - since) / self._patience_s) if number == oldest else 0

  def times_late(self, place: Place, name: str) -> int:
    """How many allowed times have passed since the sampler `name` was seen to begin a group.

    The number is rounded down; 0: the group is not late. The allowed time is the longer of
    `_BEGUN` × `patience_s` and `_LONG` × the median time of the groups that this program's own
    sampler has finished. Until that sampler has finished a group, no group is late.
    """
    if not self._times:
      return 0
    allowed_s = max(_BEGUN * self._patience_s, _LONG * statistics.median(self._times))
    return int((self._clock() - self._begun[place, name]) / allowed_s)


@dataclasses.dataclass
class _Term:
  """The facts that a sampler knows about a trainer's term.

  Attributes:
    number: the number of the term; −1: no term has begun; `_UNKNOWN`: before the first look.
    settles_at: the time until which the sampler waits for another trainer if this trainer has ended
      or differs.
    differs: why the sampler must not sample for this trainer; "" if it may sample.
    sign: the trainer's policies and draws in the exchange, and the time when they last changed.
    pace: the pace of groups, in all terms.
    newest: the newest policy that was announced.
    draws: the draws that were read, by number.
    orders: the order of the living samplers, for each group.
  """

  number: int
  settles_at: float
  differs: str
  sign: tuple[object, float]
  pace: Pace
  newest: Known | None = None
  draws: dict[int, WantedDraw] = dataclasses.field(default_factory=dict)
  orders: Orders = dataclasses.field(default_factory=lambda: Orders([]))

  def see(self, sign: object, now: float) -> None:
    """Notes a listing of the trainer's objects; if it has changed, the trainer is at work."""
    if sign != self.sign[0]:
      if self.sign[0] is not None:
        self.settles_at = min(self.settles_at, now)
      self.sign = sign, now

  def note_policy(self, newest: Known) -> None:
    """Notes a policy that was announced."""
    self.newest = newest

  def keep(self, numbers: Sequence[int], living: Sequence[str]) -> None:
    """Forgets draws outside `numbers`; `living`: the samplers that share groups from now on."""
    self.draws = {number: draw for number, draw in self.draws.items() if number in numbers}
    if living != self.orders.names:
      self.orders = Orders(living)


class Member:
  """Decides what a sampler of a fleet samples next; it neither waits nor samples itself."""

  def __init__(self, exchange: Exchange, settings: Settings, clock: Callable[[], float]):
    """Initializes without reading the exchange; `clock`: this machine's clock, in seconds."""
    self._exchange, self._settings, self._clock = exchange, settings, clock
    self._watch = Watch(settings.silent_s, clock)
    pace = Pace(settings.patience_s, clock)
    self._term = _Term(_UNKNOWN, clock() + settings.settle_s, "", (None, clock()), pace)
    self._policy: Known | None = None  # the policy that samples
    self._begun: dict[Place, str] = {}  # groups in progress, with the digests of their draws
    self.record = SamplerRecord(-1, 0, -1, "starts", "", False, [], 0, 0)

  def look(self) -> Step:
    """Reads the exchange and decides the next step; records the step's groups as begun.

    Raises:
      RefusedError: this sampler must not sample for the trainer.
      RecordError: a record of the trainer is damaged, and no other trainer has begun for some time.
    """
    view, now = self._exchange.look(), self._clock()
    try:
      if self._term.number != view.term:
        self._begin_term(view.term)
      self._term.see((view.policies, view.draws), now)
      step = self._next_step(view)
    except RecordError as error:  # perhaps a crash has ended the trainer that wrote the record
      if now >= self._term.settles_at:
        raise
      step = Step(message=f"waits for another trainer: {error}")
    if now - self._term.sign[1] > self._settings.idle_s:
      step = Step(ended=True, message=f"saw no trainer for {self._settings.idle_s:.0f} s")
    doing = [[*place] for place in sorted(self._begun)]
    self.record = self.record._replace(term=view.term, message=step.message, doing=doing)
    return step

  def adopt(self, policy: Known) -> None:
    """Notes the policy with which the sampler samples from now on."""
    self._policy = policy
    self.record = self.record._replace(version=policy.version)

  def must_finish(self, policy: Known) -> bool:
    """Whether groups in progress must end before `policy` samples.

    They must if the policy that samples them is not older than `policy`.
    """
    return self.is_busy() and self._policy is not None and policy.version <= self._policy.version

  def give(self, groups: Sequence[Group]) -> None:
    """Writes finished groups."""
    name = self._settings.name
    for group in groups:
      samples = [{**sample, "sampler": name} for sample in group.samples]
      place = group.draw, group.index
      digest = self._begun.pop(place)
      self._term.pace.note_finished(place, name)
      late = not self._exchange.put_group(group._replace(samples=samples), digest)
      tokens = int(np.sum(group.arrays["lengths"]))
      self.record = self.record._replace(
        duplicate_groups=self.record.duplicate_groups + late,
        duplicate_tokens=self.record.duplicate_tokens + tokens * late,
      )

  def beat(self, number: int) -> None:
    """Writes this sampler's record with a new beat number; any thread may call this."""
    self._exchange.beat(self._settings.name, self.record._replace(beat=number))

  def fail(self, error: BaseException, *, ends_run: bool) -> None:
    """Writes an error into this sampler's record, so that the trainer can report it."""
    text = f"{type(error).__name__}: {error}"
    self.record = self.record._replace(error=text, ends_run=ends_run, doing=[])
    self.beat(0)

  def leave(self) -> None:
    """Removes this sampler's record from the exchange."""
    self._exchange.remove_sampler(self._settings.name)

  def is_busy(self) -> bool:
    """Whether groups are being sampled."""
    return bool(self._begun)

  # --- what to do ---------------------------------------------------------------------------------

  def _begin_term(self, number: int) -> None:
    """Follows another trainer.

    At the first look, the latest trainer may be an old one that has ended, or whose identity
    differs from this sampler's. So after the first look the sampler waits up to `settle_s` for a
    new trainer; later it does not wait.
    """
    now, own = self._clock(), self._settings.identity
    theirs = own if number < 0 else self._exchange.identity(number)
    if theirs is None:
      return  # a later term has begun: the next look finds it
    differing = [n for n in sorted({*own, *theirs}) if own.get(n) != theirs.get(n)]
    differs = ", ".join(f"{n}: {own.get(n)} here, {theirs.get(n)} there" for n in differing)
    settles_at = self._term.settles_at if self._term.number == _UNKNOWN else now
    self._term = _Term(number, settles_at, differs, (None, now), self._term.pace)

  def _next_step(self, view: View) -> Step:
    if self._term.number < 0 or self._term.number != view.term:
      return Step(message="waits for a trainer to begin")
    settled = self._clock() >= self._term.settles_at
    if self._term.differs:
      if settled:
        raise RefusedError(
          f"the trainer differs from this sampler ({self._term.differs}); start the sampler again"
          " with the trainer's code, --workdir and data"
        )
      return Step(message=f"waits for another trainer: {self._term.differs}")
    if view.ended:
      return Step(ended=settled, message="the trainer has all its batches")
    if (newest := self._newest(view)) is None:
      return Step(message="waits for the trainer's policy")
    if self._policy is not None and self._policy[1:] == newest[1:]:
      self._policy = newest  # its term may be newer, but its parameters are the same
    restore = newest if newest != self._policy else None
    if self._policy is None or self._policy.term != view.term:
      return Step(restore=restore, message=f"waits for version {newest.version} of the policy")
    want = self._choose(view, self._policy.version)
    message = f"samples {len(self._begun)} groups" if self._begun else "waits for groups to sample"
    return Step(restore=restore, want=want, message=message)

  def _newest(self, view: View) -> Known | None:
    """The newest policy; None if there is none, or if a newer policy has just replaced it."""
    for version in view.policies[-1:]:
      known = self._term.newest
      if known is not None and known.version == version:
        return known
      if (fingerprint := self._exchange.fingerprint(view.term, version)) is not None:
        known = Known(view.term, version, fingerprint)
        self._term.note_policy(known)
        return known
    return None

  def _choose(self, view: View, version: int) -> list[tuple[Draw, list[int]]]:
    """The groups to begin now, up to the sampler's capacity, from the oldest draws first."""
    living = sorted({*self._watch.look(view.samplers), self._settings.name})
    self._term.keep(view.draws, living)
    self._term.pace.keep(view.draws, self._settings.name)
    sampler = functools.cache(self._exchange.sampler)
    chosen = []
    lacking = ((n, i) for n in view.draws for i in self._lacking(view, n, version))
    for number, indices in itertools.groupby(lacking, key=lambda place: place[0]):
      late = self._term.pace.patiences(number)
      mine = []
      for place in indices:
        if len(self._begun) >= self._settings.capacity:
          break
        if place not in self._begun and self._is_mine(place, late, sampler):
          self._begun[place] = self._term.draws[number].digest
          self._term.pace.note_begun(place, self._settings.name)
          mine.append(place[1])
      if mine:
        chosen.append((self._term.draws[number].draw, mine))
    return chosen

  def _lacking(self, view: View, number: int, version: int) -> list[int]:
    """The indices of a draw's groups without a file; [] if the draw needs a newer `version`."""
    if number not in self._term.draws:
      if (wanted := self._exchange.get_draw(view.term, number)) is None:
        return []
      self._term.draws[number] = wanted
    wanted = self._term.draws[number]
    if wanted.draw.version > version:
      return []
    lacking = [index for index in wanted.indices if (number, index) not in view.groups]
    if lacking:
      self._term.pace.note_lacking(number, view.draws[: view.draws.index(number) + 1])
    return lacking

  def _is_mine(
    self, place: Place, late: int, sampler: Callable[[str], SamplerRecord | None]
  ) -> bool:
    """Whether this sampler is to begin a group that has no file.

    The first sampler in the group's order begins it; each time that `patience_s` passes, twice as
    many samplers may. If a sampler has begun the group, the other samplers wait until the group
    takes much longer than other groups, see `Pace.times_late`.

    Args:
      place: the group.
      late: the result of `Pace.patiences` for its draw.
      sampler: name → the record of a sampler.
    """
    order = self._term.orders.of(place)
    position = order.index(self._settings.name)
    if position >= 2**late:
      return False
    others = [name for name in order[: max(2, position)] if name != self._settings.name]
    records = {name: sampler(name) for name in others}
    doing = [name for name, x in records.items() if x is not None and [*place] in x.doing]
    for name in doing:
      self._term.pace.note_begun(place, name)
    if not doing:
      return True
    times = min(self._term.pace.times_late(place, name) for name in doing)
    return times > 0 and position < 2**times


def run_sampler(
  exchange: Exchange,
  sampler: Sampler,
  settings: Settings,
  restore: Callable[[int, str], Params],
  *,
  ends_run: tuple[type[BaseException], ...] = (),
  stop: Callable[[], bool] = lambda: False,
  say: Callable[[str], None] = print,
) -> None:
  """Samples for the trainer until the trainer has all its batches.

  Args:
    exchange: the run's folder or bucket in which trainer and samplers exchange files.
    sampler: the sampler of this program; it is closed at the end.
    settings: the settings of this sampler.
    restore: (version, fingerprint) → the policy's parameters. It is called in a thread, while the
      sampler continues. Both `restore` and the sampler's `offer` may raise PolicyGoneError.
    ends_run: classes of errors that any sampler would meet; such an error also ends the run.
    stop: whether to end now, as after a signal.
    say: prints a line.
  Raises:
    RefusedError: this sampler must not sample for the trainer.
  """
  member = Member(exchange, settings, time.monotonic)
  speaker = Speaker(f"sampler {settings.name}", say, time.monotonic)
  try:
    with _beating(member, settings.silent_s / BEATS), _restoring() as begin:
      coming: tuple[Known, Future[Params]] | None = None
      while not (step := member.look()).ended and not stop():
        if coming is None and step.restore is not None:
          coming = step.restore, begin(restore, *step.restore[1:])
        if coming is not None and coming[1].done() and not member.must_finish(coming[0]):
          (known, future), coming = coming, None
          with contextlib.suppress(PolicyGoneError):  # the next look finds a newer policy
            sampler.offer(policy_of(known, future.result()))
            member.adopt(known)
        for draw, indices in step.want:
          sampler.want(draw, indices)
        speaker.say(step.message)
        if member.is_busy():
          member.give(sampler.take())
        else:
          time.sleep(settings.poll_s)
      why = step.message if step.ended else "it was asked to"
      say(f"sampler {settings.name} ends: {why}")
  except BaseException as error:
    with contextlib.suppress(OSError):
      member.fail(error, ends_run=isinstance(error, ends_run))
    raise
  finally:
    sampler.close()
  member.leave()


def policy_of(known: Known, params: Params) -> Policy:
  """A restored policy in the form that samplers take."""
  return Policy(known.version, params, lambda: known.fingerprint)


class Speaker:
  """Prints what a program waits for, at each change and from time to time."""

  def __init__(self, who: str, say: Callable[[str], None], clock: Callable[[], float]):
    self._who, self._say, self._clock = who, say, clock
    self._last = ("", -math.inf)

  def say(self, message: str) -> None:
    """Prints a message, unless a message with the same first word was printed lately."""
    text, at = self._last
    if message.split()[0] != text.partition(" ")[0] or self._clock() - at > SAY_EVERY_S:
      self._last = message, self._clock()
      self._say(f"{self._who} {message}")


@contextlib.contextmanager
def _beating(member: Member, every_s: float) -> Iterator[None]:
  """Context in which a thread writes the sampler's record regularly, as a heartbeat."""
  ended = threading.Event()

  def run() -> None:
    for number in itertools.count(1):
      with contextlib.suppress(OSError):  # the next look gets the same error
        member.beat(number)
      if ended.wait(every_s):
        return

  thread = threading.Thread(target=run, name="beats", daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


@contextlib.contextmanager
def _restoring() -> Iterator[Callable[..., Future[Params]]]:
  """Context that yields `submit`, which calls a function in a thread and returns a Future."""
  pool = ThreadPoolExecutor(1, "restore")
  try:
    yield pool.submit
  finally:
    pool.shutdown(wait=False, cancel_futures=True)
