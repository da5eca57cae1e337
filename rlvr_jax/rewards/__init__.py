"""Grading on the host: from text to outcomes. Neither this package nor its workers import jax."""

from rlvr_jax.rewards.outcome import Grade as Grade
from rlvr_jax.rewards.outcome import GradingStoppedError as GradingStoppedError
from rlvr_jax.rewards.outcome import Outcome as Outcome
from rlvr_jax.rewards.outcome import OutcomePolicy as OutcomePolicy
from rlvr_jax.rewards.outcome import Rewards as Rewards
from rlvr_jax.rewards.outcome import outcome_policy as outcome_policy
from rlvr_jax.rewards.outcome import rewards_from_grades as rewards_from_grades
from rlvr_jax.rewards.pool import GraderPool as GraderPool
from rlvr_jax.rewards.pool import GradingFuture as GradingFuture
from rlvr_jax.rewards.worker_process import GraderStartError as GraderStartError

__all__ = [
  "Grade",
  "GraderPool",
  "GraderStartError",
  "GradingFuture",
  "GradingStoppedError",
  "Outcome",
  "OutcomePolicy",
  "Rewards",
  "outcome_policy",
  "rewards_from_grades",
]
