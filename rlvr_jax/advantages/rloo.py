"""REINFORCE leave-one-out."""

from __future__ import annotations

from rlvr_jax.advantages.base import Advantage, as_group, group_mean, stateless, zero_if_constant
from rlvr_jax.types import Array


def rloo_advantages(rewards: Array) -> Array:
  """A = G/(G−1)·(r − r̄), the reward minus the mean of the *other* rollouts.

  Args:
    rewards: f32[P, G].
  Returns:
    f32[P, G]; gradient masses pq and pq in expectation at any G.
  Source: "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
    in LLMs" (arXiv:2402.14740).
  """
  rewards = as_group("rloo", rewards)
  size = rewards.shape[1]
  return zero_if_constant(size / (size - 1) * (rewards - group_mean(rewards)), rewards)


def rloo() -> Advantage:
  """A = G/(G−1)·(r − r̄); see `rloo_advantages`."""
  return stateless(lambda batch: rloo_advantages(batch.rewards))
