"""One batch of rollouts, from sampled to trained, and its conversion to and from a store."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.rollouts.scheduler import Group, Request, joined
from rlvr_jax.rollouts.shards import StoreError
from rlvr_jax.types import Prompts, Rollouts, TrainBatch

FOREIGN = -1  # version of rollouts that were not sampled by a policy of this run


@dataclasses.dataclass
class Flight:
  """Rollouts in progress: each group is submitted to the graders as soon as it is sampled."""

  problems: Sequence[Any]  # P
  prompts: Prompts  # NumPy
  groups: dict[int, Group] = dataclasses.field(default_factory=dict)  # by index of the problem
  texts: dict[int, list[str]] = dataclasses.field(default_factory=dict)  # of the responses
  grades: dict[int, Any] = dataclasses.field(default_factory=dict)  # their futures
  all_grades: Future | None = None  # done when all of them are; see `when_all`

  @property
  def sampled(self) -> bool:
    """Whether all groups are."""
    return len(self.groups) == len(self.problems)

  @functools.cached_property
  def rollouts(self) -> Rollouts:
    """Of all groups; NumPy."""
    return joined([self.groups[index] for index in range(len(self.problems))])


def when_all(futures: Iterable[Future]) -> Future:
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


@dataclasses.dataclass(kw_only=True)
class RolloutBatch:
  """A batch, from sampled to trained; fields of a later state are None until then.

  Attributes:
    number: from 0, in the order in which batches are sampled.
    draw: number of the batch of prompts it was sampled from, from 0.
    version: number of updates of the policy whose weights were synced to sample it.
    fingerprint: of that policy's parameters.
    versions: i32[P], version per group; `FOREIGN` for groups that this run did not sample.
    after: state of the generator after this batch; JSON.
    draws: batches of prompts sampled for it, more than one under dynamic sampling.
    flops: model FLOPs of generating it.
    timings: seconds by phase; empty if the batch was read from a store.
    snapshot: the policy that samples it; None once it is graded.
    recorded: its groups that come from a store; None once it is graded.
    dispatched: time of dispatch, seconds on the host's clock.
    flight: its rollouts in progress; None once it is graded, or if all groups are recorded.
    requests: for every source, those of its groups that are to be sampled.
    graded: its contents; None until it is graded, and while they are only in the store.
    reference_logprobs: f32[P, G, T]; None until an update needs them.
    proximal_logprobs: f32[P, G, T]; None until an update needs them.
    scored_at: update at which `proximal_logprobs` were computed.
  """

  number: int
  version: int
  draw: int = 0
  fingerprint: str | None = None
  versions: np.ndarray | None = None
  after: dict[str, Any] = dataclasses.field(default_factory=dict)
  draws: int = 1
  flops: float = 0.0
  timings: dict[str, float] = dataclasses.field(default_factory=dict)
  snapshot: Any = None
  recorded: Graded | None = None
  dispatched: float = 0.0
  flight: Flight | None = None
  requests: Sequence[Sequence[Request]] = ()
  graded: Graded | None = None
  reference_logprobs: np.ndarray | None = None
  proximal_logprobs: np.ndarray | None = None
  scored_at: int | None = None


def grades_of(batch: RolloutBatch) -> Future | None:
  """A future that is done when a batch's grades are; None if there are none, or several processes.

  Several processes must act in the same order, so they cannot depend on when grades arrive.
  """
  if batch.flight is None or jax.process_count() > 1:
    return None
  if batch.flight.all_grades is None:
    batch.flight.all_grades = when_all(batch.flight.grades.values())
  return batch.flight.all_grades


def may_finish(sampled: Sequence[RolloutBatch]) -> bool:
  """Whether the first batch has its grades; with several processes, whether it is time to wait."""
  until = grades_of(sampled[0])
  return len(sampled) > 1 if until is None else until.done()


# --- to and from a store --------------------------------------------------------------------------

_INFO = ("version", "fingerprint", "draws", "flops", "after")
_INFO_OF_GRADED = ("tokens", "prompts", "statistics")


def to_shard(batch: RolloutBatch, **about: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """(arrays, JSON values) for `RolloutStore.append`, without the timings.

  Args:
    batch: a graded batch.
    about: JSON values about the run, for runs that use the store as an input.
  """
  graded = batch.graded
  assert graded is not None and batch.versions is not None
  samples = np.frombuffer(json.dumps(graded.samples).encode(), np.uint8)
  arrays = batch_to_arrays(graded.train) | {"versions": batch.versions, "samples": samples}
  info = {name: getattr(batch, name) for name in _INFO}
  info |= {name: getattr(graded, name) for name in _INFO_OF_GRADED}
  return arrays, info | {"groups": len(batch.versions)} | about


def from_shard(
  number: int, arrays: Mapping[str, np.ndarray], info: Mapping[str, Any]
) -> RolloutBatch:
  """The inverse of `to_shard`.

  Raises:
    StoreError: an earlier version wrote the batch, which does not say which rollouts have a grade.
  """
  fields = dict(arrays)
  if "valid" not in fields:
    fields["valid"] = _valid_before(f"batch {number} of the store", fields["mask"])
  versions, samples = fields.pop("versions"), json.loads(fields.pop("samples").tobytes())
  train = batch_from_arrays(fields)
  graded = Graded(train=train, samples=samples, **{name: info[name] for name in _INFO_OF_GRADED})
  rest = {name: info[name] for name in _INFO}
  return RolloutBatch(number=number, versions=versions, graded=graded, **rest)


def _valid_before(what: str, mask: np.ndarray) -> np.ndarray:
  """bool[P, G], which rollouts are valid, for a batch of a version that did not record it.

  A rollout with a token in the loss is. One without was too long, or had no grade and its group's
  mean as a reward: which of the two is not known.

  Raises:
    StoreError: there is a rollout without a token in the loss.
  """
  valid = np.any(mask > 0, axis=-1)
  if not valid.all():
    raise StoreError(
      f"{what} was written by a version of rlvr_jax that did not record which rollouts have a"
      f" grade, and {np.sum(~valid)} of its rollouts are not in the loss; read it with that version"
      " (before 'valid' in rlvr_jax/types.py), or sample it again in another --workdir"
    )
  return valid


def batch_to_arrays(batch: TrainBatch) -> dict[str, Any]:
  """Name → array for the fields that are not None, with `prompts.tokens` and `prompts.lengths`."""
  prompts = {f"prompts.{name}": value for name, value in vars(batch.prompts).items()}
  return prompts | {k: v for k, v in vars(batch).items() if v is not None and k != "prompts"}


def batch_from_arrays(arrays: Mapping[str, Any]) -> TrainBatch:
  """The inverse of `batch_to_arrays`."""
  fields = dict(arrays)
  prompts = {name: fields.pop(f"prompts.{name}") for name in ("tokens", "lengths")}
  return TrainBatch(prompts=Prompts(**prompts), **fields)


def write_batch(path: str | os.PathLike[str], batch: TrainBatch) -> None:
  """Writes one batch as an .npz file, with one array per field."""
  np.savez(path, **batch_to_arrays(batch))


def read_batch(path: str | os.PathLike[str]) -> TrainBatch:
  """The inverse of `write_batch`."""
  with np.load(path) as file:
    arrays = dict(file)
  arrays.setdefault("valid", _valid_before(f"the batch {path}", arrays["mask"]))
  return batch_from_arrays(arrays)


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
