"""Samples the batches of a refresh as one stream of requests for each source."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from rlvr_jax.ops.keys import key_for
from rlvr_jax.rollouts.batch import RolloutBatch
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.rollouts.engine import Group, Request, Usage, requests
from rlvr_jax.rollouts.journal import GroupJournal, from_json
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import alive
from rlvr_jax.train.reporting.writer import say
from rlvr_jax.train.setup.behavior_sources import Source
from rlvr_jax.types import Prompts

_PRINT_EVERY_S = 30.0


class Streams:
  """Samples groups, and has each graded and written down as soon as it is finished."""

  def __init__(self, sources: Sequence[Source], collector: Collector, journal: GroupJournal):
    """Args are those of the run; `sources`: without recorded ones."""
    self._sources, self.collector, self._journal = sources, collector, journal
    self.usage = Usage()  # of all streams so far

  def requests(
    self, prompts: Prompts, *, seed: int, draw: int, group_size: int
  ) -> list[list[Request]]:
    """Requests for every source's share of a draw of prompts, tagged by their index in it.

    Args:
      prompts: of the draw; NumPy.
      seed: of the run.
      draw: number of the draw.
      group_size: G.
    """
    first, others = (key_for(seed, purpose, draw) for purpose in ("rollout", "source"))
    found, start = [], 0
    for index, source in enumerate(self._sources):
      share = slice(start, start + source.prompts)
      key = jax.random.fold_in(others, index) if index else first
      mine = requests(jax.tree.map(lambda x, share=share: x[share], prompts), key, group_size)
      found.append([request._replace(tag=start + request.tag) for request in mine])
      start = share.stop
    return found

  def recall(self, batch: RolloutBatch) -> None:
    """Takes the groups that were sampled before the process was killed."""
    assert batch.flight is not None
    nothing: list[Any] = []
    read = lambda: self._journal.read(batch.draw, batch.snapshot.fingerprint())
    found = multihost.exchange(multihost.on_first(read, nothing))[0]
    groups = [from_json(content) for content in found]
    for group in groups:
      self.collector.add(batch.flight, group.tag, group)
    known = {group.tag for group in groups}
    batch.requests = [[r for r in mine if r.tag not in known] for mine in batch.requests]

  def sample(
    self, batches: Iterable[RolloutBatch], policy: Any, total: int | None = None
  ) -> Iterator[list[RolloutBatch]]:
    """Samples batches from one policy.

    Args:
      batches: taken when there are slots for their groups.
      policy: a `PolicySnapshot`.
      total: groups that the batches are expected to have in all, for the time left.
    Yields:
      After every burst, the batches that it has completed, in order.
    """
    coming, started, done = iter(batches), [], 0
    progress = _Progress(total, self.usage)

    def taken() -> Iterator[RolloutBatch]:
      for batch in coming:
        started.append(batch)
        yield batch

    def complete() -> list[RolloutBatch]:
      nonlocal done
      first = done
      while done < len(started) and is_sampled(started[done]):
        done += 1
      return started[first:done]

    for index, (source, params) in enumerate(zip(self._sources, policy.of_source, strict=True)):
      assert source.engine is not None
      asked = (
        request._replace(tag=(batch, request.tag))
        for batch in (started if index else taken())
        for request in batch.requests[index]
      )
      for groups in source.engine.serve(source.engine.load(*params), asked, self.usage):
        self._keep(groups)
        progress.after(len(groups), source.engine.settings.slots)
        alive()
        yield complete()
    for _ in taken():  # those without a group to sample
      pass
    yield complete()

  def _keep(self, groups: Sequence[Group]) -> None:
    """Writes finished groups down and submits them to the graders."""
    for group in groups:
      batch, index = group.tag
      group = group._replace(tag=index)
      if multihost.is_first():
        self._journal.append(batch.draw, batch.snapshot.fingerprint(), [group])
      self.collector.add(batch.flight, index, group)


def is_sampled(batch: RolloutBatch) -> bool:
  """Whether a batch has all of its groups."""
  return batch.flight is None or batch.flight.sampled


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
