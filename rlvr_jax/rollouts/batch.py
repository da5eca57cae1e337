"""One batch of rollouts on its way from sampled to trained, and into a store and back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.types import Prompts, Rollouts, TrainBatch

FOREIGN = -1  # the version of rollouts that no policy of this run sampled


class Flight(NamedTuple):
  """Rollouts on their way: dispatched to the devices, then handed to the graders."""

  problems: Sequence[Any]
  prompts: Prompts  # NumPy
  rollouts: Any  # device arrays, of one source after the other; once they are waited for, NumPy
  completions: Sequence[str] = ()
  grades: Any = None  # a future of them; None until the graders have the completions


class Graded(NamedTuple):
  """What a batch holds once it is graded."""

  train: TrainBatch  # NumPy
  tokens: int  # sampled for it
  prompts: int  # sampled for it
  statistics: dict[str, float]  # outcome fractions, share of responses cut at the limit
  samples: list[dict[str, Any]]  # one JSON-able record per rollout, in order


@dataclasses.dataclass(kw_only=True)
class RolloutBatch:
  """A batch, from sampled to trained; what it has not come to yet is None.

  Attributes:
    number: from 0, in the order in which batches are sampled.
    version: updates behind the policy that was handed over for it.
    fingerprint: of that policy's parameters.
    versions: i32[P], of each group; `FOREIGN` where no policy of this run sampled it.
    after: state of the generator behind it; JSON.
    draws: batches of prompts sampled for it, more than one under dynamic sampling.
    flops: model FLOPs of generating it.
    timings: seconds by phase; none where it was read from a store.
    snapshot: the policy that samples it; until it is graded.
    recorded: its groups that come from a store; until it is graded.
    dispatched: seconds of the host's clock.
    flight: until it is graded; None, too, where all groups are recorded.
    graded: once it is graded; None, too, while it is in the store alone.
    reference_logprobs: f32[P, G, T], once an update needs them.
    proximal_logprobs: likewise.
    scored_at: update at which the latter were taken.
  """

  number: int
  version: int
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
  graded: Graded | None = None
  reference_logprobs: np.ndarray | None = None
  proximal_logprobs: np.ndarray | None = None
  scored_at: int | None = None


# --- into a store and back ------------------------------------------------------------------------

_INFO = ("version", "fingerprint", "draws", "flops", "after")
_INFO_OF_GRADED = ("tokens", "prompts", "statistics")


def to_shard(batch: RolloutBatch, **about: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """(arrays, JSON values) for `RolloutStore.append`, without the timings.

  Args:
    batch: graded.
    about: JSON values about the run, for those who read the store as an input.
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
  """The inverse of `to_shard`."""
  fields = dict(arrays)
  versions, samples = fields.pop("versions"), json.loads(fields.pop("samples").tobytes())
  train = batch_from_arrays(fields)
  graded = Graded(train=train, samples=samples, **{name: info[name] for name in _INFO_OF_GRADED})
  rest = {name: info[name] for name in _INFO}
  return RolloutBatch(number=number, versions=versions, graded=graded, **rest)


def batch_to_arrays(batch: TrainBatch) -> dict[str, Any]:
  """The arrays that are there by name; of the prompts, `prompts.tokens` and `prompts.lengths`."""
  prompts = {f"prompts.{name}": value for name, value in vars(batch.prompts).items()}
  return prompts | {k: v for k, v in vars(batch).items() if v is not None and k != "prompts"}


def batch_from_arrays(arrays: Mapping[str, Any]) -> TrainBatch:
  """The inverse of `batch_to_arrays`."""
  fields = dict(arrays)
  prompts = {name: fields.pop(f"prompts.{name}") for name in ("tokens", "lengths")}
  return TrainBatch(prompts=Prompts(**prompts), **fields)


def write_batch(path: str | os.PathLike[str], batch: TrainBatch) -> None:
  """One batch as .npz, an array per field."""
  np.savez(path, **batch_to_arrays(batch))


def read_batch(path: str | os.PathLike[str]) -> TrainBatch:
  """The inverse of `write_batch`."""
  with np.load(path) as file:
    return batch_from_arrays(dict(file))


# --- arrays of batches ----------------------------------------------------------------------------


def join(parts: Sequence[TrainBatch]) -> TrainBatch:
  """The groups of several batches as one."""
  return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def without_scores(batch: TrainBatch) -> TrainBatch:
  """Without what an update alone reads, so that every scoring has the same shapes."""
  return dataclasses.replace(
    batch, reference_logprobs=None, proximal_logprobs=None, lags=None, sources=None
  )


def response_lengths(batch: TrainBatch) -> np.ndarray:
  """i32[P, G], tokens up to the last that counts in the loss."""
  positions = np.arange(1, batch.mask.shape[-1] + 1)
  return np.max((batch.mask > 0) * positions, axis=-1)


def permute_rewards(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
  """Rewards, and correctness with them, shuffled over all rollouts: a control.

  The batch keeps its distribution of rewards, but they no longer say anything of the rollouts.
  """
  order = rng.permutation(batch.rewards.size)
  shuffle = lambda x: x.reshape(-1)[order].reshape(x.shape)
  return dataclasses.replace(batch, rewards=shuffle(batch.rewards), correct=shuffle(batch.correct))


def completion_texts(rollouts: Rollouts, decode: Any) -> list[str]:
  """The B responses as text, rollouts of a prompt adjacent; padding left out by length."""
  tokens = rollouts.tokens.reshape(-1, rollouts.tokens.shape[-1])
  lengths = rollouts.lengths.reshape(-1)
  return [decode(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True)]
