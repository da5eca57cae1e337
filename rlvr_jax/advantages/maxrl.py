"""MaxRL: dividing by the solve rate gives the gradient of the log-likelihood of success."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, as_group, stateless, zero_if_constant
from rlvr_jax.ops.groups import group_mean
from rlvr_jax.types import Array


def maxrl_advantages(rewards: Array, correct: Array, valid: Array) -> Array:
  """A = (r − r̄)/(mean correctness); 0 in groups without a correct rollout.

  Args:
    rewards: f32[P, G].
    correct: f32[P, G] in {0, 1}.
    valid: bool[P, G].
  Returns:
    f32[P, G]. In large groups, the gradient masses of successes and of failures are both q,
    where 1 − q is the solve rate.
  Source: "Maximum Likelihood Reinforcement Learning" (arXiv:2602.02710).
  """
  rewards = as_group("maxrl", rewards, valid)
  chex.assert_equal_shape([rewards, correct])
  solve_rate = group_mean(correct, valid)
  solved = solve_rate > 0
  centered = rewards - group_mean(rewards, valid)
  return zero_if_constant(
    jnp.where(solved, centered / jnp.where(solved, solve_rate, 1.0), 0.0), rewards, valid
  )


def maxrl() -> Advantage:
  """A = (r − r̄)/r̄; see `maxrl_advantages`."""
  return stateless(
    lambda batch: maxrl_advantages(batch.rewards, batch.correct, batch.valid), needs_binary=True
  )
