"""One batch of rollouts, from sampling to its last update, and its conversion for a store."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.data import Problem
from rlvr_jax.rollouts.group import Group as GradedGroup
from rlvr_jax.rollouts.group import decode, encode, join
from rlvr_jax.rollouts.serve import Group, Request, stack_groups
from rlvr_jax.storage.files import replace_file
from rlvr_jax.types import Params, Prompts, Rollouts, TrainBatch

FOREIGN = -1  # version of rollouts that were not sampled by a policy of this run
Submission = Any  # returned by the graders' `submit`: with one process, a future of grades


class PolicySnapshot(NamedTuple):
  """A policy whose weights were synced for sampling rollouts."""

  params: Params  # the trained parameters
  version: int  # number of updates before it
  fingerprint: Callable[[], str]  # of the parameters; waits until they are computed
  source_params: tuple[tuple[Params, Params], ...]  # (trained, frozen) for sampling, by source


@dataclasses.dataclass
class Flight:
  """Rollouts in progress: each group is submitted to the graders as soon as it is sampled."""

  problems: Sequence[Problem]  # P
  prompts: Prompts  # NumPy
  seeds: Sequence[int] = ()  # P, of environments; () without dialogues
  # By index of a problem whose environment failed at its reset, why; its rollouts have failed.
  failed_resets: Mapping[int, str] = dataclasses.field(default_factory=dict)
  # By index of the problem:
  groups: dict[int, Group] = dataclasses.field(default_factory=dict)
  texts: dict[int, list[str]] = dataclasses.field(default_factory=dict)  # responses
  # Of the rollouts that a grader judges: all but those of dialogues that have an outcome.
  grades: dict[int, Submission] = dataclasses.field(default_factory=dict)

  def add(self, group: Group, texts: list[str], grades: Submission) -> None:
    """Adds a sampled group whose texts have been submitted to the graders."""
    self.groups[group.prompt_index] = group
    self.texts[group.prompt_index] = texts
    self.grades[group.prompt_index] = grades

  @property
  def sampled(self) -> bool:
    """Whether all groups have been sampled."""
    return len(self.groups) == len(self.problems)

  @functools.cached_property
  def all_grades(self) -> Future[None]:
    """A future that is done when all grades are; for a sampled batch, with one process."""
    return when_all(self.grades.values())

  @functools.cached_property
  def rollouts(self) -> Rollouts:
    """The rollouts of all groups; NumPy."""
    return stack_groups([self.groups[index] for index in range(len(self.problems))])


def when_all(futures: Iterable[Future]) -> Future[None]:
  """A future that is done when all of the given ones are; its result is None."""
  awaited = [*futures]
  lock = threading.Lock()
  combined: Future[None] = Future()
  missing = len(awaited)

  def count_done(_: Future) -> None:
    nonlocal missing
    with lock:
      missing -= 1
      if not missing:
        combined.set_result(None)

  for future in awaited:
    future.add_done_callback(count_done)
  return combined


class Graded(NamedTuple):
  """The contents of a graded batch."""

  train: TrainBatch  # NumPy
  tokens: int  # sampled for this batch, including dropped rollouts
  prompts: int  # sampled for this batch, including dropped prompts
  statistics: dict[str, float]  # metrics of its sampling and grading, by name
  samples: list[dict[str, Any]]  # one JSON-serializable record per rollout, in order


class Position(NamedTuple):
  """State of generation between two batches, which determines the next ones."""

  number: int  # of the next batch
  draws: int  # of prompts, so far
  checked_version: int  # policy whose log-probabilities were last compared; −1: none
  problems: dict[str, Any]  # state of the problems' order; JSON


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchInFlight:
  """A batch that is being sampled and graded.

  Attributes:
    number: from 0, in the order in which batches are sampled. Under dynamic sampling, of the batch
      that was being filled when this draw began; `fill_with_mixed_groups` numbers the result.
    draw: number of the draw of prompts it is sampled from, from 0.
    snapshot: the policy that samples it.
    versions: i32[P], version per group when it began; `FOREIGN` for groups that this run does not
      sample.
    position: of the generator after this batch was started.
    dispatched: time of dispatch, seconds on the host's clock.
    flight: its rollouts in progress; None if all groups are recorded.
    requests: by source, for the groups still to be sampled.
    recorded: its groups that come from a store; None if there are none.
    timings: seconds by phase; empty until the batch is sampled.
    drawn: a `Drawn` of `rollouts.staleness`, for runs that repeat this one; None if no run can.
  """

  number: int
  draw: int
  snapshot: PolicySnapshot
  versions: np.ndarray
  position: Position
  dispatched: float
  flight: Flight | None
  requests: Sequence[Sequence[Request[Flight]]]
  recorded: Graded | None
  timings: Mapping[str, float] = dataclasses.field(default_factory=dict)
  drawn: Mapping[str, Any] | None = None

  @property
  def sampled(self) -> bool:
    """Whether all of its groups have been sampled."""
    return self.flight is None or self.flight.sampled


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutBatch:
  """A graded batch, until its last update.

  Attributes:
    number: from 0, in the order in which batches are sampled.
    version: number of updates of the policy whose weights were synced to sample it.
    fingerprint: of that policy's parameters.
    others: where several versions have sampled it, of which `version` is the oldest: the others'
      fingerprints, by version as text.
    versions: i32[P], version per group, that of its oldest token; None while the contents are only
      in the store.
    position: of the generator after this batch; None for a batch restored from a checkpoint.
    draws: number of draws of prompts that it took, more than one under dynamic sampling.
    flops: model FLOPs of generating it.
    timings: seconds by phase; empty if the batch was read from a store.
    graded: its contents; None while they are only in the store.
    reference_logprobs: f32[P, G, T]; None until an update needs them.
    proximal_logprobs: f32[P, G, T]; None until an update needs them.
    scored_at: update at which `proximal_logprobs` were computed.
    drawn: see `BatchInFlight`; with dynamic sampling, of each of its draws.
  """

  number: int
  version: int
  fingerprint: str | None = None
  others: Mapping[str, str] = dataclasses.field(default_factory=dict)
  versions: np.ndarray | None = None
  position: Position | None = None
  draws: int = 1
  flops: float = 0.0
  timings: Mapping[str, float] = dataclasses.field(default_factory=dict)
  graded: Graded | None = None
  reference_logprobs: np.ndarray | None = None
  proximal_logprobs: np.ndarray | None = None
  scored_at: int | None = None
  drawn: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None

  @property
  def fingerprints(self) -> dict[int, str | None]:
    """The fingerprint of each version that has sampled it."""
    others: dict[int, str | None] = {int(version): x for version, x in self.others.items()}
    return {self.version: self.fingerprint} | others


def grades_future(batch: BatchInFlight) -> Future[None] | None:
  """A future that is done when a batch's grades are; None if nothing is graded.

  Also None with several processes: they must act in the same order, so they cannot depend on when
  grades arrive.
  """
  if batch.flight is None or jax.process_count() > 1:
    return None
  return batch.flight.all_grades


def may_finish(sampled: Sequence[BatchInFlight]) -> bool:
  """Whether to finish the first batch: it has its grades, or, without a future, a successor."""
  grades = grades_future(sampled[0])
  return len(sampled) > 1 if grades is None else grades.done()


# --- to and from a store --------------------------------------------------------------------------

_INFO = ("version", "fingerprint", "draws", "flops")
_INFO_OF_GRADED = ("tokens", "prompts", "statistics")


def to_groups(batch: RolloutBatch, **about: Any) -> tuple[list[GradedGroup], dict[str, Any]]:
  """Converts a batch to (groups, info) for `RolloutStore.write`; drops timings.

  Args:
    batch: a graded batch.
    about: JSON values about the run, for runs that use the store as an input.
  """
  graded = batch.graded
  assert graded is not None and batch.versions is not None and batch.position is not None
  groups = split(graded.train, draw=batch.position.draws - 1, samples=graded.samples)
  sampled_by = []
  for group, version in zip(groups, batch.versions.tolist(), strict=True):
    of_tokens = group.arrays.get("token_versions", np.array(version))
    versions = [v for v in np.unique(of_tokens).tolist() if v != FOREIGN]
    sampled_by.append({v: batch.fingerprints.get(v) or "" for v in versions})
  groups = [
    group._replace(versions=versions) for group, versions in zip(groups, sampled_by, strict=True)
  ]
  info = {name: getattr(batch, name) for name in _INFO}
  info |= {name: getattr(graded, name) for name in _INFO_OF_GRADED}
  info |= {"after": batch.position._asdict(), "groups": len(groups)}
  info |= {"others": dict(batch.others)} if batch.others else {}
  info |= {"drawn": batch.drawn} if batch.drawn is not None else {}
  return groups, info | about


def from_groups(
  number: int, groups: Sequence[GradedGroup], info: Mapping[str, Any]
) -> RolloutBatch:
  """The inverse of `to_groups`."""
  samples = [sample for group in groups for sample in group.samples]
  of_graded = {name: info[name] for name in _INFO_OF_GRADED}
  rest = {name: info[name] for name in _INFO}
  return RolloutBatch(
    number=number,
    versions=oldest_versions(groups),
    position=Position(**info["after"]),
    graded=Graded(train=to_train_batch(groups), samples=samples, **of_graded),
    others=info.get("others", {}),
    drawn=info.get("drawn"),
    **rest,
  )


def oldest_versions(groups: Sequence[GradedGroup]) -> np.ndarray:
  """i32[P], the oldest version that sampled each group; `FOREIGN` if none of this run did."""
  return np.array([min(group.versions, default=FOREIGN) for group in groups], np.int32)


def split(
  batch: TrainBatch, *, draw: int = 0, samples: Sequence[dict[str, Any]] = ()
) -> list[GradedGroup]:
  """The groups of a batch, without versions and metrics."""
  arrays = {f"prompts.{name}": value for name, value in vars(batch.prompts).items()}
  arrays |= {name: value for name, value in vars(batch).items() if name != "prompts"}
  arrays = {name: np.asarray(value) for name, value in arrays.items() if value is not None}
  P = len(batch.tokens)
  sources = arrays.pop("sources", np.zeros(P, np.int32)).tolist()
  size = len(samples) // P
  return [
    GradedGroup(
      draw=draw,
      index=p,
      source=sources[p],
      versions={},
      arrays={name: np.asarray(array[p]) for name, array in arrays.items()},
      samples=[*samples[p * size : (p + 1) * size]],
      measured={},
    )
    for p in range(P)
  ]


def to_train_batch(groups: Sequence[GradedGroup]) -> TrainBatch:
  """The batch of these groups, with the arrays that a `TrainBatch` has; NumPy."""
  names = {field.name for field in dataclasses.fields(TrainBatch)}
  arrays = join(groups)
  prompts: Any = {name: arrays.pop(f"prompts.{name}") for name in ("tokens", "lengths")}
  fields: Any = {name: array for name, array in arrays.items() if name in names}
  sources: Any = np.array([group.source for group in groups], np.int32)
  return with_turn_scores(TrainBatch(prompts=Prompts(**prompts), sources=sources, **fields))


def write_batch(path: pathlib.Path, batch: TrainBatch) -> None:
  """Writes one batch as a file of groups; see `rollouts.group`."""
  with replace_file(path) as file:
    file.write(encode(split(batch), {}))


def read_batch(path: pathlib.Path) -> TrainBatch:
  """The inverse of `write_batch`; groups without a source have source 0.

  Raises:
    DamagedError, FormatError: see `group.decode`.
  """
  return to_train_batch(decode(path.read_bytes())[0])


def with_oldest_versions(versions: np.ndarray, rollouts: Rollouts) -> np.ndarray:
  """i32[P], the version of each group's oldest token, if tokens have versions of their own.

  Args:
    versions: i32[P], of groups when they began; the first ones are those of `rollouts`.
    rollouts: that were sampled.
  """
  of_tokens: Any = rollouts.token_versions
  if of_tokens is None:
    return versions
  oldest = np.where(of_tokens == FOREIGN, np.iinfo(np.int32).max, of_tokens).min(axis=(1, 2))
  oldest = np.where((of_tokens == FOREIGN).all(axis=(1, 2)), FOREIGN, oldest).astype(np.int32)
  return np.concatenate([oldest, versions[len(oldest) :]])


def sampled_places(rollouts: Rollouts) -> np.ndarray:
  """bool[P, G, T], the tokens of the policy, without those of an environment; NumPy."""
  places = np.arange(rollouts.tokens.shape[-1]) < np.asarray(rollouts.lengths)[..., None]
  return places if rollouts.turns is None else places & (np.asarray(rollouts.turns) % 2 == 0)


# --- arrays of batches ----------------------------------------------------------------------------


def join_batches(batches: Sequence[TrainBatch]) -> TrainBatch:
  """Concatenates the groups of several batches."""
  return jax.tree.map(lambda *x: np.concatenate(x), *batches)


def drop_scores(batch: TrainBatch) -> TrainBatch:
  """Drops the fields that only an update reads, so that scoring always has the same shapes."""
  batch = dataclasses.replace(batch, reference_logprobs=None, proximal_logprobs=None)
  return dataclasses.replace(
    batch,
    sampled_logprobs=None,
    turn_scores=None,
    lags=None,
    sources=None,
    token_versions=None,
  )


def solve_rates(batch: TrainBatch) -> np.ndarray:
  """f64[P], the share of correct among each group's valid rollouts; NaN without a valid one."""
  num_correct, num_valid = (x.sum(axis=1) for x in (batch.correct * batch.valid, batch.valid))
  return np.where(num_valid > 0, num_correct / np.maximum(num_valid, 1), np.nan)


def mean_solve_rate(batch: TrainBatch, versions: np.ndarray) -> np.ndarray:
  """f32[P], all equal: the policy's solve rate, the mean of `solve_rates` over groups.

  The mean is over the groups that this run sampled, or over all groups if it sampled none. Groups
  without a valid rollout do not count; NaN if no group counts.

  Args:
    versions: i32[P], `FOREIGN` for groups that this run did not sample.
  """
  from_this_run = versions != FOREIGN
  rates = solve_rates(batch)[from_this_run if from_this_run.any() else slice(None)]
  defined_rates = rates[~np.isnan(rates)]
  mean = defined_rates.mean() if defined_rates.size else np.nan
  return np.full(len(from_this_run), mean, np.float32)


def response_lengths(batch: TrainBatch) -> np.ndarray:
  """i32[P, G], the number of tokens up to the last one in the loss, an environment's included."""
  positions = np.arange(1, batch.mask.shape[-1] + 1)
  return np.max((batch.mask > 0) * positions, axis=-1)


def loss_tokens(batch: TrainBatch) -> np.ndarray:
  """i64[P, G], the number of tokens in the loss."""
  return np.asarray(np.asarray(batch.mask) > 0).sum(axis=-1)


def permute_rewards(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
  """Permutes rewards, and correctness with them, over valid rollouts; for control experiments.

  The distribution of rewards in the batch stays, but they no longer depend on the rollouts. Scores
  of turns, which belong to their tokens, are dropped.
  """
  order = rng.permutation(np.count_nonzero(batch.valid))

  def permute(x: Any) -> Any:
    permuted = np.array(x)
    permuted[batch.valid] = x[batch.valid][order]
    return permuted

  batch = dataclasses.replace(batch, rewards=permute(batch.rewards), correct=permute(batch.correct))
  return with_turn_scores(dataclasses.replace(batch, turn_scores=None))


def append_recorded(graded: Graded, recorded: Graded) -> Graded:
  """Appends recorded groups to a batch; the statistics remain those of the sampled groups."""
  # Fields that depend on the full batch are set later.
  batches = [
    dataclasses.replace(x.train, sources=None, solve_rate=None) for x in (graded, recorded)
  ]
  if any(batch.turns is not None for batch in batches):
    batches = [_with_turns(batch) for batch in batches]
  if graded.train.token_versions is not None:
    foreign: Any = np.full(np.shape(recorded.train.tokens), FOREIGN, np.int32)
    batches[1] = dataclasses.replace(batches[1], token_versions=foreign)
  return graded._replace(train=join_batches(batches), samples=graded.samples + recorded.samples)


def _with_turns(batch: TrainBatch) -> TrainBatch:
  """The batch; rollouts of one turn have that turn's number, and no score of it."""
  if batch.turns is None:
    turns: Any = np.zeros(np.shape(batch.tokens), np.int32)
    batch = dataclasses.replace(batch, turns=turns)
  return with_turn_scores(batch)


def with_turn_scores(batch: TrainBatch) -> TrainBatch:
  """The batch; dialogues whose turns have no scores say so by NaN."""
  if batch.turns is None or batch.turn_scores is not None:
    return batch
  scores: Any = np.full(np.shape(batch.tokens), np.nan, np.float32)
  return dataclasses.replace(batch, turn_scores=scores)
