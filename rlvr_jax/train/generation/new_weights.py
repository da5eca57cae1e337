"""Weights that change within responses: which policy samples the next burst of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlvr_jax.rollouts.batch import PolicySnapshot
from rlvr_jax.rollouts.engine import Group
from rlvr_jax.types import Params

# Of `config.fleet.new_weights`; what becomes of a response that newer weights find in a slot:
FINISH = "finish"  # ends with the weights that it began with
SWITCH = "switch"  # goes on under the newer ones, with the cache that the older ones have made
RECOMPUTE = "recompute"  # its cache is computed anew, then it goes on
CHOICES = (FINISH, SWITCH, RECOMPUTE)


class NewWeights(NamedTuple):
  """Where the newer weights of a stream come from."""

  newest: Callable[[], PolicySnapshot | None]  # None: there is none so far
  rebuilds: bool  # see `engine.ChangingWeights`


class NewestWeights:
  """The newest policy samples; see `engine.ChangingWeights`.

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
      load: the weights of a policy, from `Engine.load`.
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
