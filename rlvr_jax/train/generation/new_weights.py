"""Weights that change within responses: which policy samples the next burst of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from rlvr_jax.rollouts.batch import Flight, PolicySnapshot
from rlvr_jax.rollouts.serve import Group
from rlvr_jax.types import Params

# Of `config.fleet.new_weights`; what becomes of a response that newer weights find in a slot:
FINISH = "finish"  # ends with the weights that it began with
SWITCH = "switch"  # goes on under the newer ones, with the cache that the older ones have made
RECOMPUTE = "recompute"  # its cache is computed anew, then it goes on
CHOICES = (FINISH, SWITCH, RECOMPUTE)


class NewWeights(NamedTuple):
  """Where the newer weights of a stream come from."""

  newest: Callable[[], PolicySnapshot | None]  # None: there is none so far
  rebuilds: bool  # see `serve.ChangingWeights`


class Replayed(NamedTuple):
  """The weights of the batches of a recorded run."""

  policies: Mapping[int, PolicySnapshot]  # by version, all that the batches need
  token_versions: Callable[[int], np.ndarray]  # number of a draw → `RecordedRun.token_versions`
  rebuilds: bool  # see `serve.ChangingWeights`


class ReplayError(RuntimeError):
  """A recorded run does not repeat itself."""


class RecordedWeights:
  """Each token is sampled by the version that a recorded run has; see `serve.ChangingWeights`.

  Attributes:
    rebuilds: whether the caches of running rollouts are computed anew.
  """

  def __init__(
    self,
    replayed: Replayed,
    draw_of: Callable[[Flight], int],
    load: Callable[[PolicySnapshot], Params],
    use: Callable[[PolicySnapshot], None],
  ):
    """Loads nothing yet.

    Args:
      replayed: what was recorded, and its policies.
      draw_of: the number of the draw of prompts that a flight is of.
      load: the weights of a policy, from `EnginePrograms.load`.
      use: called with every policy before it samples.
    """
    self.rebuilds = replayed.rebuilds
    self._replayed, self._draw_of, self._load, self._use = replayed, draw_of, load, use
    self._loaded: dict[int, Params] = {}  # by version
    self._versions: dict[int, np.ndarray] = {}  # i32[P, G or 1, T or 1] by id of a flight

  def ask(self) -> None:
    """Nothing changes: what a token's version is was recorded."""

  def version(self, group: Group, rollout: int, length: int) -> int:
    """The version that has sampled this token.

    Raises:
      ReplayError: the recorded rollout has no such token.
    """
    flight = group.owner
    if id(flight) not in self._versions:
      self._versions[id(flight)] = self._replayed.token_versions(self._draw_of(flight))
    of_group = self._versions[id(flight)][group.prompt_index]
    g, t = (min(i, size - 1) for i, size in zip((rollout, length), of_group.shape, strict=True))
    version = int(of_group[g, t])
    if version not in self._replayed.policies:
      raise ReplayError(
        f"rollout {rollout} of group {group.prompt_index} in draw {self._draw_of(flight)} has no"
        f" token {length} in the recorded run, from which this one differs. Repeat it with its seed"
        " and configuration, on the same devices, with the same versions of this package and jax"
      )
    return version

  def params(self, version: int) -> Params:
    """The weights of a version."""
    if version not in self._loaded:
      policy = self._replayed.policies[version]
      self._use(policy)
      self._loaded[version] = self._load(policy)
    return self._loaded[version]


class NewestWeights:
  """The newest policy samples; see `serve.ChangingWeights`.

  Attributes:
    rebuilds: whether the caches of running rollouts are computed anew.
  """

  def __init__(
    self,
    new_weights: NewWeights,
    policy: PolicySnapshot,
    load: Callable[[PolicySnapshot], Params],
    use: Callable[[PolicySnapshot], None],
  ):
    """Loads the weights that the stream begins with.

    Args:
      new_weights: where newer ones come from.
      policy: that the stream begins with, unless there is a newer one.
      load: the weights of a policy, from `EnginePrograms.load`.
      use: called with every policy before it samples.
    """
    self.rebuilds = new_weights.rebuilds
    self._newest, self._load, self._use = new_weights.newest, load, use
    self._policy: PolicySnapshot | None = None
    self._params: Params = {}
    self._take(policy)

  def ask(self) -> None:
    """Takes the newest policy, if it is newer."""
    newest = self._newest()
    if newest is not None and self._policy is not None and newest.version > self._policy.version:
      self._take(newest)

  def version(self, group: Group, rollout: int, length: int) -> int:
    """The version of the newest policy that was taken, for all rollouts."""
    assert self._policy is not None  # one was taken at the start
    return self._policy.version

  def params(self, version: int) -> Params:
    """Its weights."""
    return self._params

  def _take(self, policy: PolicySnapshot) -> None:
    self._params = {}  # one copy at a time
    self._use(policy)
    self._policy, self._params = policy, self._load(policy)
