"""Samples and grades batches from a behavior policy, and writes each to the store."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.data.curriculum import problem_draws
from rlvr_jax.models.flops import forward_flops
from rlvr_jax.rollouts.batch import (
  FOREIGN,
  Graded,
  RolloutBatch,
  from_shard,
  grades_of,
  may_finish,
  solve_rate,
  solve_rates,
  to_shard,
  with_recorded,
)
from rlvr_jax.rollouts.collect import Collector, keep_mixed_groups
from rlvr_jax.rollouts.store import RolloutStore, TornShardError
from rlvr_jax.train import multihost, observe, raw_logprobs, sharding
from rlvr_jax.train.behavior_sources import Source, max_gap
from rlvr_jax.train.build import Parts
from rlvr_jax.train.checks import shaped_outcomes
from rlvr_jax.train.grading import make_outcome_policy
from rlvr_jax.train.metrics import say
from rlvr_jax.train.run_log import DeviceClock
from rlvr_jax.train.streams import Streams
from rlvr_jax.types import Array, Params

_ABSENT, _INTACT = "", "intact"  # states of a batch in the store; others are error messages


class DynamicSamplingError(RuntimeError):
  """A batch could not be filled with groups that are neither all right nor all wrong."""


class AgreementError(RuntimeError):
  """Sampler and trainer compute different log-probabilities from the same parameters."""


class PolicySnapshot(NamedTuple):
  """A policy whose weights were synced for sampling rollouts."""

  params: Params  # the trained parameters
  version: int  # its number of updates
  fingerprint: Callable[[], str]  # of its parameters; waits for them to be computed
  of_source: tuple[tuple[Params, Params], ...]  # (trained, frozen) that each source samples with


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


class Generator:
  """Yields batches in order: from the store if it has them already, otherwise sampled.

  Attributes:
    number: of the next batch.
    draws: number of prompt batches sampled so far, more than batches under dynamic sampling.
    version: of the policy that sampled the last batch.
    clock: of the devices that generate.
    on_dispatch: called before the generation of every batch.
    last: number of the batch after the last one of this refresh; None if it is not known.
  """

  def __init__(self, parts: Parts, frozen: Params, collector: Collector, store: RolloutStore):
    c = self.config = parts.config
    self.parts, self.collector, self.store = parts, collector, store
    self.frozen = frozen  # on the devices that generate
    self.quotas = [source.prompts for source in parts.sources]  # groups of every batch
    # Recorded groups, if any, are the last groups of a batch.
    self.live = [source for source in parts.sources if source.recorded is None]
    self.num_live = sum(source.prompts for source in self.live)
    self.num_recorded = sum(self.quotas) - self.num_live
    self.recorded = parts.sources[-1].recorded
    # If all groups are recorded, the iterator is not used, but its position is saved.
    self.problems = problem_draws(parts.task.train, batch_size=max(self.num_live, 1), seed=c.seed)
    self.number = self.draws = self.version = 0
    self.checked_version = -1  # the version whose log-probabilities were last compared
    self.clock = DeviceClock()
    self.on_dispatch: Callable[[], None] = lambda: None
    self.last: int | None = None
    self.journal = store.journal()
    self.streams = Streams(self.live, collector, self.journal)

  def state(self) -> dict[str, Any]:
    """The state that determines the next batches; JSON."""
    return {
      "number": self.number,
      "draws": self.draws,
      "checked_version": self.checked_version,
      "problems": self.problems.get_state(),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """The inverse of `state`."""
    self.number, self.draws = state["number"], state["draws"]
    self.checked_version = state["checked_version"]
    self.problems.set_state(state["problems"])

  def sync_weights(self, params: Params, version: int) -> PolicySnapshot:
    """Syncs the trainer's parameters after `version` updates to the devices that generate."""
    params = self.parts.programs.sync_weights(params, self.parts.schedule.real_time)
    of_source = tuple(source.params_of(params, self.frozen) for source in self.live)
    return PolicySnapshot(
      params, version, fingerprint_of(self.parts.programs.checksums(params)), of_source
    )

  def batches(
    self, next_policy: Callable[[bool, Future | None], PolicySnapshot | None]
  ) -> Iterator[RolloutBatch]:
    """Yields batches in order as they are graded; workers grade while the devices generate.

    Args:
      next_policy: (wait, until) → the policy of the next batch, or None if there is no batch to
        sample now, which ends the iteration if no batch is in progress. `wait`: whether it may wait
        for a policy; `until`: a future of grades that ends the wait, or None.
    """
    sampled: collections.deque[RolloutBatch] = collections.deque()  # being graded
    graded = lambda: self.keep(self.finish(sampled.popleft()))
    ahead: list[PolicySnapshot] = []  # of a batch that did not belong into the last stream
    while True:
      # Without waiting for grades if a policy is available, so that graders do not run out of work.
      until = grades_of(sampled[0]) if sampled else None
      policy = ahead.pop() if ahead else next_policy(not sampled or until is not None, until)
      if policy is None:
        if not sampled:
          return
        yield graded()
        continue
      if (state := self.stored()) != _ABSENT:
        while sampled:  # first, so that batches are yielded in order
          yield graded()
        if (known := self.recall(state, policy)) is not None:
          yield known
          continue
      if self.config.dynamic_sampling.enabled:
        yield self.sample_mixed_groups(policy)
        continue

      def batches(policy=policy) -> Iterator[RolloutBatch]:
        """The batches that this policy samples from now on."""
        while True:
          yield self.start(policy)
          found = next_policy(False, None)
          if found is None or found is not policy or self.stored() != _ABSENT:
            ahead.extend([] if found is None else [found])
            return

      for complete in self.sample(batches(), policy):
        sampled.extend(complete)
        while sampled and may_finish(sampled):
          yield graded()

  def stored(self) -> str:
    """The next batch's state in the store: `_ABSENT`, `_INTACT`, or an error message.

    The first process reads the store; all processes get the same state.
    """
    state = _ABSENT
    if multihost.is_first() and self.number in self.store.numbers():
      try:
        self.store.read(self.number)
        state = _INTACT
      except TornShardError as error:
        state = str(error)
    return multihost.exchange(state)[0]

  def recall(self, state: str, policy: PolicySnapshot | None = None) -> RolloutBatch | None:
    """The next batch from the store; a damaged one is set aside.

    Args:
      state: of the batch, see `stored`.
      policy: the one that must have sampled it; None accepts any policy.
    """
    number = self.number
    if state != _INTACT:
      self.set_aside(number, state)
      return None
    batch = from_shard(number, *self.store.read(number))
    if policy is not None:
      found, expected = (batch.version, batch.fingerprint), (policy.version, policy.fingerprint())
      if found != expected:
        why = (
          f"rollouts {number} were sampled by version {found[0]} with fingerprint {found[1]}, not"
        )
        self.set_aside(number, f"{why} by version {expected[0]} with {expected[1]}")
        return None
    self.set_state(batch.after)
    self.version = batch.version
    return batch

  def set_aside(self, number: int, why: str) -> None:
    """Moves a batch's shard away in the store, so that the batch can be sampled again."""
    say(f"{why}; set aside, to be sampled again")
    multihost.on_first(lambda: self.store.set_aside(number), None)

  def start(self, policy: PolicySnapshot) -> RolloutBatch:
    """A batch of problems to be sampled; groups that a killed process has sampled are taken."""
    draw, number = self.draws, self.number
    self.draws += 1
    self.number += 1
    self.version = policy.version
    batch = RolloutBatch(
      number=number,
      version=policy.version,
      draw=draw,
      versions=self.versions(policy),
      snapshot=policy,
      dispatched=time.perf_counter(),
    )
    if self.live:
      problems, c = self.problems.draw(draw, policy.version), self.config
      batch.flight = self.collector.begin(problems)
      sizes = dict(seed=c.seed, draw=draw, group_size=c.batch.group_size)
      batch.requests = self.streams.requests(batch.flight.prompts, **sizes)
      self.streams.recall(batch)
    self.on_dispatch()
    if self.recorded is not None:
      batch.recorded = self.recorded.take(draw * self.num_recorded, self.num_recorded)
    batch.after = self.state() | {"checked_version": policy.version}
    return batch

  def sample(
    self, batches: Iterable[RolloutBatch], policy: PolicySnapshot
  ) -> Iterator[list[RolloutBatch]]:
    """As `Streams.sample`, with the time that each batch has taken."""
    counted = dataclasses.replace(self.streams.usage)
    total = (self.last - self.number) * self.num_live if self.last is not None else None
    for complete in self.streams.sample(batches, policy, total):
      now = time.perf_counter()
      for batch in complete:
        if batch.flight is not None:
          took = now - max(batch.dispatched, self.clock.free_from)
          batch.timings |= {"time/generate_seconds": took, **observe.memory("generate")}
          self.clock.free_from = now
      if timed := [batch for batch in complete if batch.timings]:
        used, counted = self.streams.usage.since(counted), dataclasses.replace(self.streams.usage)
        timed[0].timings |= {f"time/{name}": value for name, value in vars(used).items()}
      yield complete

  def versions(self, policy: PolicySnapshot) -> np.ndarray:
    """i32[P], version per group of a batch; `FOREIGN` for groups of other runs."""
    of_sources = [policy.version if s.of_this_run else FOREIGN for s in self.parts.sources]
    return np.repeat(np.asarray(of_sources, np.int32), self.quotas)

  def finish(self, batch: RolloutBatch) -> RolloutBatch:
    """Waits for the grades and assembles the batch."""
    graded, flight, policy = batch.recorded, batch.flight, batch.snapshot
    sampled = [] if graded is None else [graded.train.mask]
    assert batch.versions is not None
    if flight is not None:
      began = time.perf_counter()
      own = self.collector.finish(flight, batch.versions.tolist()[: self.num_live])
      solved, after = solve_rates(own.train).astype(np.float32), batch.after
      after["problems"], found = self.problems.observe(batch.draw, solved, after["problems"])
      own = own._replace(statistics=own.statistics | found)
      batch.timings["time/grade_seconds"] = time.perf_counter() - began
      batch.timings |= observe.memory("grade")
      lengths: Any = flight.prompts.lengths, flight.rollouts.lengths
      tokens = np.arange(own.train.mask.shape[-1]) < lengths[1][..., None]
      sampled.insert(0, tokens.astype(np.float32))
      batch.flops = forward_flops(self.parts.model.config, *lengths)
      graded = with_recorded(own, graded) if graded else own
    assert graded is not None  # there are live or recorded groups, or both
    sources: Any = np.repeat(np.arange(len(self.quotas), dtype=np.int32), self.quotas)
    rate = solve_rate(graded.train, batch.versions)
    train = dataclasses.replace(graded.train, sources=sources, solve_rate=rate)
    batch.fingerprint = policy.fingerprint()
    mask, found = np.concatenate(sampled), graded._replace(train=train)
    found = self.with_gaps(found, mask, policy)
    batch.graded = raw_logprobs.with_raw(found, mask, self.parts, policy.params, self.frozen)
    batch.snapshot = batch.flight = batch.recorded = None
    batch.requests = ()
    return batch

  def sample_mixed_groups(self, policy: PolicySnapshot) -> RolloutBatch:
    """One batch of groups that are neither all right nor all wrong."""
    limit = self.config.dynamic_sampling.max_batches
    number = self.number
    sampled: list[RolloutBatch] = []
    while len(sampled) < limit:
      started = self.sample([self.start(policy)], policy)
      sampled += [self.finish(batch) for complete in started for batch in complete]
      parts = [batch.graded for batch in sampled if batch.graded is not None]
      kept = keep_mixed_groups(parts, self.quotas)
      if kept is not None:
        self.number = number + 1
        phases = dict.fromkeys(phase for batch in sampled for phase in batch.timings)
        timings = {phase: sum(batch.timings[phase] for batch in sampled) for phase in phases}
        timings |= {name: value for name, value in sampled[-1].timings.items() if "memory/" in name}
        return self.keep(
          dataclasses.replace(
            sampled[-1],
            number=number,
            graded=kept,
            draws=len(sampled),
            flops=sum(batch.flops for batch in sampled),
            after=sampled[-1].after | {"number": number + 1},
            timings=timings,
          )
        )
    solved = np.nanmean([solve_rates(part.train) for part in parts])
    raise DynamicSamplingError(
      f"dynamic sampling: {limit} batches of {self.config.batch.prompts} prompts at update"
      f" {policy.version} have too few groups that are neither all right nor all wrong (solve"
      f" rate {solved:.3f}). Raise config.dynamic_sampling.max_batches, or choose, in another"
      " --workdir, a larger config.batch.group_size or problems that suit the policy better"
    )

  def with_gaps(self, graded: Graded, mask: np.ndarray, policy: PolicySnapshot) -> Graded:
    """Adds the gaps of log-probabilities between sampler and trainer, once per version.

    Args:
      graded: a few groups of every source are compared.
      mask: f32[P, G, T], 1 for every sampled token, whether or not it is in the loss.
      policy: the one that sampled the batch.
    Raises:
      AgreementError: the gap of a source that samples with the policy's own parameters is too
        large.
    """
    if policy.version == self.checked_version:
      return graded
    self.checked_version = policy.version
    gaps, start = dict[str, float](), 0
    for source in self.parts.sources:
      batch = graded.train
      few = slice(start, start + min(source.prompts, self.parts.gap_prompts))
      start += source.prompts
      rollouts = (batch.prompts, batch.tokens, mask, batch.behavior_logprobs)
      here = self.parts.to_generation(jax.tree.map(lambda x, few=few: x[few], rollouts))
      of_policy = (policy.params, self.frozen, *here)
      found = self.parts.programs.behavior_gap(*of_policy, sampling=source.sampling)
      mean, largest = jax.device_get(found)
      gaps |= {
        f"agreement/{source.name}_mean": float(mean),
        f"agreement/{source.name}_max": float(largest),
      }
      self.check_gap(source, float(mean), policy.version)
    return graded._replace(statistics=graded.statistics | gaps)

  def check_gap(self, source: Source, gap: float, version: int) -> None:
    """Raises AgreementError if the source must agree with the trainer and does not."""
    dtype = self.parts.model.config.compute_dtype
    bound = max_gap(self.config, dtype, source)
    if not gap <= (bound if source.exact else sys.float_info.max):
      raise AgreementError(
        f"sampler and trainer disagree: the log-probabilities that the {source.name} source"
        f" recorded under version {version} of the policy differ by {gap:.2g} nats per token on"
        f" average, allowed are {bound:.2g} in {dtype}. One of the two does not compute the model's"
        " distribution; if the difference is rounding, raise config.max_behavior_gap"
      )

  def keep(self, batch: RolloutBatch) -> RolloutBatch:
    """Writes the batch to the store and returns it."""
    c = self.config
    about = dict(
      tokenizer=c.tokenizer,
      truncated=any(source.truncated for source in self.parts.sources),
      shaped=bool(c.overlong.buffer)
      or bool(shaped_outcomes(make_outcome_policy(self.config)))
      or any(source.shaped for source in self.parts.sources),
      group_size=c.batch.group_size,
      max_prompt_length=c.max_prompt_length,
      max_response_length=c.max_response_length,
      sources=[source.name for source in self.parts.sources],
    )
    arrays, info = to_shard(batch, **about)

    def write() -> None:
      self.store.append(batch.number, arrays, info)
      self.journal.forget(before=batch.after["draws"])

    multihost.on_first(write, None)
    return batch
