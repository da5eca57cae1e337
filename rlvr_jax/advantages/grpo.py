"""Group-relative advantages: GRPO, and Dr. GRPO, which does not divide by the deviation."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, as_group, group_mean, stateless, zero_if_constant
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array


def grpo_advantages(rewards: Array, *, epsilon: float) -> Array:
  """A = (r − r̄)/(std + ε), std unbiased.

  Args:
    rewards: f32[P, G].
    epsilon: added to the deviation, in units of reward.
  Returns:
    f32[P, G]; gradient masses √(pq) on successes and on failures.
  Source: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models"
    (arXiv:2402.03300).
  """
  rewards = as_group("grpo", rewards)
  deviation = jnp.std(rewards, axis=1, keepdims=True, ddof=1)
  return zero_if_constant((rewards - group_mean(rewards)) / (deviation + epsilon), rewards)


def grpo_mean_advantages(rewards: Array) -> Array:
  """A = r − r̄: f32[P, G] → f32[P, G]; gradient masses pq and pq.

  Source: "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783).
  """
  rewards = as_group("grpo_mean", rewards)
  return zero_if_constant(rewards - group_mean(rewards), rewards)


def grpo(*, epsilon: float = 1e-6) -> Advantage:
  """A = (r − r̄)/(std + ε); see `grpo_advantages`."""
  check_between("grpo", "epsilon", epsilon, low=0.0)
  return stateless(lambda batch: grpo_advantages(batch.rewards, epsilon=epsilon))


def grpo_mean() -> Advantage:
  """A = r − r̄; see `grpo_mean_advantages`."""
  return stateless(lambda batch: grpo_mean_advantages(batch.rewards))
