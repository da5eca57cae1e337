"""REINFORCE with the plain reward, a signed or weighted reward, or a shifted baseline."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, stateless
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.groups import group_mean
from rlvr_jax.ops.masked import masked_fill, upcast
from rlvr_jax.types import Array


def weighted_reinforce_advantages(correct: Array, valid: Array, *, success_weight: float) -> Array:
  """A = λ if correct else −1.

  A depends on the correctness, not on the reward, so that an overlong penalty or a bonus has no
  effect.

  Args:
    correct: f32[P, G] in {0, 1}.
    valid: bool[P, G].
    success_weight: λ.
  Returns:
    f32[P, G]. The gradient mass is λp on successes and q on failures, where p = 1 − q is the solve
    rate.
  Source: "The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning"
    (arXiv:2506.01347).
  """
  chex.assert_rank([correct, valid], 2)
  return masked_fill(jnp.where(upcast(correct) == 1, success_weight, -1.0), valid)


def asymmetric_reinforce_advantages(
  rewards: Array, valid: Array, *, baseline_shift: float
) -> Array:
  """A = r − (r̄ + δV), f32[P, G]; r̄ is the group's mean reward, and δV is `baseline_shift`.

  In large groups, the gradient mass is p(q − δV) on successes and q·max(p + δV, 0) on failures,
  where p = 1 − q is the solve rate. In a constant group A = −δV. Groups of one rollout are allowed.

  Args:
    rewards: f32[P, G].
    valid: bool[P, G].
    baseline_shift: δV ≤ 0, in units of reward.
  Source: "Asymmetric REINFORCE for off-Policy Reinforcement Learning: Balancing positive and
    negative rewards" (arXiv:2506.20520).
  """
  chex.assert_rank([rewards, valid], 2)
  rewards = masked_fill(rewards, valid)
  return masked_fill(rewards - (group_mean(rewards, valid) + baseline_shift), valid)


def reinforce() -> Advantage:
  """A = r. The gradient mass is p on successes and 0 on failures, where p is the solve rate.

  Source: Williams 1992.
  """
  return stateless(lambda batch: masked_fill(batch.rewards, batch.valid))


def reinforce_signed() -> Advantage:
  """A = 2r − 1. The gradient mass is p on successes and 1 − p on failures; p is the solve rate."""
  return stateless(lambda batch: masked_fill(2 * upcast(batch.rewards) - 1, batch.valid))


def weighted_reinforce(*, success_weight: float = 0.1) -> Advantage:
  """A = λ if correct else −1, λ = `success_weight` ≥ 0; see `weighted_reinforce_advantages`."""
  check_between("weighted_reinforce", "success_weight", success_weight, low=0.0)
  return stateless(
    lambda batch: weighted_reinforce_advantages(
      batch.correct, batch.valid, success_weight=success_weight
    )
  )


def asymmetric_reinforce(*, baseline_shift: float = -0.1) -> Advantage:
  """A = r − (r̄ + δV), δV = `baseline_shift` ≤ 0; see `asymmetric_reinforce_advantages`."""
  check_between("asymmetric_reinforce", "baseline_shift", baseline_shift, high=0.0)
  return stateless(
    lambda batch: asymmetric_reinforce_advantages(
      batch.rewards, batch.valid, baseline_shift=baseline_shift
    )
  )
