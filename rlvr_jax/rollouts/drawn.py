"""A drawn batch: graded rollouts with their origin, and its way into a store and back."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.rollouts.collect import Graded, batch_from_arrays, batch_to_arrays
from rlvr_jax.rollouts.store import RolloutStore, StoreError
from rlvr_jax.types import Prompts

FOREIGN = -1  # the version of rollouts that no policy of this run drew


class Drawn(NamedTuple):
  """One batch of rollouts and where it comes from."""

  number: int  # of the batch, from 0
  version: int  # updates behind the policy that was handed over for it
  fingerprint: str  # of that policy's parameters
  graded: Graded
  versions: np.ndarray  # i32[P], of each group; FOREIGN where no policy of this run drew it
  draws: int  # batches of prompts drawn for it, more than one under dynamic sampling
  flops: float  # model FLOPs of generating it
  after: dict[str, Any]  # state of the generator once it is drawn
  timings: dict[str, float]  # seconds; none where it was read from a store


_FIELDS = ("version", "fingerprint", "draws", "flops", "after")
_OF_GRADED = ("tokens", "prompts", "statistics")


def to_shard(drawn: Drawn, **about: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """(arrays, JSON values) for `RolloutStore.append`, without the timings.

  Args:
    about: JSON values about the run, for those who read the store as an input.
  """
  samples = np.frombuffer(json.dumps(drawn.graded.samples).encode(), np.uint8)
  arrays = batch_to_arrays(drawn.graded.batch) | {"versions": drawn.versions, "samples": samples}
  info = {name: getattr(drawn, name) for name in _FIELDS}
  info |= {name: getattr(drawn.graded, name) for name in _OF_GRADED}
  return arrays, info | {"groups": len(drawn.versions)} | about


def from_shard(number: int, arrays: Mapping[str, np.ndarray], info: Mapping[str, Any]) -> Drawn:
  """The inverse of `to_shard`."""
  fields = dict(arrays)
  versions, samples = fields.pop("versions"), json.loads(fields.pop("samples").tobytes())
  batch = batch_from_arrays(fields)
  graded = Graded(batch, samples=samples, **{name: info[name] for name in _OF_GRADED})
  rest = {name: info[name] for name in _FIELDS}
  return Drawn(number=number, graded=graded, versions=versions, timings={}, **rest)


class RecordedGroups:
  """The groups of a store as a source of rollouts: in its order, over and over.

  Attributes:
    numbers: of the batches.
    truncated: whether top-k or top-p cut a distribution that they were drawn from.
    shaped: whether their rewards may be other than 0 and 1.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    numbers: Sequence[int] | None = None,
    tokenizer: str,
    pad_token: int,
    group_size: int,
    max_prompt_length: int,
    max_response_length: int,
  ):
    """Opens the store and checks that its rollouts can be trained on here.

    Args:
      directory: WORKDIR/rollouts of the run that drew them.
      numbers: of the batches to take; None takes those that are there now.
      tokenizer: name of the tokenizer whose tokens the rollouts must be.
      pad_token: fills what shorter prompts and responses leave.
      group_size: G.
      max_prompt_length, max_response_length: S and T, tokens; shorter ones are padded.
    Raises:
      StoreError: not a store, an empty one, or one of other shapes or tokens.
    """
    self._store = RolloutStore(directory, writable=False)
    self._pad_token = pad_token
    self._lengths = (max_prompt_length, max_response_length)
    there = self._store.numbers()
    if not there:
      raise StoreError(f"the store {directory} holds no rollouts: let the run that fills it begin")
    self.numbers = there if numbers is None else list(numbers)
    if gone := sorted(set(self.numbers) - set(there)):
      raise StoreError(f"the store {directory} has lost the batches {gone}; put them back")
    infos = [self._store.info(number) for number in self.numbers]
    self.truncated = any(info["truncated"] for info in infos)
    self.shaped = any(info["shaped"] for info in infos)
    self._ends = list(itertools.accumulate(info["groups"] for info in infos))
    self._read: tuple[int, Graded] | None = None  # the shard read last
    wanted = {"tokenizer": tokenizer, "group_size": group_size}
    for name, value in wanted.items():
      found = sorted({info[name] for info in infos})
      if found != [value]:
        raise StoreError(
          f"the store {directory} has rollouts of {name} = {found}, this run has {value!r}: set it"
          " to what the store has, or choose another store"
        )
    limits = dict(max_prompt_length=max_prompt_length, max_response_length=max_response_length)
    for name, limit in limits.items():
      longest = max(info[name] for info in infos)
      if longest > limit:
        raise StoreError(
          f"the store {directory} has {name} = {longest}, this run {limit}: raise config.{name} to"
          f" {longest}"
        )

  def __len__(self) -> int:
    """Groups in the store when it was opened."""
    return self._ends[-1]

  def take(self, start: int, count: int) -> Graded:
    """Groups start, start + 1, …, beginning again at the end.

    Raises:
      TornShardError: one of them is in a shard that is damaged.
    """
    rows = [self._row(index % len(self)) for index in range(start, start + count)]
    batch = jax.tree.map(lambda *x: np.stack(x), *[row.batch for row in rows])
    samples = [sample for row in rows for sample in row.samples]
    return Graded(batch, tokens=0, prompts=0, statistics={}, samples=samples)

  def _row(self, index: int) -> Graded:
    """One group, its arrays without the axis of the prompts."""
    shard = bisect.bisect_right(self._ends, index)
    if self._read is None or self._read[0] != shard:
      number = self.numbers[shard]
      drawn = from_shard(number, *self._store.read(number))
      self._read = (shard, drawn.graded)
    graded = self._read[1]
    batch = graded.batch
    size = batch.rewards.shape[1]
    row = index - (self._ends[shard] - len(batch.rewards))
    group = jax.tree.map(lambda x: x[row], batch)
    S, T = self._lengths
    left = S - batch.prompts.tokens.shape[1]
    right = [(0, 0), (0, T - batch.tokens.shape[2])]
    tokens: Any = np.pad(group.prompts.tokens, (left, 0), constant_values=self._pad_token)
    padded = dataclasses.replace(
      group,
      prompts=Prompts(tokens=tokens, lengths=group.prompts.lengths),
      tokens=np.pad(group.tokens, right, constant_values=self._pad_token),
      mask=np.pad(group.mask, right),
      behavior_logprobs=np.pad(group.behavior_logprobs, right),
    )
    samples = graded.samples[row * size : (row + 1) * size]
    return Graded(padded, tokens=0, prompts=0, statistics={}, samples=samples)
