"""Group-relative advantages: GRPO, and Dr. GRPO, which does not divide by the deviation."""

from __future__ import annotations

from rlvr_jax.advantages.base import Advantage, as_group, stateless, zero_if_constant
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.groups import group_deviation, group_mean
from rlvr_jax.types import Array


def grpo_advantages(rewards: Array, valid: Array, *, epsilon: float, name: str = "grpo") -> Array:
  """A = (r − r̄)/(std + ε) with the group's unbiased standard deviation std.

  Args:
    rewards: f32[P, G].
    valid: bool[P, G].
    epsilon: added to the deviation, in units of reward.
    name: name of the estimator, for error messages.
  Returns:
    f32[P, G]. In large groups, the gradient masses of successes and of failures are both √(pq),
    where p = 1 − q is the solve rate.
  Source: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models"
    (arXiv:2402.03300).
  """
  rewards = as_group(name, rewards, valid)
  centered = rewards - group_mean(rewards, valid)
  deviation = group_deviation(rewards, valid)
  return zero_if_constant(centered / (deviation + epsilon), rewards, valid)


def grpo_mean_advantages(rewards: Array, valid: Array) -> Array:
  """A = r − r̄, f32[P, G]: the reward minus the mean reward r̄ of the group.

  In large groups, the gradient masses of successes and of failures are both pq, where p = 1 − q is
  the solve rate.

  Args:
    rewards: f32[P, G].
    valid: bool[P, G].
  Source: "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783).
  """
  rewards = as_group("grpo_mean", rewards, valid)
  return zero_if_constant(rewards - group_mean(rewards, valid), rewards, valid)


def grpo(*, epsilon: float = 1e-6) -> Advantage:
  """A = (r − r̄)/(std + ε); see `grpo_advantages`."""
  check_between("grpo", "epsilon", epsilon, low=0.0)
  return stateless(lambda batch: grpo_advantages(batch.rewards, batch.valid, epsilon=epsilon))


def grpo_mean() -> Advantage:
  """A = r − r̄; see `grpo_mean_advantages`."""
  return stateless(lambda batch: grpo_mean_advantages(batch.rewards, batch.valid))
