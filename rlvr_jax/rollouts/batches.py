"""Makes batches, in order, from draws of problems and from graded groups that arrive in any order.

A batch has the groups of one draw or, with dynamic sampling, of several draws in a row. Every group
goes through the store, so that a killed run samples no group twice. All processes of a run call the
same functions together; the first process writes the store.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlvr_jax.data.draws import Draws
from rlvr_jax.rollouts.batch import train_batch, with_equal_names
from rlvr_jax.rollouts.grading import (
  FOREIGN,
  draw_statistics,
  mean_solve_rate,
  sampled_places,
  solve_rates,
)
from rlvr_jax.rollouts.group import Draw, Group, Sampler, decode, encode, join
from rlvr_jax.rollouts.recorded import RecordedGroups
from rlvr_jax.rollouts.staleness import Drawn, RecordedRun, encode_versions
from rlvr_jax.rollouts.store import RolloutStore, TornShardError
from rlvr_jax.storage.files import JSON, JsonObject
from rlvr_jax.types import TrainBatch

_MAX_CACHED = 16  # batches kept in memory; other batches are read from the store when needed


class DynamicSamplingError(RuntimeError):
  """Too few groups had both right and wrong rollouts to fill a batch."""


class FingerprintError(RuntimeError):
  """The parameters that sampled rollouts are not the trainer's parameters of the same version."""


class Position(NamedTuple):
  """The state of drawing problems after a batch; it determines all later batches. JSON."""

  number: int = 0  # number of the next batch
  draws: int = 0  # number of draws of problems so far
  checked_version: int = -1  # version that was last compared with the trainer; −1: none
  problems: Mapping[str, JSON] = {}  # state of the iterator over problems


@dataclasses.dataclass(frozen=True)
class Batch:
  """A graded batch.

  Attributes:
    number: the number of the batch, from 0 in the order of sampling.
    groups: P groups, in the order of their sources.
    after: the state of drawing problems after this batch.
    draws: number of draws of problems in the batch, more than one with dynamic sampling.
    prompts, tokens: numbers of prompts and tokens sampled for the batch, including dropped groups.
    statistics: metrics of the batch's sampling and grading.
    timings: seconds and counts of sampling since the last batch; {} if read from the store.
    flops: model FLOPs of sampling the batch.
    drawn: a record of how each draw was made, see `Drawn`; () if draws do not depend on the clock.
  """

  number: int
  groups: Sequence[Group]
  after: Position
  draws: int
  prompts: int
  tokens: int
  statistics: Mapping[str, float]
  timings: Mapping[str, float]
  flops: float
  drawn: Sequence[Mapping[str, JSON]] = ()

  @functools.cached_property
  def train(self) -> TrainBatch:
    """The arrays of the batch for an update."""
    return train_batch(self.groups)

  @property
  def samples(self) -> list[JsonObject]:
    """A human-readable record per rollout, in order."""
    return [sample for group in self.groups for sample in group.samples]

  @property
  def versions(self) -> np.ndarray:
    """i32[P], the version of each group's oldest token; `FOREIGN` if another run sampled it."""
    return versions_of(self.groups)

  @property
  def fingerprints(self) -> dict[int, str]:
    """The fingerprint of each version that has sampled the batch, by ascending version."""
    found = {version: x for group in self.groups for version, x in group.versions.items()}
    return dict(sorted(found.items()))

  def info(self) -> dict[str, JSON]:
    """The fields that the store keeps beside the groups; JSON."""
    names = ("draws", "prompts", "tokens", "statistics", "flops", "drawn")
    fingerprints = {str(version): x for version, x in self.fingerprints.items()}
    return {name: getattr(self, name) for name in names} | {
      "after": self.after._asdict(),
      "groups": len(self.groups),
      "versions": fingerprints,
    }


def read_batch(store: RolloutStore, number: int) -> Batch:
  """Reads a batch from a store.

  Raises:
    TornShardError: the batch is missing or damaged.
  """
  groups, info = store.read(number)
  names = ("draws", "prompts", "tokens", "statistics", "flops", "drawn")
  fields = {name: info[name] for name in names}
  return Batch(number, groups, Position(**info["after"]), timings={}, **fields)


def versions_of(groups: Sequence[Group]) -> np.ndarray:
  """i32[P], the version of each group's oldest token; `FOREIGN` if another run sampled it."""
  return np.array([min(group.versions, default=FOREIGN) for group in groups], np.int32)


class Measured(NamedTuple):
  """A complete draw after its log-probabilities were compared with the trainer's."""

  groups: Sequence[Group]
  statistics: Mapping[str, float]
  checked_version: int  # see `Position`


@dataclasses.dataclass(frozen=True)
class BatchSettings:
  """Settings that determine how a run's batches are made.

  Attributes:
    quotas: number of groups in a batch from each source; another run's store, if it is a source,
      comes last.
    seed: the seed of the rollouts.
    max_draws: the most draws of problems for a batch with dynamic sampling; 0 turns dynamic
      sampling off.
    waits_for_all: whether all batches that have begun are completed before the next update. If so,
      no batch of an older policy is in progress at a checkpoint, and a resumed run samples the same
      batches as a run that was not stopped.
    repeats: the recorded run that this run repeats, or None.
    how_drawn: the fields `burst_steps`, `slots` and `new_weights` of `Drawn`. They are recorded
      with every draw, so that a later run can repeat draws that depend on the clock. {} if draws do
      not depend on the clock.
    about: JSON values about the run, for other runs that read its store.
  """

  quotas: Sequence[int]
  seed: int
  max_draws: int = 0
  waits_for_all: bool = True
  repeats: RecordedRun | None = None
  how_drawn: JsonObject = dataclasses.field(default_factory=dict)
  about: Mapping[str, JSON] = dataclasses.field(default_factory=dict)


class Hooks(NamedTuple):
  """The functions of a run that its batches call.

  Attributes:
    fingerprint: version → fingerprint of the version's parameters in this trainer; None if unknown.
    compare: (groups of a complete draw in order, including groups from another run's store; version
      of the policy with which the draw began; version that was compared last) → the draw, after a
      comparison of its log-probabilities with the trainer's.
    flops: arrays of groups → model FLOPs of sampling them.
    on_first: runs an action on the first process and returns its result, JSON, on all processes.
    warn: prints a warning.
  """

  fingerprint: Callable[[int], str | None]
  compare: Callable[[Sequence[Group], int, int], Measured]
  flops: Callable[[Mapping[str, np.ndarray]], float]
  on_first: Callable[[Callable[[], JSON]], Any]
  warn: Callable[[str], None]


@dataclasses.dataclass
class _OpenDraw:
  """A draw that waits for its groups."""

  draw: Draw
  state: dict[str, JSON]  # state of the iterator over problems after the draw
  drawn: dict[str, JSON]  # see `Batch.drawn`
  groups: dict[int, Group]  # the groups that have arrived, by index

  @property
  def is_complete(self) -> bool:
    """Whether all groups have arrived."""
    return len(self.groups) == len(self.draw.problems)


class _CompleteDraw(NamedTuple):
  """A draw whose groups are all graded, with their statistics."""

  groups: Sequence[Group]
  position: Position  # the state of drawing after the draw
  prompts: int
  tokens: int
  solve_rate: float  # mean over the groups; NaN if no group has a solve rate
  statistics: Mapping[str, float]
  timings: Mapping[str, float]
  flops: float
  drawn: Mapping[str, JSON]


class MeasuredSampler(Sampler, Protocol):
  """A `Sampler` that can be polled without a wait, and that measures its own work."""

  def poll(self) -> list[Group]:
    """Returns the groups that are finished, like `take`, but does not wait."""
    ...

  def measure(self) -> dict[str, float]:
    """Seconds and counts of sampling since the last call, by metric."""
    ...


class Inputs(NamedTuple):
  """The objects that groups come from."""

  sampler: MeasuredSampler
  problems: Draws
  recorded: RecordedGroups | None
  are_kept: bool = False  # whether the sampler has written its groups to the store already


class _Progress(NamedTuple):
  """The progress of a run's batches."""

  position: Position  # the state of drawing after the last complete batch
  begun: int  # number of the next batch to begin
  draws: int  # number of the next draw
  version: int = 0  # version of the newest policy that was offered
  added: tuple[Batch, ...] = ()  # batches completed since the last call of `Batches.added`


class Batches:
  """Draws problems, asks the sampler for the groups of these problems, and assembles batches."""

  def __init__(self, inputs: Inputs, store: RolloutStore, settings: BatchSettings, run: Hooks):
    """Takes the objects of a run; draws nothing yet.

    Args:
      inputs: the objects that groups come from.
      store: keeps every group and batch; only the first process writes the store.
      settings, run: the settings of batches, and the run's functions.
    """
    self._inputs, self._store, self._settings, self._run = inputs, store, settings, run
    self._open: dict[int, _OpenDraw] = {}  # draws that are not complete, by number, in order
    self._spare: list[_CompleteDraw] = []  # complete draws whose groups the next batch takes
    self._place = _Progress(Position(problems=inputs.problems.get_state()), 0, 0)
    self._cache: dict[int, Batch] = {}

  # --- as the loop sees it ------------------------------------------------------------------------

  def sample_with(self, sampler: MeasuredSampler, *, are_kept: bool) -> None:
    """Replaces the sampler; all groups that were requested before must have arrived.

    Args:
      sampler: gives the groups from now on.
      are_kept: whether the sampler has already written its groups to the store.
    """
    self._inputs = self._inputs._replace(sampler=sampler, are_kept=are_kept)

  def move_to(self, position: Position) -> None:
    """Continues drawing after a batch, from the position that the batch has recorded."""
    self._inputs.problems.set_state(dict(position.problems))
    self._place = _Progress(position, position.number, position.draws)

  def position(self) -> Position:
    """The position of drawing after the last complete batch."""
    return self._place.position

  def open(self, until: int, version: int) -> None:
    """Begins all batches with a number below `until`; batches in the store are not sampled again.

    Args:
      until: one past the number of the last batch that may begin.
      version: the version of the newest policy that the sampler was offered.
    """
    self._place = self._place._replace(version=version)
    while (number := self._place.begun) < until:
      stored = None if self._open or self._spare else self._stored(number)
      if stored is None:
        self._begin()
        self._place = self._place._replace(begun=number + 1)
      elif max(stored.fingerprints, default=0) > version:
        # This batch was sampled by policies whose updates a restart has lost. It is checked again
        # once these updates have been repeated.
        return
      elif why := self._difference(stored) or self._gap(stored):
        self._set_aside(number, why)
      else:
        self._inputs.problems.set_state(dict(stored.after.problems))
        draws = stored.after.draws
        self._place = self._place._replace(position=stored.after, begun=number + 1, draws=draws)
        self._add_batch(stored)

  def take(self, number: int, before_waiting: Callable[[], None] = lambda: None) -> Batch:
    """The batch with this number; waits for it, or with `waits_for_all` for all begun batches.

    Args:
      number: the number of the batch.
      before_waiting: called once before the first wait for the sampler, if there is a wait.
    """
    until = self._place.begun if self._settings.waits_for_all else number + 1
    sampler, is_waiting = self._inputs.sampler, False
    while self._place.position.number < until:
      if self._assemble():
        continue
      groups = [] if is_waiting else sampler.poll()
      if not groups and not is_waiting:
        before_waiting()
        is_waiting = True
      self._add(groups or sampler.take())
    if number not in self._cache:
      return read_batch(self._store, number)
    return self._cache[number]

  def added(self) -> Sequence[Batch]:
    """The batches that have become complete since the last call, in order."""
    added = self._place.added
    self._place = self._place._replace(added=())
    return added

  def forget(self, before: int) -> None:
    """Drops batches with a lower number from memory."""
    self._cache = {number: batch for number, batch in self._cache.items() if number >= before}

  # --- draws --------------------------------------------------------------------------------------

  def _begin(self) -> None:
    """Begins the next draw; groups that a killed process has sampled are not sampled again."""
    settings, place, problems = self._settings, self._place, self._inputs.problems
    version, number, plan = place.version, place.draws, None
    before = problems.get_state()
    drawn = settings.repeats.drawn(number) if settings.repeats else None
    if drawn is not None and settings.repeats is not None:
      problems.set_state(drawn.problems)
      before, version = drawn.problems, drawn.version
      if settings.repeats.has_several:
        plan = settings.repeats.token_versions(number)
    quotas = settings.quotas[:-1] if self._inputs.recorded else settings.quotas
    sources = np.repeat(np.arange(len(quotas)), quotas).tolist()
    drawn_problems = problems.draw(number, version) if sources else []
    draw = Draw(number, drawn_problems, settings.seed, version, sources, plan)
    how: dict[str, JSON] = {}
    if drawn is not None:
      how = drawn._asdict()
    elif settings.how_drawn:
      how = Drawn(number, before, version, **settings.how_drawn)._asdict()
    groups = self._stored_groups(draw)
    self._open[number] = _OpenDraw(draw, problems.get_state(), how, groups)
    self._place = place._replace(draws=number + 1)
    if missing := range(len(drawn_problems)) - groups.keys():
      self._inputs.sampler.want(draw, missing)

  def _stored_groups(self, draw: Draw) -> dict[int, Group]:
    """The groups of a draw that a killed process has sampled with the same policies, by index."""

    def read() -> str:
      found = self._store.read_groups(draw.number)
      groups = [group for group in found.values() if self._is_of(draw, group)]
      return base64.b64encode(encode(groups, {})).decode() if groups else ""

    text = self._run.on_first(read)
    groups, _ = decode(base64.b64decode(text)) if text else ([], {})
    return {group.index: group for group in groups}

  def _is_of(self, draw: Draw, group: Group) -> bool:
    """Whether a stored group is of this draw's problem and source, and of this run's policies."""
    if not group.index < len(draw.problems):
      return False
    is_same = group.samples[0].get("prompt") == draw.problems[group.index].question
    known = (self._run.fingerprint(version) == x for version, x in group.versions.items())
    return is_same and group.source == draw.sources[group.index] and all(known)

  def _add(self, groups: Sequence[Group]) -> None:
    """Adds groups to their draws; once this returns, the groups survive a kill of the process."""

    if not self._inputs.are_kept:
      self._run.on_first(lambda: self._store.write_groups(groups))
    for group in groups:
      self._open[group.draw].groups[group.index] = group

  # --- batches ------------------------------------------------------------------------------------

  def _assemble(self) -> bool:
    """Adds the oldest draw to the next batch if the draw is complete; False if it is incomplete."""
    number = min(self._open, default=-1)
    if number < 0 or not self._open[number].is_complete:
      return False
    self._spare.append(self._measure(self._open.pop(number)))
    groups = self._choose()
    if groups is None:
      self._begin()
      return True
    batch = self._batch(groups)
    self._spare = []
    self._place = self._place._replace(position=batch.after)
    self._run.on_first(lambda: self._write(batch))
    self._add_batch(batch)
    return True

  def _measure(self, opened: _OpenDraw) -> _CompleteDraw:
    """A complete draw with its metrics, and with recorded groups if there are any."""
    draw, inputs = opened.draw, self._inputs
    groups = [opened.groups[index] for index in range(len(draw.problems))]
    state, statistics, tokens, flops = opened.state, {}, 0, 0.0
    if groups:
      arrays = join(with_equal_names(groups))
      solved = solve_rates(arrays).astype(np.float32)
      state, observed = inputs.problems.observe(draw.number, solved, opened.state)
      samples = [sample for group in groups for sample in group.samples]
      statistics = draw_statistics(arrays, samples) | observed
      tokens, flops = int(sampled_places(arrays).sum()), self._run.flops(arrays)
    if inputs.recorded is not None:
      count = self._settings.quotas[-1]
      recorded = inputs.recorded.take(draw.number * count, count)
      groups += [group._replace(source=len(self._settings.quotas) - 1) for group in recorded]
    judged = {name: np.stack([g.arrays[name] for g in groups]) for name in ("correct", "valid")}
    rate = mean_solve_rate(judged, versions_of(groups))
    measured = self._run.compare(groups, draw.version, self._checked_version())
    position = Position(0, draw.number + 1, measured.checked_version, state)
    how = dict(opened.drawn)
    if how and self._settings.max_draws:
      how["token_versions"] = encode_versions(token_versions(measured.groups))
    return _CompleteDraw(
      groups=measured.groups,
      position=position,
      prompts=len(draw.problems),
      tokens=tokens,
      solve_rate=rate,
      statistics=statistics | dict(measured.statistics) | joined_measurements(groups),
      timings=inputs.sampler.measure(),
      flops=flops,
      drawn=how,
    )

  def _checked_version(self) -> int:
    last = self._spare[-1].position if self._spare else self._place.position
    return last.checked_version

  def _choose(self) -> list[Group] | None:
    """The groups of the next batch; None if dynamic sampling needs another draw.

    Dynamic sampling keeps the groups with both right and wrong rollouts, in the order in which they
    were drawn; groups beyond a full batch are dropped. Only valid rollouts count. Correctness
    decides, not the shaped reward.

    Raises:
      DynamicSamplingError: there are not enough such groups in `max_draws` draws.
    Source: dynamic sampling in "DAPO: An Open-Source LLM Reinforcement Learning System at Scale"
      (arXiv:2503.14476).
    """
    groups = [group for draw in self._spare for group in draw.groups]
    settings = self._settings
    if not settings.max_draws:
      return groups
    mixed = [group for group in groups if is_mixed(group)]
    by_source = [
      [group for group in mixed if group.source == source][:quota]
      for source, quota in enumerate(settings.quotas)
    ]
    if [*map(len, by_source)] == [*settings.quotas]:
      return [group for of_source in by_source for group in of_source]
    if len(self._spare) == settings.max_draws:
      solved = np.nanmean(solve_rates(join(with_equal_names(groups))))
      raise DynamicSamplingError(
        f"dynamic sampling: {settings.max_draws} batches of {sum(settings.quotas)} prompts at"
        f" update {self._place.version} have too few groups with both right and wrong rollouts"
        f" (solve rate {solved:.3f}). Raise config.dynamic_sampling.max_batches; or, in another"
        " --workdir, start a run with a larger config.batch.group_size, or with problems that the"
        " policy solves sometimes, not always or never"
      )
    return None

  def _batch(self, groups: Sequence[Group]) -> Batch:
    """The next batch: these groups, which were chosen from the complete draws in `_spare`."""
    draws, number = self._spare, self._place.position.number
    rates = [draw.solve_rate for draw in draws if draw.solve_rate == draw.solve_rate]
    rate = np.array(np.mean(rates) if rates else np.nan, np.float32)
    statistics = mean_statistics([draw.statistics for draw in draws])
    prompts = sum(draw.prompts for draw in draws)
    quotas = self._settings.quotas[:-1] if self._inputs.recorded else self._settings.quotas
    if self._settings.max_draws and any(quotas):
      statistics["dynamic_sampling/prompts_per_group"] = prompts / sum(quotas)
    return Batch(
      number=number,
      groups=[g._replace(arrays={**g.arrays, "solve_rate": rate}) for g in groups],
      after=draws[-1].position._replace(number=number + 1),
      draws=len(draws),
      prompts=prompts,
      tokens=sum(draw.tokens for draw in draws),
      statistics=statistics,
      timings=join_timings([draw.timings for draw in draws]),
      flops=sum(draw.flops for draw in draws),
      drawn=[draw.drawn for draw in draws if draw.drawn],
    )

  def _add_batch(self, batch: Batch) -> None:
    """Adds a batch, and keeps it in memory unless earlier batches, needed first, fill the cache."""
    if len(self._cache) < _MAX_CACHED:
      self._cache[batch.number] = batch
    self._place = self._place._replace(added=(*self._place.added, batch))

  # --- the store ----------------------------------------------------------------------------------

  def _write(self, batch: Batch) -> None:
    if batch.number in self._store:  # left over after a damaged or missing batch
      self._store.set_aside(batch.number)
    self._store.write(batch.number, batch.groups, batch.info() | dict(self._settings.about))
    self._store.forget_groups(before=batch.after.draws)

  def _stored(self, number: int) -> Batch | None:
    """The stored batch with this number, or None; sets a damaged batch and later batches aside."""
    found: list[Batch] = []

    def find_damage() -> str | None:
      if number not in self._store:
        return f"batch {number} is missing" if number + 1 in self._store else None
      try:
        found.append(read_batch(self._store, number))
      except TornShardError as error:
        return str(error)
      return ""

    damage = self._run.on_first(find_damage)
    if damage:
      self._set_aside(number, damage)
    if damage != "":
      return None
    return found[0] if found else read_batch(self._store, number)  # in the other processes

  def _difference(self, batch: Batch) -> str:
    """A message if the policies that sampled a batch are not this trainer's; otherwise ""."""
    for version, fingerprint in batch.fingerprints.items():
      known = self._run.fingerprint(version)
      if known != fingerprint:
        return (
          f"batch {batch.number} was sampled by version {version} with fingerprint {fingerprint},"
          f" but this trainer has that version with fingerprint {known}"
        )
    return ""

  def _gap(self, batch: Batch) -> str:
    """A message if a batch does not begin with the next draw; otherwise ""."""
    first = batch.after.draws - batch.draws
    if first == self._place.draws:
      return ""
    return f"batch {batch.number} begins with draw {first}, not with draw {self._place.draws}"

  def _set_aside(self, number: int, why: str) -> None:
    """Sets a batch and all later batches aside in the store, so that they can be made again.

    The groups of these batches stay in the store, like groups of batches in progress: a group that
    a policy of this run has sampled is not sampled again. But the groups do not stay if dynamic
    sampling is on and `waits_for_all` is False. Then a batch that is sampled again may take other
    draws, and groups of later draws become too old.
    """
    self._run.warn(
      f"{why}; this batch and all later batches are set aside, and sampled again if needed"
    )
    settings = self._settings
    are_kept = settings.waits_for_all or not settings.max_draws
    recorded = len(settings.quotas) - 1 if self._inputs.recorded else -1

    def set_aside() -> None:
      for later in reversed(self._store.numbers()):  # the batch that is the reason comes last
        if later < number:
          return
        with contextlib.suppress(TornShardError):
          for group in self._store.read(later)[0] if are_kept else ():
            if group.source != recorded:
              self._store.write_groups([as_sampled(group)])
        self._store.set_aside(later)

    self._run.on_first(set_aside)


def as_sampled(group: Group) -> Group:
  """A group of a batch as its sampler returned it."""
  arrays = {name: array for name, array in group.arrays.items() if name != "solve_rate"}
  if "sampled_logprobs" in arrays:
    arrays["behavior_logprobs"] = arrays.pop("sampled_logprobs")
  return group._replace(arrays=arrays)


def token_versions(groups: Sequence[Group]) -> np.ndarray:
  """The versions of all tokens, i32[P, G, T]; or i32[P] if each group has one version."""
  arrays = join(with_equal_names(groups))
  return arrays.get("token_versions", versions_of(groups))


def is_mixed(group: Group) -> bool:
  """Whether some of the valid rollouts are right and some are wrong."""
  correct = group.arrays["correct"][group.arrays["valid"]] == 1
  return bool(correct.any() and not correct.all())


def mean_statistics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """The mean of each metric over the draws that have the metric."""
  names = dict.fromkeys(name for part in parts for name in part)
  return {name: float(np.mean([part[name] for part in parts if name in part])) for name in names}


def join_timings(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Joins timings: the sums of times, and the maxima of all other metrics."""
  names = dict.fromkeys(name for part in parts for name in part)
  values = {name: [part[name] for part in parts if name in part] for name in names}
  return {name: sum(x) if name.startswith("time/") else max(x) for name, x in values.items()}


def joined_measurements(groups: Sequence[Group]) -> dict[str, float]:
  """The measurements in `Group.measured` of all groups, joined by `join_measurements`."""
  found: dict[str, list[float]] = {}
  for group in groups:
    for name, value in group.measured.items():
      found.setdefault(name, []).append(value)
  return join_measurements(found)


def join_measurements(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
  """Joins measurements of the same name: the mean of means, maximum of maxima, or sum of counts."""
  join = lambda name: np.max if name.endswith("_max") else np.sum if "_draws" in name else np.mean
  return {name: float(join(name)(values)) for name, values in found.items()}
