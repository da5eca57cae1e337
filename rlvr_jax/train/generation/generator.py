"""Batches in order: drawn, sampled, graded, compared with the trainer, and written to the store."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.data.curriculum import problem_draws
from rlvr_jax.models.flops import forward_flops
from rlvr_jax.rollouts.batch import (
  FOREIGN,
  BatchInFlight,
  Flight,
  PolicySnapshot,
  Position,
  RolloutBatch,
  from_shard,
  grades_of,
  may_finish,
  solve_rate,
  solve_rates,
  to_shard,
  with_recorded,
)
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.rollouts.store import RolloutStore, TornShardError
from rlvr_jax.train.cluster import multihost, sharding
from rlvr_jax.train.generation import agreement, dynamic_sampling, raw_logprobs
from rlvr_jax.train.generation.streams import Streams
from rlvr_jax.train.reporting import machines
from rlvr_jax.train.reporting.progress import warn
from rlvr_jax.train.reporting.run_log import DeviceClock
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.checks import shaped_outcomes
from rlvr_jax.train.setup.grading import make_outcome_policy
from rlvr_jax.types import Array, Params

_ABSENT, _INTACT = "", "intact"  # states of a batch in the store; others are error messages

# (wait, until) → the policy of the next batch, or None if there is no batch to sample now, which
# ends the generation if no batch is in flight. `wait`: whether it may wait for a policy; `until`: a
# future of grades that ends the wait, or None.
NextPolicy = Callable[[bool, Future[None] | None], PolicySnapshot | None]


def fingerprint_of(checksums: Array) -> Callable[[], str]:
  """A function that returns 16 hexadecimal digits, which identify parameters.

  Args:
    checksums: u32[leaves], from `Programs.checksums`; the function waits for them once.
  """

  @functools.cache
  def fingerprint() -> str:
    data = np.asarray(sharding.to_host(checksums)).astype("<u4").tobytes()
    return hashlib.sha256(data).hexdigest()[:16]

  return fingerprint


class _Counts(NamedTuple):
  number: int = 0  # of the next batch
  draws: int = 0  # batches of prompts
  checked_version: int = -1  # whose log-probabilities were last compared with the trainer's
  version: int = 0  # of the policy that sampled the last batch


class Generator:
  """Makes batches from the policies that it is given.

  `OnDemand` and `AsyncGenerator` decide which policy samples which batch, and when.
  """

  def __init__(
    self,
    parts: Parts,
    frozen: Params,
    collector: Collector,
    store: RolloutStore,
    clock: DeviceClock,
  ):
    """Binds a run's objects; nothing is sampled yet.

    Args:
      parts: of the run.
      frozen: the parameters that are not trained, on the devices that generate.
      collector: decodes and grades.
      store: gets every batch.
      clock: of the devices that generate.
    """
    self._parts, self._frozen, self._collector, self._store = parts, frozen, collector, store
    self._clock = clock
    live = parts.sources.live
    self._streams = Streams(live, collector, store.journal())
    # If all groups are recorded, no problem is drawn, but the position is saved.
    self._problems = problem_draws(
      parts.task.train, batch_size=max(parts.sources.num_live, 1), seed=parts.config.seed
    )
    self._counts = _Counts()

  @property
  def number(self) -> int:
    """Number of the next batch, from 0."""
    return self._counts.number

  @property
  def version(self) -> int:
    """Number of updates of the policy that sampled the last batch."""
    return self._counts.version

  def position(self) -> Position:
    """Where generation stands; it determines the next batches."""
    counts = self._counts
    return Position(counts.number, counts.draws, counts.checked_version, self._problems.get_state())

  def move_to(self, position: Position, version: int | None = None) -> None:
    """Continues from a position, after a batch that a policy of `version` has sampled."""
    self._problems.set_state(position.problems)
    self._counts = _Counts(
      position.number,
      position.draws,
      position.checked_version,
      self._counts.version if version is None else version,
    )

  def sync_weights(self, params: Params, version: int) -> PolicySnapshot:
    """Syncs the trainer's parameters after `version` updates to the devices that generate."""
    programs, sources = self._parts.programs, self._parts.sources
    params = programs.sync_weights(params, self._parts.schedule.real_time)
    of_source = tuple(source.params_of(params, self._frozen) for source in sources.live)
    return PolicySnapshot(params, version, fingerprint_of(programs.checksums(params)), of_source)

  def batches(self, next_policy: NextPolicy, last: int | None = None) -> Iterator[RolloutBatch]:
    """Yields batches in order as they are graded; workers grade while the devices generate.

    Args:
      next_policy: see `NextPolicy`.
      last: number of the batch after the last one, if it is known, for the time left.
    """
    in_flight: collections.deque[BatchInFlight] = collections.deque()  # sampled, being graded
    graded = lambda: self._keep(self._finish(in_flight.popleft()))
    ahead: list[PolicySnapshot] = []  # of a batch that did not belong into the last stream
    while True:
      # Without waiting for grades if a policy is available, so that graders do not run out of work.
      until = grades_of(in_flight[0]) if in_flight else None
      policy = ahead.pop() if ahead else next_policy(not in_flight or until is not None, until)
      if policy is None:
        if not in_flight:
          return
        yield graded()
        continue
      if (state := self._state_in_store()) != _ABSENT:
        while in_flight:  # first, so that batches are yielded in order
          yield graded()
        if (known := self._recall(state, policy)) is not None:
          yield known
          continue
      if self._parts.config.dynamic_sampling.enabled:
        yield self._keep(self._sample_mixed_groups(policy))
        continue

      def of_policy(policy=policy) -> Iterator[BatchInFlight]:
        """The batches that this policy samples from now on."""
        while True:
          yield self._start(policy)
          following = next_policy(False, None)
          if following is not policy or self._state_in_store() != _ABSENT:
            ahead.extend([] if following is None else [following])
            return

      groups = (last - self.number) * self._parts.sources.num_live if last is not None else None
      for complete in self._sample(of_policy(), policy, groups):
        in_flight.extend(complete)
        while in_flight and may_finish(in_flight):
          yield graded()

  def stored(self) -> Iterator[RolloutBatch]:
    """The next batches that the store already has, whichever policy sampled them.

    Batches behind a damaged one are set aside: it will be sampled again and differ, so later
    policies will too.
    """
    while (state := self._state_in_store()) and (batch := self._recall(state)):
      yield batch
    for number in self._store.numbers():
      if number >= self.number:
        self._set_aside(number, f"rollouts {number} came after a damaged batch")

  # --- the store ----------------------------------------------------------------------------------

  def _state_in_store(self) -> str:
    """The next batch's state in the store: `_ABSENT`, `_INTACT`, or an error message.

    The first process reads the store; all processes get the same state.
    """
    state = _ABSENT
    if multihost.is_first() and self.number in self._store.numbers():
      try:
        self._store.read(self.number)
        state = _INTACT
      except TornShardError as error:
        state = str(error)
    return multihost.exchange(state)[0]

  def _recall(self, state: str, policy: PolicySnapshot | None = None) -> RolloutBatch | None:
    """The next batch from the store; a damaged one is set aside.

    Args:
      state: of the batch, see `_state_in_store`.
      policy: the one that must have sampled it; None accepts any policy.
    """
    number = self.number
    if state != _INTACT:
      self._set_aside(number, state)
      return None
    batch = from_shard(number, *self._store.read(number))
    if policy is not None:
      sampled_by = (batch.version, batch.fingerprint)
      expected = (policy.version, policy.fingerprint())
      if sampled_by != expected:
        self._set_aside(
          number,
          f"rollouts {number} were sampled by version {sampled_by[0]} with fingerprint"
          f" {sampled_by[1]}, not by version {expected[0]} with {expected[1]}",
        )
        return None
    assert batch.position is not None  # every batch of a store has one
    self.move_to(batch.position, batch.version)
    return batch

  def _set_aside(self, number: int, why: str) -> None:
    """Moves a batch's shard away in the store, so that the batch can be sampled again."""
    warn(f"{why}; it is set aside, and sampled again")
    multihost.on_first(lambda: self._store.set_aside(number), None)

  def _keep(self, batch: RolloutBatch) -> RolloutBatch:
    """Writes the batch to the store and returns it."""
    c, sources = self._parts.config, self._parts.sources
    about = dict(
      tokenizer=c.tokenizer,
      truncated=sources.truncated,
      shaped=bool(c.overlong.buffer)
      or bool(shaped_outcomes(make_outcome_policy(c)))
      or sources.shaped,
      group_size=c.batch.group_size,
      max_prompt_length=c.max_prompt_length,
      max_response_length=c.max_response_length,
      sources=[source.name for source in sources],
    )
    arrays, info, samples = to_shard(batch, **about)
    draws = info["after"]["draws"]

    def write() -> None:
      self._store.append(batch.number, arrays, info, samples)
      self._streams.forget(before=draws)

    multihost.on_first(write, None)
    return batch

  # --- one batch ----------------------------------------------------------------------------------

  def _start(self, policy: PolicySnapshot) -> BatchInFlight:
    """A batch of problems to be sampled, without groups that a killed process has sampled."""
    c, sources, counts = self._parts.config, self._parts.sources, self._counts
    self._counts = _Counts(
      counts.number + 1, counts.draws + 1, counts.checked_version, policy.version
    )
    flight: Flight | None = None
    requests: list[Any] = []
    if sources.live:
      flight = self._collector.begin(self._problems.draw(counts.draws, policy.version))
      requests = self._streams.requests(
        flight, policy, seed=c.seed, draw=counts.draws, group_size=c.batch.group_size
      )
    recorded = None
    if sources.recorded is not None:
      first = counts.draws * sources.num_recorded
      recorded = sources.recorded.take(first, sources.num_recorded)
    of_sources = [policy.version if source.of_this_run else FOREIGN for source in sources]
    return BatchInFlight(
      number=counts.number,
      draw=counts.draws,
      snapshot=policy,
      versions=np.repeat(np.asarray(of_sources, np.int32), sources.quotas),
      position=self.position()._replace(checked_version=policy.version),
      dispatched=time.perf_counter(),
      flight=flight,
      requests=requests,
      recorded=recorded,
    )

  def _sample(
    self, batches: Iterable[BatchInFlight], policy: PolicySnapshot, groups: int | None = None
  ) -> Iterator[list[BatchInFlight]]:
    """As `Streams.sample`, with the time that each batch has taken."""
    counted = dataclasses.replace(self._streams.usage)
    for complete in self._streams.sample(batches, policy, groups):
      now = time.perf_counter()
      timed: list[BatchInFlight] = []
      for batch in complete:
        timings: dict[str, float] = {}
        if batch.flight is not None:
          took = now - max(batch.dispatched, self._clock.free_from)
          self._clock.freed(now)
          timings = {"time/generate_seconds": took, **machines.memory("generate")}
          if not any(earlier.timings for earlier in timed):
            used = self._streams.usage.since(counted)
            counted = dataclasses.replace(self._streams.usage)
            timings |= {f"time/{name}": value for name, value in vars(used).items()}
        timed.append(dataclasses.replace(batch, timings=timings))
      yield timed

  def _finish(self, batch: BatchInFlight) -> RolloutBatch:
    """Waits for the grades and assembles the batch."""
    parts, sources, policy = self._parts, self._parts.sources, batch.snapshot
    graded, position, flops = batch.recorded, batch.position, 0.0
    sampled = [] if graded is None else [graded.train.mask]
    timings = dict(batch.timings)
    if batch.flight is not None:
      began = time.perf_counter()
      own = self._collector.finish(batch.flight, batch.versions.tolist()[: sources.num_live])
      solved = solve_rates(own.train).astype(np.float32)
      problems, observed = self._problems.observe(batch.draw, solved, position.problems)
      position = position._replace(problems=problems)
      own = own._replace(statistics=own.statistics | observed)
      timings["time/grade_seconds"] = time.perf_counter() - began
      timings |= machines.memory("grade")
      lengths: Any = batch.flight.rollouts.lengths
      tokens = np.arange(own.train.mask.shape[-1]) < lengths[..., None]
      sampled.insert(0, tokens.astype(np.float32))
      flops = forward_flops(parts.model.config, batch.flight.prompts.lengths, lengths)
      graded = with_recorded(own, graded) if graded else own
    assert graded is not None  # there are live or recorded groups, or both
    of_group: Any = np.repeat(np.arange(len(sources), dtype=np.int32), sources.quotas)
    rate = solve_rate(graded.train, batch.versions)
    train = dataclasses.replace(graded.train, sources=of_group, solve_rate=rate)
    graded, mask = graded._replace(train=train), np.concatenate(sampled)
    if policy.version != self._counts.checked_version:
      self._counts = self._counts._replace(checked_version=policy.version)
      gaps = agreement.behavior_gaps(parts, graded.train, mask, policy, self._frozen)
      graded = graded._replace(statistics=graded.statistics | gaps)
    return RolloutBatch(
      number=batch.number,
      version=policy.version,
      fingerprint=policy.fingerprint(),
      versions=batch.versions,
      position=position,
      flops=flops,
      timings=timings,
      graded=raw_logprobs.with_raw(graded, mask, parts, policy.params, self._frozen),
    )

  def _sample_mixed_groups(self, policy: PolicySnapshot) -> RolloutBatch:
    """One batch of groups that are neither all right nor all wrong."""
    c, number = self._parts.config, self.number

    def graded() -> Iterator[RolloutBatch]:
      while True:
        for complete in self._sample([self._start(policy)], policy):
          yield from map(self._finish, complete)

    batch = dynamic_sampling.fill_with_mixed_groups(
      graded(), self._parts.sources.quotas, max_batches=c.dynamic_sampling.max_batches
    )
    self._counts = self._counts._replace(number=number + 1)
    return batch
