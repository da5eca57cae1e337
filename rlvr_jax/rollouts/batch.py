"""Training batches: made from groups, written to files, and stripped for scoring passes."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr_jax.rollouts.group import ARRAYS, Group, decode, empty, encode, join
from rlvr_jax.storage.files import replace_path
from rlvr_jax.types import Prompts, TrainBatch


def drop_scores(batch: TrainBatch) -> TrainBatch:
  """Drops the fields that only an update reads, so that scoring always has the same shapes."""
  batch = dataclasses.replace(batch, reference_logprobs=None, proximal_logprobs=None)
  return dataclasses.replace(
    batch,
    teacher_logprobs=None,
    teacher_entropy=None,
    teachers=None,
    sampled_logprobs=None,
    rewards_by_name=None,
    turn_scores=None,
    lags=None,
    sources=None,
    token_versions=None,
  )


def response_lengths(batch: TrainBatch) -> np.ndarray:
  """i64[P, G], number of tokens up to the last loss token, tokens of an environment included."""
  counts = np.asarray(batch.mask) > 0
  return np.where(counts.any(-1), counts.shape[-1] - np.argmax(counts[..., ::-1], axis=-1), 0)


def loss_tokens(batch: TrainBatch) -> np.ndarray:
  """i64[P, G], the number of loss tokens."""
  return np.asarray(np.sum(np.asarray(batch.mask) > 0, axis=-1))


def permute_rewards(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
  """Permutes rewards and correctness together over valid rollouts; for control experiments.

  The batch keeps its distribution of rewards, but the rewards no longer depend on the rollouts.
  Turn scores are dropped, since each score belongs to a token of its rollout.
  """
  order = rng.permutation(np.count_nonzero(batch.valid))

  def permute(x: Any) -> Any:
    permuted = np.array(x)
    permuted[batch.valid] = x[batch.valid][order]
    return permuted

  batch = dataclasses.replace(batch, rewards=permute(batch.rewards), correct=permute(batch.correct))
  if batch.rewards_by_name is not None:
    batch = dataclasses.replace(batch, rewards_by_name=permute(batch.rewards_by_name))
  turn_scores: Any = None
  if batch.turns is not None:
    turn_scores = np.full(np.shape(batch.tokens), np.nan, np.float32)
  return dataclasses.replace(batch, turn_scores=turn_scores)


# --- files of one batch ---------------------------------------------------------------------------


def write_batch(path: pathlib.Path, batch: TrainBatch) -> None:
  """Writes one batch as a file of groups; see `rollouts.group`."""
  arrays = {f"prompts.{name}": value for name, value in vars(batch.prompts).items()}
  arrays |= {name: x for name, x in vars(batch).items() if name in ARRAYS and x is not None}
  sources = np.zeros(len(batch.rewards), int) if batch.sources is None else batch.sources
  groups = [
    Group(0, p, int(source), {}, {name: np.asarray(x[p]) for name, x in arrays.items()}, [], {})
    for p, source in enumerate(sources)
  ]
  with replace_path(path) as temporary:
    temporary.write_bytes(encode(groups, {}))


def read_batch(path: pathlib.Path) -> TrainBatch:
  """Reads a batch that `write_batch` has written.

  Raises:
    DamagedError: the file is damaged.
    FormatError: the file has another format.
  """
  return train_batch(decode(path.read_bytes())[0])


def train_batch(groups: Sequence[Group]) -> TrainBatch:
  """The arrays of groups as an update's batch, in NumPy; a missing array is filled with padding."""
  arrays: dict[str, Any] = join(with_equal_names(groups))
  prompts = Prompts(arrays.pop("prompts.tokens"), arrays.pop("prompts.lengths"))
  sources: Any = np.array([group.source for group in groups], np.int32)
  known = {field.name for field in dataclasses.fields(TrainBatch)}
  fields: Any = {name: x for name, x in arrays.items() if name in known}
  return TrainBatch(prompts=prompts, sources=sources, **fields)


def with_equal_names(groups: Sequence[Group]) -> list[Group]:
  """The groups, now all with the same arrays: a missing array is added, filled with padding.

  So groups of one turn can be joined with dialogues, which have `turns`. Groups of another run's
  store, which lack `token_versions`, can be joined with groups that have this array.
  """
  having = {name: group for group in groups for name in group.arrays}
  return [
    group._replace(
      arrays=group.arrays | {name: empty(name, group, having[name]) for name in missing}
    )
    if (missing := having.keys() - group.arrays.keys())
    else group
    for group in groups
  ]
