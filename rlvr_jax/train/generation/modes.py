"""The two ways to generate: between updates, or in a thread beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from rlvr_jax.rollouts.batch import PolicySnapshot, RolloutBatch
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.train.generation.async_generator import AsyncGenerator
from rlvr_jax.train.generation.generator import Generator
from rlvr_jax.train.generation.on_demand import OnDemand
from rlvr_jax.train.reporting.run_log import DeviceClock


class Generation(Protocol):
  """What the loop sees of generation."""

  def offer(self, policy: PolicySnapshot, /) -> None:
    """Sets the newest policy; batches that are started from now on are sampled from it."""
    ...

  def take(self, number: int, before_waiting: Callable[[], None], /) -> Iterator[RolloutBatch]:
    """Yields graded batches in order, at least up to `number`; those taken before come no more."""
    ...

  def close(self) -> None:
    """Ends generation."""
    ...


def clock_of_generation(schedule: Schedule, trainer: DeviceClock) -> DeviceClock:
  """The clock of the devices that generate; `trainer`: that of those that make updates.

  Where both phases alternate on the same devices, they are free for one when the other ends.
  """
  return DeviceClock() if schedule.threaded else trainer


def start(
  generator: Generator, schedule: Schedule, *, deadline_s: float, num_updates: int
) -> Generation:
  """Generation as the schedule has it.

  Args:
    generator: at the position where it goes on.
    schedule: of the run.
    deadline_s: seconds that one batch may take where generation runs beside the updates.
    num_updates: of the run.
  """
  if not schedule.threaded:
    return OnDemand(generator, schedule)
  return AsyncGenerator(
    generator, limit=schedule.limit, deadline_s=deadline_s, num_batches=num_updates
  )
