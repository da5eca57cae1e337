"""The policies that sample a batch: the trained policy, and other policies for some groups."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

from rlvr_jax.ops.logprobs import is_truncated
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.recorded import RecordedGroups
from rlvr_jax.storage.files import JSON
from rlvr_jax.types import Params, Sampling


def as_they_are(trained: Params, frozen: Params) -> tuple[Params, Params]:
  """Returns the trained policy's (trained, frozen) parameters unchanged."""
  return trained, frozen


class OfAnotherRun:
  """Returns the parameters of another run's policy; ignores the trained policy's parameters."""

  def __init__(self, read: Callable[[], Params]):
    """`read` is called once, for the first batch that needs the parameters."""
    self._read = functools.cache(read)

  def __call__(self, trained: Params, frozen: Params) -> tuple[Params, Params]:
    """Returns (trained, frozen): all parameters of the other run's policy, and {}."""
    del trained, frozen
    return self._read(), {}


class Source(NamedTuple):
  """A policy that samples some groups of every batch."""

  name: str
  prompts: int  # number of groups in every batch
  # The sampled distribution. For recorded groups, whose distribution is not known, this is the
  # trained policy's distribution, with which their behavior log-probabilities are compared.
  sampling: Sampling
  engine: EnginePrograms | None = None  # the programs that sample; None if groups are recorded
  recorded: RecordedGroups | None = None  # groups of another run's store, in place of an engine
  # (trained, frozen) of the trained policy → (trained, frozen) of this source
  params_of: Callable[[Params, Params], tuple[Params, Params]] = as_they_are
  # The checkpoint step or the batch numbers that a resumed run must use again; JSON.
  pin: JSON = None
  of_this_run: bool = True  # whether its parameters derive from the trained policy's parameters
  # Mean gap of log-probabilities, in nats per token, above which a run stops. Only a source that
  # samples with the policy's own parameters must agree with the trainer; the gap of any other
  # source must be finite.
  max_gap: float = sys.float_info.max
  raw: bool = False  # whether behavior log-probabilities are replaced by values at temperature 1

  @property
  def programs(self) -> EnginePrograms:
    """The compiled programs that sample from the source.

    Raises:
      ValueError: the rollouts of the source are recorded.
    """
    if self.engine is None:
      raise ValueError(
        f"the source {self.name} consists of recorded groups, so it has no programs that sample"
      )
    return self.engine

  @property
  def truncated(self) -> bool:
    """Whether top-k, top-p or min-p truncates the sampled distribution."""
    return is_truncated(self.sampling) if self.recorded is None else self.recorded.truncated

  @property
  def shaped(self) -> bool:
    """Whether recorded rewards may be other than 0 and 1."""
    return self.recorded is not None and self.recorded.shaped


class Sources(tuple[Source, ...]):
  """The policies that sample the groups of every batch, in this order; recorded groups are last."""

  @property
  def quotas(self) -> list[int]:
    """Number of groups in a batch, by source."""
    return [source.prompts for source in self]

  @property
  def live(self) -> list[Source]:
    """The sources that sample, without the recorded source."""
    return [source for source in self if source.recorded is None]

  @property
  def num_live(self) -> int:
    """Number of sampled groups in a batch."""
    return sum(source.prompts for source in self.live)

  @property
  def recorded(self) -> RecordedGroups | None:
    """The recorded groups, or None."""
    return self[-1].recorded

  @property
  def num_recorded(self) -> int:
    """Number of recorded groups in a batch."""
    return sum(self.quotas) - self.num_live

  @property
  def truncated(self) -> bool:
    """Whether top-k, top-p or min-p truncates any of the sampled distributions."""
    return any(source.truncated for source in self)

  @property
  def shaped(self) -> bool:
    """Whether recorded rewards may be other than 0 and 1."""
    return any(source.shaped for source in self)
