"""Samples the batches of a refresh as one stream of requests for each source."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    first, others = (key_for(seed, purpose, draw) for purpose in ("rollout", "source"))
    pending, start = [], 0
    for index, source in enumerate(self._sources):
      share = slice(start, start + source.prompts)
      prompts = jax.tree.map(lambda x, share=share: x[share], flight.prompts)
      key = jax.random.fold_in(others, index) if index else first
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

    Args:
      batches: taken when there are slots for their groups; None: there is none now. The stream
        ends when its slots are idle.
      policy: that samples them.
      total: groups that the batches are expected to have in all, for the time left.
    Yields:
      After every burst, the batches that it has completed, in order.
    """
    coming = iter(batches)
    started: list[BatchInFlight] = []
    num_complete = 0
    progress = _Progress(total, self.usage)

    def taken() -> Iterator[BatchInFlight | None]:
      for batch in coming:
        if batch is not None:
          started.append(batch)
        yield batch

    def requests(index: int) -> Iterator[Request[Flight] | None]:
      # The first source begins batches; those after it sample their shares of the same ones.
      for batch in started if index else taken():
        yield from [None] if batch is None else batch.requests[index]

    def complete() -> list[BatchInFlight]:
      nonlocal num_complete
      first = num_complete
      while num_complete < len(started) and started[num_complete].sampled:
        num_complete += 1
      return started[first:num_complete]

    for index, (source, params) in enumerate(zip(self._sources, policy.source_params, strict=True)):
      assert source.engine is not None  # a source without one is recorded
      loaded = source.engine.load(*params)
      record = self._recorder(started)
      for finished in serve_graded(
        source.engine, loaded, requests(index), self._collector, self.usage, record
      ):
        progress.after(finished, source.engine.settings.slots)
        restart_deadline()
        yield complete()
    if not self._sources:  # nothing is to be sampled: batches begin until one waits or none is left
      any(batch is None for batch in taken())
    yield complete()

  def _recorder(self, started: Sequence[BatchInFlight]) -> Callable[[list[Group[Flight]]], None]:
    """A function that writes finished groups of these batches into the journal."""

    def record(groups: list[Group[Flight]]) -> None:
      for batch in started if multihost.is_first() else ():
        if finished := [group for group in groups if group.owner is batch.flight]:
          self._journal.append(batch.draw, batch.snapshot.fingerprint(), finished)

    return record


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
