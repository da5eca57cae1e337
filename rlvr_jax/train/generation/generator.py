"""Batches in order: drawn, sampled, graded, compared with the trainer, and written to the store."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlvr_jax.data.draws import problem_draws
from rlvr_jax.models.flops import forward_flops
from rlvr_jax.ops.keys import seeds_for
from rlvr_jax.rollouts.batch import (
  FOREIGN,
  BatchInFlight,
  Flight,
  Graded,
  PolicySnapshot,
  Position,
  RolloutBatch,
  append_recorded,
  from_groups,
  grades_future,
  may_finish,
  mean_solve_rate,
  sampled_places,
  solve_rates,
  to_groups,
  with_oldest_versions,
)
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.rollouts.staleness import Drawn
from rlvr_jax.rollouts.store import RolloutStore, TornShardError
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.generation import agreement, dynamic_sampling, raw_logprobs
from rlvr_jax.train.generation.new_weights import FINISH, RECOMPUTE, SWITCH, NewWeights, Replayed
from rlvr_jax.train.generation.streams import Streams
from rlvr_jax.train.reporting import machines
from rlvr_jax.train.reporting.progress import warn
from rlvr_jax.train.reporting.run_log import DeviceClock
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.checks import scores_partly, shaped_outcomes
from rlvr_jax.train.setup.placement import Placement
from rlvr_jax.train.start.rows import RunRows
from rlvr_jax.types import Params


class NextPolicy(Protocol):
  """Chooses the policy of the next batch."""

  def __call__(self, *, wait: bool, until: Future[None] | None) -> PolicySnapshot | None:
    """Returns the policy; None: no batch may begin before those in flight are finished.

    If none is in flight, None ends generation.

    Args:
      wait: whether it may wait for a policy.
      until: a future of grades that ends the wait; None for no such future.
    """
    ...


class _Policies:
  """The policies of a generator's batches, with a look at the next one.

  Attributes:
    new_weights: where other policies come from within a response; None if they wait for its end.
  """

  def __init__(self, next_policy: NextPolicy, new_weights: NewWeights | Replayed | None = None):
    self.new_weights = new_weights
    self._next_policy = next_policy
    self._ahead: PolicySnapshot | None = None  # of the next batch, if `look_ahead` found one

  def take(self, *, wait: bool, until: Future[None] | None) -> PolicySnapshot | None:
    """The policy of the next batch; see `NextPolicy`."""
    policy = self._ahead or self._next_policy(wait=wait, until=until)
    self._ahead = None
    return policy

  def look_ahead(self) -> PolicySnapshot | None:
    """The policy of the next batch, without waiting for one; `take` returns it as well."""
    self._ahead = self._next_policy(wait=False, until=None)
    return self._ahead

  def newest(self, policy: PolicySnapshot) -> PolicySnapshot:
    """The policy that samples now, in a stream that began with `policy`."""
    newest = self.new_weights.newest() if isinstance(self.new_weights, NewWeights) else None
    return newest or policy


@dataclasses.dataclass
class _DrawCount:
  """How far dynamic sampling is with the batches of one policy."""

  unfilled: int  # batches
  begun: int = 0  # draws of prompts that are sampled or graded and that no batch has taken

  def begin(self) -> None:
    self.begun += 1

  def take(self) -> None:
    self.begun -= 1

  def fill(self) -> None:
    self.unfilled -= 1


class _Stored(NamedTuple):
  """A batch that the store has."""

  damage: str  # an error message; "" if the batch is intact


class _Counts(NamedTuple):
  number: int = 0  # of the next batch
  draws: int = 0  # of prompts, so far
  checked_version: int = -1  # whose log-probabilities were last compared with the trainer's
  version: int = 0  # of the policy that sampled the last batch


class _Comparison(NamedTuple):
  """What the log-probabilities of samples are computed anew with."""

  rows: RunRows
  frozen: Params  # the parameters that are not trained, on the devices that generate


class Generator:
  """Makes batches from the policies that it is given.

  `OnDemand` and `AsyncGenerator` decide which policy samples which batch, and when.

  A batch begins when slots are free: `serve` pulls a request from the stream, which pulls a
  batch from `_begin_batches`, which asks `next_policy` whether the same policy samples it. What is
  sampled comes back the other way: `Streams.sample` yields the batches that a burst has completed,
  and `batches` yields them once they are graded.
  """

  def __init__(
    self,
    parts: Parts,
    rows: RunRows,
    frozen: Params,
    collector: Collector,
    store: RolloutStore,
    clock: DeviceClock,
  ):
    """Binds a run's objects; nothing is sampled yet.

    Args:
      parts, rows: of the run.
      frozen: the parameters that are not trained, on the devices that generate.
      collector: decodes and grades.
      store: gets every batch.
      clock: of the devices that generate.
    """
    self._parts, self._comparison = parts, _Comparison(rows, frozen)
    self._collector, self._store = collector, store
    self._clock = clock
    # The groups of a fleet are sampled by other programs, see `train.fleet.generation`.
    live = [] if parts.config.fleet.samplers else parts.sources.live
    recorded = parts.schedule.recorded
    has_versions = recorded.has_several if recorded else parts.config.fleet.new_weights != FINISH
    self._streams = Streams(live, collector, store, has_versions=has_versions)
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

  @property
  def quotas(self) -> list[int]:
    """Groups of a batch, by source."""
    return self._parts.sources.quotas

  def decode(self, tokens: list[int]) -> str:
    """The text of tokens."""
    return self._parts.tokenizer.decode(tokens)

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

  def batches(
    self,
    next_policy: NextPolicy,
    end: int | None = None,
    newest: Callable[[], PolicySnapshot | None] = lambda: None,
    replayed: Mapping[int, PolicySnapshot] | None = None,
  ) -> Iterator[RolloutBatch]:
    """Yields batches in order as they are graded; workers grade while the devices generate.

    Args:
      next_policy: chooses the policy of every batch.
      end: one past the number of the last batch, for an estimate of the time left; None if it is
        not known.
      newest: the newest policy, which takes over responses if `config.fleet.new_weights` says so.
      replayed: by version, the policies of a recorded run whose batches have several; else None.
    """
    setting, recorded = self._parts.config.fleet.new_weights, self._parts.schedule.recorded
    changing: NewWeights | Replayed | None = None
    if replayed is not None and recorded is not None:
      changing = Replayed(replayed, recorded.token_versions, setting == RECOMPUTE)
    elif setting != FINISH and recorded is None:
      changing = NewWeights(newest, setting == RECOMPUTE)
    policies = _Policies(next_policy, changing)
    in_flight: collections.deque[BatchInFlight] = collections.deque()  # sampled, being graded
    while True:
      # If a policy is available, the next batch is sampled first: the graders must not run out of
      # work. While batches are in flight a wait has to end when the oldest has its grades. Several
      # processes have no future of grades, and must not wait then.
      until = grades_future(in_flight[0]) if in_flight else None
      policy = policies.take(wait=not in_flight or until is not None, until=until)
      if policy is None:
        if not in_flight:
          return
        yield self._finish(in_flight.popleft())
        continue
      stored = self._look_up()
      if stored is not None:
        while in_flight:  # first, so that batches are yielded in order
          yield self._finish(in_flight.popleft())
        if (recalled := self._recall(stored, policy, replayed or {})) is not None:
          yield recalled
          continue
      if self._parts.config.dynamic_sampling.enabled:
        count = 1 if end is None else end - self.number
        yield from self._fill_batches(policy, count, policies)
        continue
      groups = None if end is None else (end - self.number) * self._parts.sources.num_live
      begun = self._begin_batches(policy, policies)
      for sampled in self._sample_batches(begun, policy, policies, groups):
        in_flight.extend(sampled)
        while in_flight and may_finish(in_flight):
          yield self._finish(in_flight.popleft())

  def _begin_batches(
    self, policy: PolicySnapshot, policies: _Policies
  ) -> Iterator[BatchInFlight | None]:
    """Begins the batches of a stream: the next one, and those after it of the same policy.

    Where weights change within responses the stream goes on under newer policies; None while no
    batch may begin.
    """
    yield self._begin_batch(policy)
    if not isinstance(policies.new_weights, NewWeights):
      while self._goes_on(policy, policies):
        yield self._begin_batch(policy)
      return
    while True:
      newer = policies.look_ahead()
      if newer is not None and self._look_up() is not None:
        return
      # One that came since the last burst takes over at the next: the burst before it would sample
      # under an older version than the bound on lags allows.
      if newer is None or newer.version > self._streams.decoding:
        yield None
      else:
        yield self._begin_batch(newer)

  def _goes_on(self, policy: PolicySnapshot, policies: _Policies) -> bool:
    """Whether the next batch is to be sampled from the same policy, now."""
    return policies.look_ahead() is policy and self._look_up() is None

  def _finish(self, batch: BatchInFlight) -> RolloutBatch:
    """Waits for the batch's grades and writes it to the store."""
    return self.write(self.assemble(batch))

  def recall_stored(self) -> Iterator[RolloutBatch]:
    """The next batches that the store already has, whichever policy sampled them.

    Batches after a damaged or missing one are set aside: its replacement may differ, and so may
    every later policy.
    """
    while (stored := self._look_up()) and (batch := self._recall(stored)):
      yield batch
    for number in self._store.numbers():
      if number >= self.number:
        self._set_aside(number, f"rollouts {number} follow a batch that is damaged or missing")

  # --- the store ----------------------------------------------------------------------------------

  def _look_up(self) -> _Stored | None:
    """The next batch's state in the store; None if the store does not have it.

    The first process reads the store; all processes get the same state.
    """
    damage: str | None = None
    if multihost.is_first() and self.number in self._store:
      try:
        self._store.read(self.number)
        damage = ""
      except TornShardError as error:
        damage = str(error)
    damage = multihost.exchange(damage)[0]
    return None if damage is None else _Stored(damage)

  def _recall(
    self,
    stored: _Stored,
    policy: PolicySnapshot | None = None,
    replayed: Mapping[int, PolicySnapshot] = MappingProxyType({}),
  ) -> RolloutBatch | None:
    """The next batch from the store; a damaged one is set aside.

    Args:
      stored: its state, from `_look_up`.
      policy: the one that must have sampled it; None accepts any policy.
      replayed: by version, those that must have, where several have.
    """
    number = self.number
    if stored.damage:
      self._set_aside(number, stored.damage)
      return None
    batch = from_groups(number, *self._store.read(number))
    if policy is not None:
      for version, fingerprint in batch.fingerprints.items():
        expected = replayed.get(version, policy)
        if (version, fingerprint) != (expected.version, expected.fingerprint()):
          self._set_aside(
            number,
            f"rollouts {number} were sampled by version {version} with fingerprint"
            f" {fingerprint}, not by version {expected.version} with {expected.fingerprint()}",
          )
          return None
    assert batch.position is not None  # every batch of a store has one
    self.move_to(batch.position, batch.version)
    return batch

  def set_aside_from(self, number: int, why: str, position: Position) -> None:
    """Sets a batch and all later ones aside, and continues from the position before them."""
    for later in self._store.numbers():
      if later >= number:
        self._set_aside(later, why)
    self.move_to(position)

  def _set_aside(self, number: int, why: str) -> None:
    """Moves a batch's shard away in the store, so that its rollouts can be sampled again."""
    warn(f"{why}; they are set aside and will be sampled again")
    multihost.run_on_first(lambda: self._store.set_aside(number), None)

  def write(self, batch: RolloutBatch) -> RolloutBatch:
    """Writes the batch to the store and returns it."""
    parts, sources = self._parts, self._parts.sources
    shaped_by_outcome = bool(shaped_outcomes(parts.outcome_policy)) or scores_partly(
      parts.config.environment.name, parts.outcome_policy
    )
    groups, info = to_groups(
      batch,
      tokenizer=parts.config.tokenizer,
      truncated=sources.truncated,
      shaped=bool(parts.config.overlong.buffer) or shaped_by_outcome or sources.shaped,
      group_size=parts.shape.group_size,
      max_prompt_length=parts.shape.max_prompt_length,
      max_response_length=parts.shape.max_response_length,
      sources=[source.name for source in sources],
      **({"routes": parts.model.config.mixture} if parts.method.records_routes else {}),
    )
    draws = info["after"]["draws"]

    def write() -> None:
      self._store.write(batch.number, groups, info)
      self._streams.forget(before=draws)

    multihost.run_on_first(write, None)
    return batch

  # --- one batch ----------------------------------------------------------------------------------

  def _begin_batch(self, policy: PolicySnapshot) -> BatchInFlight:
    """Begins the next batch, which takes one draw."""
    number = self.number
    self._counts = self._counts._replace(number=number + 1)
    return self.begin_draw(policy, number)

  def begin_draw(self, policy: PolicySnapshot, number: int) -> BatchInFlight:
    """Begins a draw of prompts; groups that a killed process had sampled are not requested again.

    Args:
      policy: that samples it.
      number: see `BatchInFlight`.
    """
    sources, counts = self._parts.sources, self._counts
    self._counts = counts._replace(draws=counts.draws + 1, version=policy.version)
    flight: Flight | None = None
    requests: list[Any] = []
    drawn: Drawn | None = None
    if sources.live:
      drawn = self._how_to_draw(policy)
      version = policy.version if drawn is None else drawn.version
      problems = self._problems.draw(counts.draws, version)
      seeds = seeds_for(self._parts.config.seed, "rollout", counts.draws, len(problems))
      flight = self._collector.begin(problems, seeds)
      requests = self._streams.requests(
        flight,
        policy,
        seed=self._parts.config.seed,
        draw=counts.draws,
        group_size=self._parts.shape.group_size,
      )
    recorded = None
    if sources.recorded is not None:
      first = counts.draws * sources.num_recorded
      recorded = sources.recorded.take(first, sources.num_recorded)
    versions = [policy.version if source.of_this_run else FOREIGN for source in sources]
    return BatchInFlight(
      number=number,
      draw=counts.draws,
      snapshot=policy,
      versions=np.repeat(np.asarray(versions, np.int32), sources.quotas),
      # The policy is checked before the batch is written.
      position=self.position()._replace(number=number + 1, checked_version=policy.version),
      dispatched=time.perf_counter(),
      flight=flight,
      requests=requests,
      recorded=recorded,
      drawn=None if drawn is None else drawn._asdict(),
    )

  def _how_to_draw(self, policy: PolicySnapshot) -> Drawn | None:
    """What a later run needs to repeat a batch that depends on the clock; None: nothing.

    In such a later run, the problems' order as the recorded one had it.
    """
    schedule, engines = self._parts.schedule, self._parts.sources.live
    if schedule.recorded is not None:
      recorded = schedule.recorded.drawn(self._counts.draws - 1)
      if recorded is not None:
        self._problems.set_state(recorded.problems)
      return recorded
    engine = engines[0].engine
    if not schedule.threaded or engine is None:
      return None
    return Drawn(
      draw=self._counts.draws - 1,
      problems=self._problems.get_state(),
      version=policy.version,
      burst_steps=engine.settings.shape.steps,
      slots=engine.settings.slots,
      new_weights=self._parts.config.fleet.new_weights,
    )

  def _sample_batches(
    self,
    batches: Iterable[BatchInFlight | None],
    policy: PolicySnapshot,
    policies: _Policies,
    groups: int | None = None,
  ) -> Iterator[list[BatchInFlight]]:
    """As `Streams.sample`, with the time that each batch has taken."""
    counted = dataclasses.replace(self._streams.usage)
    for complete in self._streams.sample(batches, policy, groups, policies.new_weights):
      now = time.perf_counter()
      timed: list[BatchInFlight] = []
      for batch in complete:
        timings: dict[str, float] = {}
        if batch.flight is not None:
          took = now - max(batch.dispatched, self._clock.free_from)
          self._clock.mark_free(now)
          timings = {"time/generate_seconds": took, **machines.memory("generate")}
          if not any(earlier.timings for earlier in timed):
            used = self._streams.usage.since(counted)
            counted = dataclasses.replace(self._streams.usage)
            timings |= {f"time/{name}": value for name, value in vars(used).items()}
        timed.append(dataclasses.replace(batch, timings=timings))
      yield timed

  def assemble(
    self,
    batch: BatchInFlight,
    measured: Mapping[str, float] | None = None,
    sampled_by: Mapping[int, str] | None = None,
  ) -> RolloutBatch:
    """Waits for the grades and assembles the batch: sampled groups, then recorded ones.

    Args:
      batch: with all groups sampled.
      measured: what the programs that sampled it measured, agreement included; None: this one has
        sampled it, and checks agreement.
      sampled_by: the fingerprints of the versions that have sampled it; None: this program has.
    """
    parts, policy = self._parts, batch.snapshot
    sources, recorded = parts.sources, batch.recorded
    position = batch.position
    timings = dict(batch.timings)
    flops = 0.0
    versions = batch.versions
    if batch.flight is None:
      assert recorded is not None  # there are live or recorded groups, or both
      graded = recorded
      mask: Any = recorded.train.mask
    else:
      began = time.perf_counter()
      versions = with_oldest_versions(batch.versions, batch.flight.rollouts)
      graded = self._collector.finish(batch.flight, versions.tolist()[: sources.num_live])
      solved = solve_rates(graded.train).astype(np.float32)
      problems, observed = self._problems.observe(batch.draw, solved, position.problems)
      position = position._replace(problems=problems)
      graded = graded._replace(statistics=graded.statistics | observed)
      timings["time/grade_seconds"] = time.perf_counter() - began
      timings |= machines.memory("grade")
      lengths: Any = batch.flight.rollouts.lengths
      # Every sampled token, whether or not it is in the loss.
      sampled = sampled_places(batch.flight.rollouts)
      flops = forward_flops(
        parts.model.config, batch.flight.prompts.lengths, lengths, predicted=sampled.sum(-1)
      )
      mask = sampled.astype(np.float32)
      if recorded is not None:
        graded = append_recorded(graded, recorded)
        mask = np.concatenate([mask, recorded.train.mask])
    source_of_group: Any = np.repeat(np.arange(len(sources), dtype=np.int32), sources.quotas)
    rate: Any = mean_solve_rate(graded.train, versions)
    train = dataclasses.replace(graded.train, sources=source_of_group, solve_rate=rate)
    graded = graded._replace(train=train)
    placement = self._comparison.rows.placement(train)
    if sampled_by is None:
      sampled_by = self._sampled_by(graded, policy)
    repeated = parts.schedule.recorded
    if repeated is not None and (why := repeated.first_difference(batch.number, sampled_by)):
      warn(
        f"from batch {batch.number} on this run has the plan and the versions of {repeated.name},"
        f" not its rollouts: {why}. The seed, the configuration, a version or the devices differ"
      )
    if measured is None:
      graded = self._check_agreement(graded, mask, policy, placement)
      if graded.train.token_versions is not None:
        compared = self._counts.checked_version
        # In a repeated fleet a later batch may have older versions.
        before = 0 if parts.schedule.recorded else policy.version
        self._streams.release(before=before, compared=compared)
        position = position._replace(checked_version=compared)
    else:
      graded = graded._replace(statistics={**graded.statistics, **measured})
    graded = raw_logprobs.replace_with_raw(
      graded,
      mask,
      policy.params,
      self._comparison.frozen,
      sources=sources,
      placement=placement,
      replays_routes=parts.method.replays_routes,
      logprobs_at_temperature_1=parts.programs.logprobs_at_temperature_1,
    )
    oldest, *others = sorted(sampled_by)
    return RolloutBatch(
      number=batch.number,
      version=oldest,
      fingerprint=sampled_by[oldest],
      others={str(version): sampled_by[version] for version in others},
      versions=versions,
      position=position,
      flops=flops,
      timings=timings,
      graded=graded,
      drawn=batch.drawn,
    )

  def _sampled_by(self, graded: Graded, policy: PolicySnapshot) -> dict[int, str]:
    """The fingerprints of the versions that have sampled a batch, which `policy` began."""
    policies = {policy.version: policy}
    if graded.train.token_versions is not None:
      used = {*np.unique(graded.train.token_versions).tolist()} - {FOREIGN}
      policies = {version: self._streams.policies[version] for version in used} or policies
    return {version: policy.fingerprint() for version, policy in policies.items()}

  def _check_agreement(
    self, graded: Graded, mask: np.ndarray, policy: PolicySnapshot, placement: Placement
  ) -> Graded:
    """Compares log-probabilities of sampler and trainer on a policy's first batch; adds metrics."""
    parts, counts = self._parts, self._counts
    if graded.train.token_versions is not None:
      policies = [
        p for v, p in sorted(self._streams.policies.items()) if v > counts.checked_version
      ]
    else:
      policies = [policy] if policy.version != counts.checked_version else []
    if not policies:
      return graded
    compared = agreement.behavior_gaps(
      graded.train,
      mask,
      policies,
      self._comparison.frozen,
      sources=parts.sources,
      placement=placement,
      programs=parts.programs,
      mixes_caches=parts.config.fleet.new_weights == SWITCH,
    )
    if compared.versions:
      self._counts = counts._replace(checked_version=max(compared.versions))
    return graded._replace(statistics=graded.statistics | compared.gaps)

  def _fill_batches(
    self, policy: PolicySnapshot, count: int, policies: _Policies
  ) -> Iterator[RolloutBatch]:
    """Batches of groups that are neither all right nor all wrong, written to the store.

    Args:
      policy: that samples them.
      count: batches at most, at least 1.
      policies: of the batches that follow.
    """
    quotas, settings = self._parts.sources.quotas, self._parts.config.dynamic_sampling
    draws = _DrawCount(unfilled=count)
    graded = self._graded_draws(policy, draws, policies)
    for number in range(self.number, self.number + count):
      batch = dynamic_sampling.fill_with_mixed_groups(
        graded, quotas, max_batches=settings.max_batches, number=number
      )
      after = batch.position
      assert after is not None  # every new batch has one
      draws.fill()
      self._counts = self._counts._replace(number=number + 1)
      yield self.write(batch)
      if not self._goes_on(policy, policies):
        break
    if draws.begun:  # the store has the next batch: the draws begun for it are forgotten
      self.move_to(after)

  def _graded_draws(
    self, policy: PolicySnapshot, draws: _DrawCount, policies: _Policies
  ) -> Iterator[RolloutBatch]:
    """Draws of prompts, sampled in streams and graded, for as long as one is asked for.

    A batch takes one draw at least. So as many draws as batches are unfilled are begun, and a draw
    that no batch needs never begins.
    """
    in_flight: collections.deque[BatchInFlight] = collections.deque()  # sampled, being graded

    def take_oldest() -> RolloutBatch:
      draws.take()
      return self.assemble(in_flight.popleft())

    while True:
      if draws.begun < draws.unfilled:
        begun = self._begin_draws(policy, draws, policies)
        for sampled in self._sample_batches(begun, policies.newest(policy), policies):
          in_flight.extend(sampled)
          while in_flight and may_finish(in_flight):
            yield take_oldest()
      if in_flight:
        yield take_oldest()

  def _begin_draws(
    self, policy: PolicySnapshot, draws: _DrawCount, policies: _Policies
  ) -> Iterator[BatchInFlight | None]:
    """Begins draws while batches need them; None while none does."""
    while True:
      if draws.begun == draws.unfilled:
        yield None
      else:
        draws.begin()
        yield self.begin_draw(policies.newest(policy), self.number)
