"""REINFORCE leave-one-out."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, as_group, stateless, zero_if_constant
from rlvr_jax.ops.groups import count_valid, group_mean
from rlvr_jax.types import Array


def rloo_advantages(rewards: Array, valid: Array) -> Array:
  """A = G/(G−1)·(r − r̄): the reward minus the mean reward of the *other* rollouts.

  Args:
    rewards: f32[P, G].
    valid: bool[P, G].
  Returns:
    f32[P, G]. In expectation, the gradient masses of successes and of failures are both pq at any
    G, where p = 1 − q is the solve rate.
  Source: "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
    in LLMs" (arXiv:2402.14740).
  """
  rewards = as_group("rloo", rewards, valid)
  size = count_valid(valid).astype(rewards.dtype)
  advantages = size / jnp.maximum(size - 1, 1) * (rewards - group_mean(rewards, valid))
  return zero_if_constant(advantages, rewards, valid)


def rloo() -> Advantage:
  """A = G/(G−1)·(r − r̄); see `rloo_advantages`."""
  return stateless(lambda batch: rloo_advantages(batch.rewards, batch.valid))
