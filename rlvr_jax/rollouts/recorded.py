"""A source of rollouts: the recorded groups of another run's store."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Sequence

from rlvr_jax.rollouts.group import Group, pad
from rlvr_jax.rollouts.store import RolloutStore, StoreError

# Arrays that have a meaning only in the run that recorded them.
_OF_ITS_RUN = ("sampled_logprobs", "token_versions", "solve_rate")


class RecordedGroups:
  """The groups of a store, in order; after the last group comes the first group again.

  Attributes:
    numbers: the numbers of the batches.
    truncated: whether top-k, top-p or min-p truncated the distribution of any of the batches.
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
      directory: WORKDIR/rollouts of the run that sampled the groups.
      numbers: the numbers of the batches to use; None for all batches in the store at present.
      tokenizer: name of the tokenizer that the rollouts must have been encoded with.
      pad_token: the token that pads shorter prompts and responses.
      group_size: G.
      max_prompt_length, max_response_length: S and T, tokens, to which groups are padded.
      routes: (layers, experts, experts per token) of the mixture whose routes the rollouts must
        have; None: recorded routes are dropped.
    Raises:
      StoreError: the folder is not a store; the store is empty or lacks one of the batches; or the
        rollouts have another tokenizer, group size or mixture, or larger limits on their lengths.
    """
    self._store = RolloutStore(directory, writable=False)
    self._sizes = {"S": max_prompt_length, "T": max_response_length, "pad_token": pad_token}
    self._has_routes = routes is not None
    stored_numbers = self._store.numbers()
    if not stored_numbers:
      raise StoreError(f"the store {directory} is empty: wait until its run has sampled a batch")
    self.numbers = stored_numbers if numbers is None else list(numbers)
    if missing := sorted(set(self.numbers) - set(stored_numbers)):
      raise StoreError(f"the store {directory} has lost the batches {missing}; restore their files")
    infos = [self._store.info(number) for number in self.numbers]
    self.truncated = any(info["truncated"] for info in infos)
    self.shaped = any(info["shaped"] for info in infos)
    self._ends: list[int] = list(itertools.accumulate(info["groups"] for info in infos))
    self._last_read: tuple[int, list[Group]] = -1, []  # index in `numbers`, and its groups
    expected = {"tokenizer": tokenizer, "group_size": group_size}
    for name, value in expected.items():
      stored_values = sorted({info[name] for info in infos})
      if stored_values != [value]:
        raise StoreError(
          f"the rollouts in the store {directory} have {name} = {stored_values}, but this run has"
          f" {name} = {value!r}: set this run's value to the store's, or choose another store"
        )
    stored_routes = {tuple(info["routes"]) if "routes" in info else None for info in infos}
    if routes is not None and stored_routes != {routes}:
      raise StoreError(
        f"the store {directory} has {_name_routes(stored_routes)}, but this run needs"
        f" {_name_routes({routes})}: set config.model.routing = 'recomputed' and"
        " config.model.record_routes = False, or choose another store"
      )
    limits = dict(max_prompt_length=max_prompt_length, max_response_length=max_response_length)
    for name, limit in limits.items():
      longest = max(info[name] for info in infos)
      if longest > limit:
        raise StoreError(
          f"the rollouts in the store {directory} have {name} = {longest}, but this run has only"
          f" {name} = {limit}: raise config.{name} to {longest}"
        )

  def __len__(self) -> int:
    """Number of groups of the batches in `numbers`."""
    return self._ends[-1]

  def take(self, start: int, count: int) -> list[Group]:
    """Reads the groups start, …, start + count − 1, modulo the number of groups.

    Raises:
      TornShardError: the file of a group is damaged.
    """
    return [self._read(index % len(self)) for index in range(start, start + count)]

  def _read(self, index: int) -> Group:
    """One group, padded for this run, without versions, since no policy of this run sampled it."""
    file = bisect.bisect_right(self._ends, index)
    if self._last_read[0] != file:
      self._last_read = file, self._store.read(self.numbers[file])[0]
    groups = self._last_read[1]
    group = groups[index - (self._ends[file] - len(groups))]
    arrays = dict(group.arrays)
    if "sampled_logprobs" in arrays:
      arrays["behavior_logprobs"] = arrays["sampled_logprobs"]
    for name in _OF_ITS_RUN if self._has_routes else (*_OF_ITS_RUN, "routes", "prompt_routes"):
      arrays.pop(name, None)
    return group._replace(versions={}, arrays=pad(arrays, **self._sizes), measured={})


def _name_routes(kinds: set[tuple[int, ...] | None]) -> str:
  """Describes recorded routes by the sizes of the mixtures that chose the experts."""
  name = "routes of {0} layers with {2} of {1} experts per token".format
  return " and ".join(
    "no routes" if kind is None else name(*kind) for kind in sorted(kinds, key=str)
  )
