"""One batch of rollouts, from sampled to trained, and its conversion to and from a store."""

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
from rlvr_jax.rollouts.engine import Group, Request, joined
from rlvr_jax.rollouts.shards import StoreError, make_shard, read_shard, write_shard
from rlvr_jax.storage.files import replacing_path
from rlvr_jax.types import Params, Prompts, Rollouts, TrainBatch

FOREIGN = -1  # version of rollouts that were not sampled by a policy of this run
Submission = Any  # what the graders' `submit` returns: in one process a future of grades


class PolicySnapshot(NamedTuple):
  """A policy whose weights were synced for sampling rollouts."""

  params: Params  # the trained parameters
  version: int  # its number of updates
  fingerprint: Callable[[], str]  # of its parameters; waits for them to be computed
  of_source: tuple[tuple[Params, Params], ...]  # (trained, frozen) that each source samples with


@dataclasses.dataclass
class Flight:
  """Rollouts in progress: each group is submitted to the graders as soon as it is sampled."""

  problems: Sequence[Problem]  # P
  prompts: Prompts  # NumPy
  groups: dict[int, Group] = dataclasses.field(default_factory=dict)  # by index of the problem
  texts: dict[int, list[str]] = dataclasses.field(default_factory=dict)  # of the responses
  grades: dict[int, Submission] = dataclasses.field(default_factory=dict)

  def add(self, group: Group, texts: list[str], grades: Submission) -> None:
    """Adds a sampled group, whose texts have been submitted to the graders."""
    self.groups[group.prompt_index] = group
    self.texts[group.prompt_index] = texts
    self.grades[group.prompt_index] = grades

  @property
  def sampled(self) -> bool:
    """Whether all groups are."""
    return len(self.groups) == len(self.problems)

  @functools.cached_property
  def all_grades(self) -> Future[None]:
    """A future that is done when all grades are; of a batch that is sampled, in one process."""
    return when_all(self.grades.values())

  @functools.cached_property
  def rollouts(self) -> Rollouts:
    """Of all groups; NumPy."""
    return joined([self.groups[index] for index in range(len(self.problems))])


def when_all(futures: Iterable[Future]) -> Future[None]:
  """A future that is done when all others are; its result is None."""
  waiting, lock = [*futures], threading.Lock()
  combined: Future[None] = Future()

  def check(_: Future) -> None:
    with lock:
      if not combined.done() and all(future.done() for future in waiting):
        combined.set_result(None)

  for future in waiting:
    future.add_done_callback(check)
  return combined


class Graded(NamedTuple):
  """The contents of a graded batch."""

  train: TrainBatch  # NumPy
  tokens: int  # sampled for this batch, rollouts that were dropped included
  prompts: int  # sampled for this batch, prompts that were dropped included
  statistics: dict[str, float]  # fraction of each outcome and of truncated responses
  samples: list[dict[str, Any]]  # one JSON-serializable record per rollout, in order


class Position(NamedTuple):
  """Where generation stands between two batches: what determines the next ones."""

  number: int  # of the next batch
  draws: int  # batches of prompts drawn so far
  checked_version: int  # policy whose log-probabilities were last compared; −1: none
  problems: dict[str, Any]  # state of the problems' order; JSON


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchInFlight:
  """A batch that is being sampled and graded.

  Attributes:
    number: from 0, in the order in which batches are sampled.
    draw: number of the batch of prompts it is sampled from, from 0.
    snapshot: the policy that samples it.
    versions: i32[P], version per group; `FOREIGN` for groups that this run does not sample.
    position: of the generator after this batch was started.
    dispatched: time of dispatch, seconds on the host's clock.
    flight: its rollouts in progress; None if all groups are recorded.
    requests: for every source, those of its groups that are to be sampled.
    recorded: its groups that come from a store; None without them.
    timings: seconds by phase, once it is sampled.
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

  @property
  def sampled(self) -> bool:
    """Whether it has all of its groups."""
    return self.flight is None or self.flight.sampled


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutBatch:
  """A graded batch, until its last update.

  Attributes:
    number: from 0, in the order in which batches are sampled.
    version: number of updates of the policy whose weights were synced to sample it.
    fingerprint: of that policy's parameters.
    versions: i32[P], version per group; None while they are only in the store.
    position: of the generator after this batch; None if it is in a checkpoint.
    draws: batches of prompts sampled for it, more than one under dynamic sampling.
    flops: model FLOPs of generating it.
    timings: seconds by phase; empty if the batch was read from a store.
    graded: its contents; None while they are only in the store.
    reference_logprobs: f32[P, G, T]; None until an update needs them.
    proximal_logprobs: f32[P, G, T]; None until an update needs them.
    scored_at: update at which `proximal_logprobs` were computed.
  """

  number: int
  version: int
  fingerprint: str | None = None
  versions: np.ndarray | None = None
  position: Position | None = None
  draws: int = 1
  flops: float = 0.0
  timings: Mapping[str, float] = dataclasses.field(default_factory=dict)
  graded: Graded | None = None
  reference_logprobs: np.ndarray | None = None
  proximal_logprobs: np.ndarray | None = None
  scored_at: int | None = None


def grades_of(batch: BatchInFlight) -> Future[None] | None:
  """A future that is done when a batch's grades are; None if there are none, or several processes.

  Several processes must act in the same order, so they cannot depend on when grades arrive.
  """
  if batch.flight is None or jax.process_count() > 1:
    return None
  return batch.flight.all_grades


def may_finish(sampled: Sequence[BatchInFlight]) -> bool:
  """Whether the first batch has its grades; with several processes, whether it is time to wait."""
  until = grades_of(sampled[0])
  return len(sampled) > 1 if until is None else until.done()


# --- to and from a store --------------------------------------------------------------------------

_INFO = ("version", "fingerprint", "draws", "flops")
_INFO_OF_GRADED = ("tokens", "prompts", "statistics")


def to_shard(
  batch: RolloutBatch, **about: Any
) -> tuple[dict[str, np.ndarray], dict[str, Any], list[dict[str, Any]]]:
  """(arrays, JSON values, samples) for `RolloutStore.append`, without the timings.

  Args:
    batch: a graded batch.
    about: JSON values about the run, for runs that use the store as an input.
  """
  graded = batch.graded
  assert graded is not None and batch.versions is not None and batch.position is not None
  arrays = batch_to_arrays(graded.train) | {"versions": batch.versions}
  info = {name: getattr(batch, name) for name in _INFO}
  info |= {name: getattr(graded, name) for name in _INFO_OF_GRADED}
  info |= {"after": batch.position._asdict(), "groups": len(batch.versions)}
  return arrays, info | about, graded.samples


def from_shard(
  number: int,
  arrays: Mapping[str, np.ndarray],
  info: Mapping[str, Any],
  samples: list[dict[str, Any]],
) -> RolloutBatch:
  """The inverse of `to_shard`."""
  fields = dict(arrays)
  versions = fields.pop("versions")
  train = batch_from_arrays(fields)
  graded = Graded(train=train, samples=samples, **{name: info[name] for name in _INFO_OF_GRADED})
  position = Position(**info["after"])
  rest = {name: info[name] for name in _INFO}
  return RolloutBatch(number=number, versions=versions, position=position, graded=graded, **rest)


def batch_to_arrays(batch: TrainBatch) -> dict[str, np.ndarray]:
  """Name → array for the fields that are not None, with `prompts.tokens` and `prompts.lengths`."""
  fields = {f"prompts.{name}": value for name, value in vars(batch.prompts).items()}
  fields |= {name: value for name, value in vars(batch).items() if name != "prompts"}
  return {name: np.asarray(value) for name, value in fields.items() if value is not None}


def batch_from_arrays(arrays: Mapping[str, np.ndarray]) -> TrainBatch:
  """The inverse of `batch_to_arrays`.

  Raises:
    StoreError: there is an array that a batch of this version does not have.
  """
  fields: dict[str, Any] = dict(arrays)
  prompts = {name: fields.pop(f"prompts.{name}") for name in ("tokens", "lengths")}
  if unknown := fields.keys() - {field.name for field in dataclasses.fields(TrainBatch)}:
    raise StoreError(
      f"the rollouts have the arrays {sorted(unknown)}, which this version of rlvr_jax does not"
      " know; use the version that wrote them"
    )
  return TrainBatch(prompts=Prompts(**prompts), **fields)


def write_batch(path: pathlib.Path, batch: TrainBatch) -> None:
  """Writes one batch as a shard; see `rollouts.shards`."""
  shard = make_shard(0, batch_to_arrays(batch), info={})
  with replacing_path(path) as temporary:
    write_shard(temporary, shard)


def read_batch(path: pathlib.Path) -> TrainBatch:
  """The inverse of `write_batch`."""
  return batch_from_arrays(read_shard(path, 0).arrays)


# --- arrays of batches ----------------------------------------------------------------------------


def join(parts: Sequence[TrainBatch]) -> TrainBatch:
  """Concatenates the groups of several batches."""
  return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def without_scores(batch: TrainBatch) -> TrainBatch:
  """Without the fields that only an update reads, so that every scoring has the same shapes."""
  batch = dataclasses.replace(batch, reference_logprobs=None, proximal_logprobs=None)
  return dataclasses.replace(batch, sampled_logprobs=None, lags=None, sources=None)


def solve_rates(batch: TrainBatch) -> np.ndarray:
  """f64[P], the share of correct among each group's valid rollouts; NaN in a group without any."""
  right, graded = (x.sum(axis=1) for x in (batch.correct * batch.valid, batch.valid))
  return np.where(graded > 0, right / np.maximum(graded, 1), np.nan)


def solve_rate(batch: TrainBatch, versions: np.ndarray) -> Any:
  """f32[P], all equal: the policy's solve rate, a mean over groups of `solve_rates`.

  Over the groups that policies of this run sampled, and over all where there are none. Groups
  without a valid rollout do not count; NaN if no other is left.

  Args:
    versions: i32[P], `FOREIGN` for groups that this run did not sample.
  """
  own = versions != FOREIGN
  rates = solve_rates(batch)[own if own.any() else slice(None)]
  known = rates[~np.isnan(rates)]
  return np.full(len(own), known.mean() if known.size else np.nan, np.float32)


def response_lengths(batch: TrainBatch) -> np.ndarray:
  """i32[P, G], number of tokens up to the last one in the loss."""
  positions = np.arange(1, batch.mask.shape[-1] + 1)
  return np.max((batch.mask > 0) * positions, axis=-1)


def permute_rewards(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
  """Shuffles rewards, and correctness with them, over valid rollouts; for control experiments.

  The batch keeps its distribution of rewards, but they no longer depend on the rollouts.
  """
  order = rng.permutation(np.count_nonzero(batch.valid))

  def shuffle(x: Any) -> Any:
    shuffled = np.array(x)
    shuffled[batch.valid] = x[batch.valid][order]
    return shuffled

  return dataclasses.replace(batch, rewards=shuffle(batch.rewards), correct=shuffle(batch.correct))


def with_recorded(graded: Graded, recorded: Graded) -> Graded:
  """Appends recorded groups to a batch; the statistics remain those of the sampled groups."""
  # Fields that depend on the full batch are set later.
  parts = [
    dataclasses.replace(part.train, sources=None, solve_rate=None) for part in (graded, recorded)
  ]
  return graded._replace(train=join(parts), samples=graded.samples + recorded.samples)
