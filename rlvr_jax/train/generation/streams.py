"""Samples the batches of a refresh as one stream of requests for each source."""

from __future__ import annotations

import base64
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from rlvr_jax.ops.keys import key_for
from rlvr_jax.rollouts.batch import BatchInFlight, Flight, PolicySnapshot
from rlvr_jax.rollouts.collect import Collector, serve_graded
from rlvr_jax.rollouts.engine import NOT_SAMPLED, Usage
from rlvr_jax.rollouts.group import Group as StoredGroup
from rlvr_jax.rollouts.group import decode, encode
from rlvr_jax.rollouts.serve import ChangingWeights, Group, OneVersion, Request, make_requests
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import restart_deadline
from rlvr_jax.train.generation.new_weights import (
  NewestWeights,
  NewWeights,
  RecordedWeights,
  Replayed,
)
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.behavior_sources import Source
from rlvr_jax.types import Array, Params

_PRINT_EVERY_S = 30.0


class Streams:
  """Samples groups, and has each graded and written down as soon as it is finished."""

  def __init__(
    self,
    sources: Sequence[Source],
    collector: Collector,
    store: RolloutStore,
    *,
    has_versions: bool = False,
  ):
    """Binds the objects of a run.

    Args:
      sources: without recorded ones.
      collector, store: of the run.
      has_versions: whether weights change within responses, so that each token has its version.
    """
    self._sources, self._collector, self._store = sources, collector, store
    self._has_versions = has_versions
    self.usage = collector.usage()  # of all streams so far
    # With `has_versions`, by version: those that have sampled tokens of unfinished batches. Without
    # parameters once they are compared with the trainer's.
    self.policies: dict[int, PolicySnapshot] = {}
    self.decoding = -1  # version that samples now, where weights change within responses

  def requests(
    self, flight: Flight, policy: PolicySnapshot, *, seed: int, draw: int, group_size: int
  ) -> list[list[Request[Flight]]]:
    """Requests for every source's share of a draw of prompts.

    Groups that a killed process has sampled with this policy are in the store: they join the
    flight, and are not requested.

    Args:
      flight: of the draw.
      policy: that samples it.
      seed: of the run.
      draw: number of the draw.
      group_size: G.
    """
    if self._has_versions:
      self._use(policy)
    self._take_stored(flight, policy, draw)
    pending, start = [], 0
    for index, source in enumerate(self._sources):
      share = slice(start, start + source.prompts)
      prompts = jax.tree.map(lambda x, share=share: x[share], flight.prompts)
      key = source_key(seed, draw, index)
      of_source = make_requests(prompts, key, group_size, owner=flight, first=start)
      pending.append(
        [request for request in of_source if request.prompt_index not in flight.groups]
      )
      start = share.stop
    return pending

  def forget(self, *, before: int) -> None:
    """Removes the groups of draws with a lower number: their batches are in the store."""
    self._store.forget_groups(before)

  def _take_stored(self, flight: Flight, policy: PolicySnapshot, draw: int) -> None:
    def read() -> str:
      groups = self._store.read_groups(draw).values()
      of_policy = [g for g in groups if [*g.versions.values()] == [policy.fingerprint()]]
      return base64.b64encode(encode(of_policy, {})).decode()

    text = multihost.exchange(multihost.run_on_first(read, ""))[0]
    for stored in decode(base64.b64decode(text))[0]:
      group = _from_stored(stored, flight)
      versions = with_version(group, policy.version) if self._has_versions else None
      self._collector.add(group._replace(token_versions=versions))

  def _use(self, policy: PolicySnapshot) -> None:
    """Keeps a policy that samples until its tokens are compared."""
    self.policies.setdefault(policy.version, policy)

  def _decode_with(self, policy: PolicySnapshot) -> None:
    """Notes a policy that samples from now on."""
    self._use(policy)
    self.decoding = policy.version

  def release(self, *, before: int, compared: int) -> None:
    """Lets policies go.

    Args:
      before: no later batch has tokens of an older version.
      compared: the parameters of versions up to this one are not needed any more.
    """
    self.policies = {
      version: policy._replace(params={}, source_params=()) if version <= compared else policy
      for version, policy in self.policies.items()
      if version >= before
    }

  def sample(
    self,
    batches: Iterable[BatchInFlight | None],
    policy: PolicySnapshot,
    total: int | None = None,
    new_weights: NewWeights | Replayed | None = None,
  ) -> Iterator[list[BatchInFlight]]:
    """Samples batches from one policy, or from newer ones as they come.

    The engine asks for a request when a slot is free, and so begins the batch that has it.

    Args:
      batches: each begins when it is taken; None: there is none now. The stream ends when its
        slots are idle.
      policy: that samples them.
      total: groups that the batches are expected to have in all, for the time left.
      new_weights: where other policies come from, within a response; None: `policy` samples all.
    Yields:
      After every burst, the batches that it has completed, in order.
    """
    stream = _Stream(batches)
    progress = _Progress(total, self.usage)
    for index, source in enumerate(self._sources):
      assert source.engine is not None  # a source without one is recorded
      load = lambda policy, index=index, engine=source.engine: engine.load(
        *policy.source_params[index]
      )
      changing = self._changing(source, stream, policy, load, new_weights) if new_weights else None
      for finished in serve_graded(
        source.engine,
        None if changing else load(policy),
        stream.pull(index),
        self._collector,
        self.usage,
        functools.partial(self._record, stream, index),
        changing,
      ):
        progress.after(finished, source.engine.settings.slots)
        restart_deadline()
        yield stream.take_completed()
    if not self._sources:  # nothing is to be sampled: batches begin until one waits or none is left
      for batch in stream.begin():
        if batch is None:
          break
    yield stream.take_completed()

  def _changing(
    self,
    source: Source,
    stream: _Stream,
    policy: PolicySnapshot,
    load: Callable[[PolicySnapshot], Params],
    new_weights: NewWeights | Replayed,
  ) -> ChangingWeights:
    """The weights of a source: those of another run do not change."""
    if not source.of_this_run:
      return OneVersion(load(policy))
    if isinstance(new_weights, Replayed):
      return RecordedWeights(new_weights, stream.draw_of, load, self._use)
    return NewestWeights(new_weights, policy, load, self._decode_with)

  def _record(self, stream: _Stream, source: int, groups: list[Group[Flight]]) -> None:
    """Writes finished groups of the batches that have begun into the store.

    Those of several versions are left out: after a kill their policies may not be there.
    """
    for batch in stream.begun if multihost.is_first() else ():
      for group in groups:
        if group.owner is batch.flight and (policy := self._only_policy(group, batch)) is not None:
          self._store.write_group(_to_stored(group, batch.draw, source, policy))

  def _only_policy(self, group: Group[Flight], batch: BatchInFlight) -> PolicySnapshot | None:
    """The policy that has sampled all of a group; None if there are several."""
    if group.token_versions is None:
      return batch.snapshot
    versions = {*np.unique(group.token_versions).tolist()} - {NOT_SAMPLED}
    if not versions:  # of another run's policy
      return batch.snapshot
    return self.policies[versions.pop()] if len(versions) == 1 else None


def _to_stored(group: Group, draw: int, source: int, policy: PolicySnapshot) -> StoredGroup:
  """A finished group, not graded yet, as the store has it."""
  about = ("owner", "prompt_index", "details")
  return StoredGroup(
    draw=draw,
    index=group.prompt_index,
    source=source,
    versions={policy.version: policy.fingerprint()},
    arrays={k: v for k, v in group._asdict().items() if k not in about and v is not None},
    samples=[{"detail": detail} for detail in group.details or ()],
    measured={},
  )


def _from_stored(stored: StoredGroup, owner: Flight) -> Group[Flight]:
  """The inverse of `_to_stored`."""
  details = [sample["detail"] for sample in stored.samples] or None
  return Group(owner=owner, prompt_index=stored.index, details=details, **stored.arrays)


def source_key(seed: int, draw: int, index: int) -> Array:
  """The PRNG key of the rollouts that the source of this index samples of a draw."""
  if not index:
    return key_for(seed, "rollout", draw)
  return jax.random.fold_in(key_for(seed, "source", draw), index)


def with_version(group: Group, version: int) -> np.ndarray:
  """`Group.token_versions` i32[G, T] of a group that one version has sampled."""
  places = np.arange(group.tokens.shape[1]) < group.lengths[:, None]
  if group.turns is not None:
    places &= group.turns % 2 == 0
  return np.where(places, version, NOT_SAMPLED).astype(np.int32)


class _Stream:
  """The batches of one stream, from the one that begins to the one that has all its groups."""

  def __init__(self, batches: Iterable[BatchInFlight | None]):
    """`batches`: as for `Streams.sample`."""
    self._to_begin = iter(batches)
    self.begun: list[BatchInFlight] = []  # in order
    self._num_completed = 0

  def draw_of(self, flight: Flight) -> int:
    """The number of the draw of prompts that a flight is of."""
    return next(batch.draw for batch in self.begun if batch.flight is flight)

  def begin(self) -> Iterator[BatchInFlight | None]:
    """Begins one batch after another; None: there is none now."""
    for batch in self._to_begin:
      if batch is not None:
        self.begun.append(batch)
      yield batch

  def pull(self, source: int) -> Iterator[Request[Flight] | None]:
    """Yields the requests of one source, by its index; None: there is none now.

    Those of the first source begin the batches; the sources after it sample their shares of these.
    """
    for batch in self.begun if source else self.begin():
      yield from [None] if batch is None else batch.requests[source]

  def take_completed(self) -> list[BatchInFlight]:
    """The batches that have all their groups since the last call, in order."""
    first = self._num_completed
    while self._num_completed < len(self.begun) and self.begun[self._num_completed].sampled:
      self._num_completed += 1
    return self.begun[first : self._num_completed]


class _Progress:
  """Prints how far a long refresh is."""

  def __init__(self, total: int | None, usage: Usage):
    self._usage, self._total, self._groups = usage, total, 0
    self._before = dataclasses.replace(usage)
    self._began = self._printed = time.monotonic()

  def after(self, groups: int, slots: int) -> None:
    """Counts the groups that a burst has finished."""
    self._groups += groups
    now = time.monotonic()
    if now - self._printed < _PRINT_EVERY_S:
      return
    usage = self._usage.since(self._before)
    self._printed, elapsed = now, now - self._began
    left = ""
    if self._total and self._groups:
      left = f", about {elapsed * (self._total / self._groups - 1):.0f} s left"
    say(
      f"sampling: {self._groups}{f'/{self._total}' if self._total else ''} groups,"
      f" {usage.slot_tokens / elapsed:,.0f} tokens/s,"
      f" {usage.slot_tokens / usage.slot_steps:.0%} of {slots} slots busy{left}"
    )
