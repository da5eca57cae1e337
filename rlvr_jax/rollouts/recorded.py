"""A source of rollouts: the recorded groups of another run's store."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.rollouts.batch import Graded, from_shard
from rlvr_jax.rollouts.store import RolloutStore, StoreError
from rlvr_jax.types import Prompts


class _Form(NamedTuple):
  """What groups are made to have."""

  pad_token: int
  prompt_length: int  # S
  response_length: int  # T
  has_routes: bool


class RecordedGroups:
  """The groups of a store, in order, starting again after the last one.

  Attributes:
    numbers: of the batches.
    truncated: whether top-k, top-p or min-p truncated a distribution that sampled them.
    shaped: whether rewards may differ from 0 and 1.
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
    routes: tuple[int, ...] | None = None,
  ):
    """Opens the store and checks that this run can train on its rollouts.

    Args:
      directory: WORKDIR/rollouts of the run that sampled them.
      numbers: of the batches to use; None for all that the store has now.
      tokenizer: name of the tokenizer that the rollouts must have been encoded with.
      pad_token: pads shorter prompts and responses.
      group_size: G.
      max_prompt_length, max_response_length: S and T, tokens; shorter ones are padded.
      routes: (layers, experts, experts per token) of the mixture whose routes the rollouts must
        have; None: they are taken without routes.
    Raises:
      StoreError: the folder is not a store, the store is empty, or its shapes or tokenizer differ.
    """
    self._store = RolloutStore(directory, writable=False)
    self._form = _Form(pad_token, max_prompt_length, max_response_length, routes is not None)
    stored_numbers = self._store.numbers()
    if not stored_numbers:
      raise StoreError(f"the store {directory} is empty: wait until its run has sampled a batch")
    self.numbers = stored_numbers if numbers is None else list(numbers)
    if missing := sorted(set(self.numbers) - set(stored_numbers)):
      raise StoreError(f"the store {directory} has lost the batches {missing}; put them back")
    infos = [self._store.info(number) for number in self.numbers]
    self.truncated = any(info["truncated"] for info in infos)
    self.shaped = any(info["shaped"] for info in infos)
    self._ends = list(itertools.accumulate(info["groups"] for info in infos))
    self._last_read: tuple[int, Graded] | None = None  # (index in `numbers`, its batch)
    expected = {"tokenizer": tokenizer, "group_size": group_size}
    for name, value in expected.items():
      stored_values = sorted({info[name] for info in infos})
      if stored_values != [value]:
        raise StoreError(
          f"the store {directory} has rollouts of {name} = {stored_values}, this run has {value!r}:"
          " set it to what the store has, or choose another store"
        )
    stored_routes = {tuple(info["routes"]) if "routes" in info else None for info in infos}
    if routes is not None and stored_routes != {routes}:
      raise StoreError(
        f"the store {directory} has {_name_routes(stored_routes)}, this run needs"
        f" {_name_routes({routes})}: set config.model.routing = 'recomputed' and record_routes ="
        " False, or choose another store"
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
    """Number of groups of the batches in `numbers`."""
    return self._ends[-1]

  def take(self, start: int, count: int) -> Graded:
    """Reads the groups start, …, start + count − 1, modulo the number of groups.

    Raises:
      TornShardError: the shard of a group is damaged.
    """
    groups = [self._read_group(index % len(self)) for index in range(start, start + count)]
    batch = jax.tree.map(lambda *x: np.stack(x), *[group.train for group in groups])
    samples = [sample for group in groups for sample in group.samples]
    return Graded(batch, tokens=0, prompts=0, statistics={}, samples=samples)

  def _read_group(self, index: int) -> Graded:
    """Reads one group, padded; its arrays have no prompt axis."""
    shard = bisect.bisect_right(self._ends, index)
    if self._last_read is None or self._last_read[0] != shard:
      number = self.numbers[shard]
      graded = from_shard(number, *self._store.read(number)).graded
      assert graded is not None  # a store has graded batches only
      self._last_read = (shard, graded)
    graded = self._last_read[1]
    batch = graded.train
    size = batch.rewards.shape[1]
    row = index - (self._ends[shard] - len(batch.rewards))
    group = jax.tree.map(lambda x: x[row], batch)
    pad_token, S, T, has_routes = self._form
    left = S - batch.prompts.tokens.shape[1]
    right = [(0, 0), (0, T - batch.tokens.shape[2])]
    of_token = [(0, 0)] * 2  # of routes: layers, experts
    tokens: Any = np.pad(group.prompts.tokens, (left, 0), constant_values=pad_token)
    sampled = group.sampled_logprobs
    behavior_logprobs = group.behavior_logprobs if sampled is None else sampled
    padded = dataclasses.replace(
      group,
      prompts=Prompts(tokens=tokens, lengths=group.prompts.lengths),
      tokens=np.pad(group.tokens, right, constant_values=pad_token),
      mask=np.pad(group.mask, right),
      behavior_logprobs=np.pad(behavior_logprobs, right),
      sampled_logprobs=None,
      token_versions=None,  # of another run's policies
      turns=None if group.turns is None else np.pad(group.turns, right),
      turn_scores=None
      if group.turn_scores is None
      else np.pad(group.turn_scores, right, constant_values=np.nan),
      routes=np.pad(group.routes, [*right, *of_token]) if has_routes else None,
      prompt_routes=np.pad(group.prompt_routes, [(left, 0), *of_token]) if has_routes else None,
    )
    samples = graded.samples[row * size : (row + 1) * size]
    return Graded(padded, tokens=0, prompts=0, statistics={}, samples=samples)


def _name_routes(kinds: set[tuple[int, ...] | None]) -> str:
  """Names the routes of rollouts by the mixtures that chose them."""
  name = "routes of {0} layers with {2} of {1} experts per token".format
  return " and ".join(
    "no routes" if kind is None else name(*kind) for kind in sorted(kinds, key=str)
  )
