"""Generation between updates: a refresh is sampled when its batches are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlvr_jax.rollouts.batch import PolicySnapshot, RolloutBatch
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.train.generation.generator import Generator


class OnDemand:
  """Samples the batches that a schedule plans for a policy; see `AsyncGenerator` for the other way.

  Both have three methods: `offer` a policy, `take` batches, `close`.
  """

  def __init__(self, generator: Generator, schedule: Schedule):
    """`schedule` says which batches a policy samples."""
    self._generator, self._schedule = generator, schedule
    self._policy: PolicySnapshot | None = None
    self._kept: dict[int, PolicySnapshot] = {}  # of a recorded run, those that batches still need

  def offer(self, policy: PolicySnapshot) -> None:
    """Sets the policy of the next refresh."""
    self._policy = policy
    recorded = self._schedule.recorded
    if recorded is not None and recorded.has_several:
      self._kept[policy.version] = policy

  def take(self, number: int, before_waiting: Callable[[], None]) -> Iterator[RolloutBatch]:
    """Yields all batches of the refresh, graded and in order; none if its policy was used before.

    Args:
      number: of a batch that is needed now; it is in this refresh, or was in an earlier one.
      before_waiting: called before the first wait.
    """
    del number
    policy, self._policy = self._policy, None
    if policy is None:
      return
    before_waiting()
    end = self._schedule.limit(policy.version)
    policies = iter([policy] * (end - self._generator.number))
    # The policy is there already, so nothing waits; after the last batch there is none.
    next_policy = lambda **_: next(policies, None)
    yield from self._generator.batches(next_policy, end, replayed=self._kept or None)
    if self._kept and (recorded := self._schedule.recorded) is not None:
      oldest = recorded.oldest_needed(policy.version + 1)
      self._kept = {v: kept for v, kept in self._kept.items() if v >= oldest}

  def close(self) -> None:
    """Does nothing: nothing runs in the background."""
