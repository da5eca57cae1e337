"""Grades texts on the host. Neither this folder nor the workers import jax."""

from rlvr_jax.rewards.grading import GraderPool as GraderPool
from rlvr_jax.rewards.grading import GraderStartError as GraderStartError
from rlvr_jax.rewards.grading import GradingFuture as GradingFuture
from rlvr_jax.rewards.outcome import Grade as Grade
from rlvr_jax.rewards.outcome import GradingStoppedError as GradingStoppedError
from rlvr_jax.rewards.outcome import Outcome as Outcome
from rlvr_jax.rewards.outcome import OutcomePolicy as OutcomePolicy
from rlvr_jax.rewards.outcome import Rewards as Rewards
from rlvr_jax.rewards.outcome import outcome_policy as outcome_policy
from rlvr_jax.rewards.outcome import rewards_from_grades as rewards_from_grades

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
