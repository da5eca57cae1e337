"""The host's state, which a checkpoint has beside the train state and arrays of pending batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlvr_jax.rollouts.batches import Position
from rlvr_jax.storage.files import JSON, JsonObject


class HostState(NamedTuple):
  """The host's part of a run's state; JSON values, except `position`."""

  position: Position  # the state of drawing problems after the last complete batch
  counters: dict[str, float]  # totals of the run log
  evaluation: dict[str, float]  # values of the last evaluation
  evaluated: int  # number of updates before the last evaluation
  layout: dict[str, JSON]  # machine and layout, see `restore.describe_layout`
  fingerprints: dict[str, str]  # fingerprints of policies by version, see `Policies.state`
  scored_at: dict[str, int]  # see `Scorer.state`
  written: dict[str, Sequence[int]]  # records before this checkpoint, see `MetricWriter.written`

  def to_json(self) -> dict[str, JSON]:
    """JSON values for `Checkpointer.save`."""
    return self._asdict() | {"position": self.position._asdict()}

  @classmethod
  def from_json(cls, host: JsonObject) -> HostState:
    """The host's state from the JSON values of `to_json`."""
    fields = {name: host[name] for name in cls._fields}
    return cls(**fields | {"position": Position(**host["position"])})
