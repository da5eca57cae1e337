"""Samples the batches of a refresh as one stream of requests for each source."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from rlvr_jax.ops.keys import key_for
from rlvr_jax.rollouts.batch import BatchInFlight, Flight, PolicySnapshot
from rlvr_jax.rollouts.collect import Collector, serve_graded
from rlvr_jax.rollouts.engine import Group, Request, Usage, make_requests
from rlvr_jax.rollouts.journal import GroupJournal, from_json
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import restart_deadline
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.behavior_sources import Source
from rlvr_jax.types import Array

_PRINT_EVERY_S = 30.0


class Streams:
  """Samples groups, and has each graded and written down as soon as it is finished."""

  def __init__(self, sources: Sequence[Source], collector: Collector, journal: GroupJournal):
    """Args are those of the run; `sources`: without recorded ones."""
    self._sources, self._collector, self._journal = sources, collector, journal
    self.usage = collector.usage()  # of all streams so far

  def requests(
    self, flight: Flight, policy: PolicySnapshot, *, seed: int, draw: int, group_size: int
  ) -> list[list[Request[Flight]]]:
    """Requests for every source's share of a draw of prompts.

    Groups that a killed process has sampled with this policy are in the journal: they join the
    flight, and are not requested.

    Args:
      flight: of the draw.
      policy: that samples it.
      seed: of the run.
      draw: number of the draw.
      group_size: G.
    """
    self._take_journaled(flight, policy, draw)
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
    """Removes the journal of draws with a lower number: their batches are in the store."""
    self._journal.forget(before=before)

  def _take_journaled(self, flight: Flight, policy: PolicySnapshot, draw: int) -> None:
    nothing: list[dict[str, Any]] = []
    read = lambda: self._journal.read(draw, policy.fingerprint())
    lines = multihost.exchange(multihost.run_on_first(read, nothing))[0]
    for line in lines:
      self._collector.add(from_json(line, flight))

  def sample(
    self, batches: Iterable[BatchInFlight | None], policy: PolicySnapshot, total: int | None = None
  ) -> Iterator[list[BatchInFlight]]:
    """Samples batches from one policy.

    The engine asks for a request when a slot is free, and so begins the batch that has it.

    Args:
      batches: each begins when it is taken; None: there is none now. The stream ends when its
        slots are idle.
      policy: that samples them.
      total: groups that the batches are expected to have in all, for the time left.
    Yields:
      After every burst, the batches that it has completed, in order.
    """
    stream = _Stream(batches)
    record = functools.partial(self._record, stream.begun)
    progress = _Progress(total, self.usage)
    for index, (source, params) in enumerate(zip(self._sources, policy.source_params, strict=True)):
      assert source.engine is not None  # a source without one is recorded
      loaded = source.engine.load(*params)
      for finished in serve_graded(
        source.engine, loaded, stream.pull(index), self._collector, self.usage, record
      ):
        progress.after(finished, source.engine.settings.slots)
        restart_deadline()
        yield stream.take_completed()
    if not self._sources:  # nothing is to be sampled: batches begin until one waits or none is left
      for batch in stream.begin():
        if batch is None:
          break
    yield stream.take_completed()

  def _record(self, begun: Sequence[BatchInFlight], groups: list[Group[Flight]]) -> None:
    """Writes finished groups of the batches that have begun into the journal."""
    for batch in begun if multihost.is_first() else ():
      if finished := [group for group in groups if group.owner is batch.flight]:
        self._journal.append(batch.draw, batch.snapshot.fingerprint(), finished)


def source_key(seed: int, draw: int, index: int) -> Array:
  """The PRNG key of the rollouts that the source of this index samples of a draw."""
  if not index:
    return key_for(seed, "rollout", draw)
  return jax.random.fold_in(key_for(seed, "source", draw), index)


class _Stream:
  """The batches of one stream, from the one that begins to the one that has all its groups."""

  def __init__(self, batches: Iterable[BatchInFlight | None]):
    """`batches`: as for `Streams.sample`."""
    self._to_begin = iter(batches)
    self.begun: list[BatchInFlight] = []  # in order
    self._num_completed = 0

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
