"""Generation by samplers: the trainer plans draws of problems, and takes the finished groups.

Batch b is planned once b < limit(v) for a published version v, in the order of the batches: with
limit(v) = v + L + 1 at most L + 1 of them are open. Nothing here depends on which sampler finishes
first: a batch has the groups of its draw, and batches are taken in order.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.fleet.records import (
  GradedGroup,
  GroupRecord,
  Plan,
  RecordError,
  draw_of,
  index_of,
  problem_checksum,
)
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rollouts.batch import BatchInFlight, Flight, PolicySnapshot, Position, RolloutBatch
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.rollouts.serve import Group
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import restart_deadline
from rlvr_jax.train.fleet.board import Board
from rlvr_jax.train.fleet.policies import Policy, PolicyPublisher
from rlvr_jax.train.generation import agreement, dynamic_sampling
from rlvr_jax.train.generation.async_generator import GeneratorStoppedError
from rlvr_jax.train.generation.generator import Generator
from rlvr_jax.train.generation.streams import with_version
from rlvr_jax.train.reporting.progress import duration, say, warn

SAY_EVERY_S = 30.0  # while the trainer waits, and about the samplers


class Limits(NamedTuple):
  """What bounds the batches of a run; see `FleetGeneration`."""

  schedule: Schedule
  num_batches: int
  quotas: Sequence[int]  # groups of a draw by source, without recorded ones
  groups_per_lease: int
  dynamic_batches: int  # draws of a batch at most, with dynamic sampling; 0: without
  silent_s: float  # after which a sampler whose record has not changed is not shown
  poll_s: float


class _OpenDraw(NamedTuple):
  """A draw whose groups are sampled."""

  batch: BatchInFlight
  plan: Plan
  records: dict[int, GroupRecord]  # of its groups so far


class FleetGeneration:
  """Takes the batches that samplers sample; see `modes.Generation`.

  All processes of the trainer call it together; the first one has the board.
  """

  def __init__(
    self,
    generator: Generator,
    board: Board | None,
    publisher: PolicyPublisher,
    limits: Limits,
    fingerprint_of: Callable[[int], str | None],
  ):
    """Recalls the batches that the store has, whichever policy sampled them.

    Args:
      generator: draws problems and assembles batches; at the position where it goes on.
      board: on the first process.
      publisher: of the policies.
      limits: of the run.
      fingerprint_of: the fingerprint of a version's parameters in this trainer; None if unknown.
    """
    self._generator, self._board, self._publisher = generator, board, publisher
    self._limits, self._fingerprint_of = limits, fingerprint_of
    self._newest = -1  # version
    self._open: collections.deque[_OpenDraw] = collections.deque()
    self._progress = _Progress(generator.number, generator.position())
    self._progress.recall(generator.recall_stored())

  def offer(self, policy: PolicySnapshot) -> None:
    """Publishes the policy, and plans the batches that it lets begin."""
    name = Policy(policy.version, policy.fingerprint())
    self._progress.add(self._publisher.publish(policy.params, name))
    self._newest = policy.version
    self._begin(policy)

  def take(self, number: int, before_waiting: Callable[[], None]) -> Iterator[RolloutBatch]:
    """Yields batches in order, until the one with this number has been taken.

    Args:
      number: of a batch that is needed now.
      before_waiting: called before a wait.
    Raises:
      EndRequestedError: shutdown was requested meanwhile.
      GeneratorStoppedError: a sampler's error must end the run.
    """
    while self._progress.number <= number:
      batch = self._recalled() or self._sampled(before_waiting)
      self._progress.advance(batch)
      yield batch

  def close(self) -> None:
    """Ends generation; the samplers end too if all batches have been sampled."""
    ended = self._progress.number >= self._limits.num_batches
    if self._board is not None:
      self._board.close(ended=ended)
    self._publisher.close()

  # --- plans --------------------------------------------------------------------------------------

  def _begin(self, policy: PolicySnapshot) -> None:
    """Plans the draws that may begin: draw i of those that are open is at most for batch b + i."""
    if self._progress.recalled:
      return  # the next draw's position is that after them
    while (number := self._progress.number + len(self._open)) < self._limits.num_batches:
      if number >= self._limits.schedule.limit(self._newest):
        return
      before = self._generator.position()
      batch = self._generator.begin_draw(policy, number)
      assert batch.flight is not None  # a fleet samples all of its groups, or a share of them
      plan = self._plan(batch, before)
      self._open.append(_OpenDraw(batch, plan, {}))
      self._on_board(functools.partial(Board.publish_plan, plan=plan))

  def _plan(self, batch: BatchInFlight, before: Position) -> Plan:
    assert batch.flight is not None
    sums = [problem_checksum(p.question, p.reference) for p in batch.flight.problems]
    return Plan(
      draw=batch.draw,
      number=batch.number,
      lowest_version=self._limits.schedule.oldest_version(batch.number),
      problems=sums,
      position=before.problems,
      drawn_by=batch.snapshot.version,
      leases=split_leases(self._limits.quotas, self._limits.groups_per_lease),
    )

  # --- batches ------------------------------------------------------------------------------------

  def _recalled(self) -> RolloutBatch | None:
    """The next batch of the store; None if the store does not have it, or it is of lost updates.

    The policies of such a batch were published by a trainer whose updates were lost, and came out
    differently when they were repeated, as on another kind of machine.
    """
    if not self._progress.recalled:
      return None
    batch = self._progress.recalled.popleft()
    differing = [
      f"version {version} with fingerprint {fingerprint}, which this trainer has with {known}"
      for version, fingerprint in batch.fingerprints.items()
      if (known := self._fingerprint_of(version)) != fingerprint
    ]
    if not differing:
      return batch
    why = f"rollouts {batch.number} were sampled by {', '.join(differing)}"
    self._generator.set_aside_from(batch.number, why, self._progress.before)
    self._progress.recalled.clear()
    return None

  def _sampled(self, before_waiting: Callable[[], None]) -> RolloutBatch:
    """The next batch, written to the store."""
    self._check_samplers()
    draws = self._graded_draws(before_waiting)
    number = self._progress.number
    if not self._limits.dynamic_batches:
      batch = next(draws)
    else:
      batch = dynamic_sampling.fill_with_mixed_groups(
        draws,
        self._generator.quotas,
        max_batches=self._limits.dynamic_batches,
        number=number,
      )
    self._progress.add(self._on_board(self._measure_samplers) or {})
    batch = self._generator.write(self._progress.describe(batch))
    assert batch.position is not None  # every new batch has one
    first = batch.position.draws
    self._on_board(lambda board: board.forget(before=first))
    return batch

  def _graded_draws(self, before_waiting: Callable[[], None]) -> Iterator[RolloutBatch]:
    """Draws in order, each with all groups sampled and graded."""
    while True:
      self._begin(self._policy())
      draw = self._open[0]
      self._wait(draw, before_waiting)
      self._open.popleft()
      yield self._assemble(draw)

  def _policy(self) -> PolicySnapshot:
    """The newest policy, by name: this process does not sample."""
    fingerprint = self._fingerprint_of(self._newest)
    assert fingerprint is not None  # it has been offered
    return PolicySnapshot({}, self._newest, lambda: fingerprint, ())

  def _wait(self, draw: _OpenDraw, before_waiting: Callable[[], None]) -> None:
    """Waits until a draw has all its groups."""
    began, first = time.monotonic(), True
    while True:
      self._take_groups()
      if draw.batch.sampled:
        break
      if first:
        before_waiting()
        first = False
      multihost.raise_if_shutdown_requested()
      restart_deadline()
      self._check_samplers()
      self._report(draw)
      time.sleep(self._limits.poll_s)
    self._progress.add({"time/fleet_wait_seconds": time.monotonic() - began})
    self._report(None)

  def _check_samplers(self) -> None:
    """Raises GeneratorStoppedError if a sampler's error must end the run."""
    failure = multihost.exchange(self._on_board(lambda board: board.failure()))[0]
    if failure:
      raise GeneratorStoppedError(
        f"{failure}. Sampled batches are kept: fix the cause and rerun the same commands"
      )

  def _report(self, waits_for: _OpenDraw | None) -> None:
    """Prints what the trainer waits for and since when, and a line for each sampler."""
    if self._board is None or not self._progress.report_is_due():
      return
    samplers = self._board.samplers(within_s=self._limits.silent_s)
    if waits_for is not None:
      done, total = len(waits_for.records), len(waits_for.plan.problems)
      text = (
        f"update {self._progress.number + 1} waits for batch {self._progress.number}, which has"
        f" {done} of {total} groups, since {self._progress.waits_since()}"
      )
      if not samplers:
        text += "; no sampler is running: start one with --mode=sample and this --workdir"
      say(text)
    for name, record in samplers.items():
      say(f"sampler {name}: {record.describe()}")

  # --- groups -------------------------------------------------------------------------------------

  def _take_groups(self) -> None:
    """Adds finished groups to their draws."""
    found = self._share_groups()
    by_draw = {draw.plan.draw: draw for draw in self._open}
    for name, data in [*self._progress.take_held(), *found]:
      number, index = draw_of(name), index_of(name)
      if (draw := by_draw.get(number)) is None:
        if number >= self._generator.position().draws:  # an earlier trainer has planned it
          self._progress.hold(name, data)
        continue
      try:
        group = GradedGroup.decode(data, name)
      except RecordError as error:
        self._drop(draw, index, str(error))
        continue
      why = self._refusal(draw, group.record)
      if why is None:
        self._progress.hold(name, data)
      elif why:
        self._drop(draw, index, why)
      else:
        self._add(draw, index, group)

  def _share_groups(self) -> list[tuple[str, bytes]]:
    """New groups of the board, on all processes."""
    found = self._on_board(lambda board: board.take_groups()) or []
    if jax.process_count() == 1:
      return found
    shared = multihost.exchange([(n, base64.b64encode(d).decode()) for n, d in found])[0]
    return [(name, base64.b64decode(text)) for name, text in shared]

  def _refusal(self, draw: _OpenDraw, record: GroupRecord) -> str | None:
    """Why a group is dropped; "" if it is not; None if that is not known yet."""
    if record.plan != draw.plan.id:
      return "it is of other problems than the plan's"
    for version, fingerprint in record.policies.items():
      if int(version) > self._newest:
        return None  # by a trainer whose last updates were lost: they are being repeated
      known = self._fingerprint_of(int(version))
      if int(version) < draw.plan.lowest_version:
        return f"version {version} is older than config.schedule allows"
      if known != fingerprint:
        return f"version {version} had fingerprint {fingerprint}, here it has {known}"
    return ""

  def _drop(self, draw: _OpenDraw, index: int, why: str) -> None:
    """Drops a group, which will be sampled again."""
    warn(f"group {index} of draw {draw.plan.draw} is dropped and sampled again: {why}")
    self._progress.add({"fleet/dropped_groups": 1.0})
    leases = enumerate(draw.plan.leases)
    lease = next(number for number, (first, end) in leases if first <= index < end)
    self._on_board(lambda board: board.discard(draw.plan.draw, index, lease))

  def _add(self, draw: _OpenDraw, index: int, graded: GradedGroup) -> None:
    flight, record = draw.batch.flight, graded.record
    assert flight is not None
    group: Group = Group(owner=flight, prompt_index=index, details=record.details, **graded.arrays)
    grades = [Grade(Outcome(outcome), *rest) for outcome, *rest in record.grades]
    submission: Future[list[Grade]] = Future()
    submission.set_result(grades)
    rows = zip(group.tokens, group.lengths, strict=True)
    texts = [self._generator.decode(row[:length].tolist()) for row, length in rows]
    flight.add(group, texts, submission)
    draw.records[index] = record

  def _assemble(self, draw: _OpenDraw) -> RolloutBatch:
    """The batch of a draw, under the versions that sampled its groups."""
    records = [draw.records[index] for index in range(len(draw.plan.problems))]
    versions = [min(map(int, record.policies)) for record in records]
    sampled_by = {int(v): x for record in records for v, x in record.policies.items()}
    oldest = min(versions)
    of_group = draw.batch.versions.copy()
    sampled = of_group[: len(versions)]
    of_group[: len(versions)] = np.where(sampled < 0, sampled, versions)
    _fill_versions(draw.batch.flight, versions)
    snapshot = PolicySnapshot({}, oldest, lambda: sampled_by[oldest], ())
    batch = dataclasses.replace(draw.batch, versions=of_group, snapshot=snapshot)
    gaps: dict[str, list[float]] = {}
    for record in records:
      for name, gap in record.gaps.items():
        gaps.setdefault(name, []).append(gap)
    statistics = agreement.join_gaps(gaps)
    statistics["fleet/samplers"] = float(len({record.sampler for record in records}))
    statistics["fleet/policies"] = float(len(sampled_by))
    assembled = self._generator.assemble(batch, measured=statistics, sampled_by=sampled_by)
    return _with_samplers(assembled, [record.sampler for record in records])

  def _measure_samplers(self, board: Board) -> dict[str, float]:
    """Metrics of the samplers that are running."""
    samplers = board.samplers(within_s=self._limits.silent_s)
    measured = {
      "fleet/running": float(len(samplers)),
      "fleet/late_groups": float(board.late_groups()),
    }
    for name in ("duplicate_groups", "duplicate_tokens"):
      measured[f"fleet/{name}"] = float(sum(getattr(s, name) for s in samplers.values()))
    for name in ("version", "tokens_per_second", "idle_share", "restore_seconds", "restore_gib"):
      for sampler, record in samplers.items():
        measured[f"hosts/{name}_{sampler}"] = float(getattr(record, name))
    return measured

  def _on_board(self, action: Callable[[Board], Any]) -> Any:
    """Runs an action on the first process's board; None on the others."""
    board = self._board
    return multihost.run_on_first(lambda: board and action(board), None)


class _Progress:
  """Where a trainer is in its batches, what it has measured, and when it last said so."""

  def __init__(self, number: int, position: Position):
    """`number`: of the next batch; `position`: before it."""
    self.number, self.before = number, position
    self.recalled: collections.deque[RolloutBatch] = collections.deque()
    self._measured: dict[str, float] = {}
    self._held: list[tuple[str, bytes]] = []
    self._since = self._said = time.monotonic()

  def recall(self, batches: Iterator[RolloutBatch]) -> None:
    """Reads the batches that the store has."""
    self.recalled.extend(batches)

  def advance(self, batch: RolloutBatch) -> None:
    """Notes that a batch is taken."""
    assert batch.position is not None
    self.number, self.before = batch.number + 1, batch.position
    self._since = time.monotonic()

  def add(self, measured: Mapping[str, float]) -> None:
    """Adds measurements of the next batch."""
    for name, value in measured.items():
      self._measured[name] = self._measured.get(name, 0.0) + value

  def describe(self, batch: RolloutBatch) -> RolloutBatch:
    """The batch with the measurements since the last one."""
    measured, self._measured = self._measured, {}
    return dataclasses.replace(batch, timings={**batch.timings, **measured})

  def hold(self, name: str, data: bytes) -> None:
    """Keeps a group until the version that sampled it is known."""
    self._held.append((name, data))

  def take_held(self) -> list[tuple[str, bytes]]:
    """The groups that were held."""
    held, self._held = self._held, []
    return held

  def waits_since(self) -> str:
    """When the wait for the next batch began, as text."""
    waited = time.monotonic() - self._since
    clock = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
    return f"{clock} ({duration(waited)})"

  def report_is_due(self) -> bool:
    """Whether something is to be printed; then not for some time."""
    now = time.monotonic()
    if now - self._said < SAY_EVERY_S:
      return False
    self._said = now
    return True


def _fill_versions(flight: Flight | None, versions: Sequence[int]) -> None:
  """Gives the groups of one version its number by token, if others have several.

  So it is where a run was resumed with another `fleet.new_weights`.
  """
  assert flight is not None  # a fleet samples
  if all(group.token_versions is None for group in flight.groups.values()):
    return
  for index, group in flight.groups.items():
    if group.token_versions is None:
      of_tokens = with_version(group, versions[index])
      flight.groups[index] = group._replace(token_versions=of_tokens)


def _with_samplers(batch: RolloutBatch, samplers: Sequence[str]) -> RolloutBatch:
  """The batch whose samples say which sampler had their group; recorded groups, last, have none."""
  assert batch.graded is not None
  group_size = batch.graded.train.rewards.shape[1]
  of_samples = [{"sampler": name} for name in samplers for _ in range(group_size)]
  of_samples += [{}] * (len(batch.graded.samples) - len(of_samples))
  samples = [s | x for s, x in zip(batch.graded.samples, of_samples, strict=True)]
  return dataclasses.replace(batch, graded=batch.graded._replace(samples=samples))


def split_leases(quotas: Sequence[int], groups_per_lease: int) -> list[list[int]]:
  """[first group, one past the last] of each lease of a draw; a lease has groups of one source."""
  leases, start = [], 0
  for quota in quotas:
    end = start + quota
    leases += [[i, min(i + groups_per_lease, end)] for i in range(start, end, groups_per_lease)]
    start = end
  return leases


def collector_of_graded(collector: Collector) -> Collector:
  """A collector that takes the grades that come with groups; it has no graders of its own."""
  results = lambda futures: [grade for future in futures for grade in future.result()]
  return dataclasses.replace(collector, results=results)
