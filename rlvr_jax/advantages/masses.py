"""Gradient masses: the total weight that an estimator puts on successes and on failures."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.ops.masked import masked_count, masked_fill
from rlvr_jax.ops.ratios import effective_sample_size
from rlvr_jax.types import Array, Mean, Metrics


def gradient_masses(coefficients: Array, rewards: Array, correct: Array, valid: Array) -> Metrics:
  """mS = mean of max(A, 0)·1[r = 1] and mF = mean of max(−A, 0)·1[r = 0], over valid rollouts.

  If a reward in a group differs from the rollout's correctness, for example by an overlong penalty,
  only the sign of A counts in this group. The factors 1[r = 1] and 1[r = 0] are then left out.

  Args:
    coefficients: f32[P, G], A.
    rewards: f32[P, G].
    correct: f32[P, G] in {0, 1}.
    valid: bool[P, G].
  Returns:
    advantage/mass_success, advantage/mass_failure, advantage/mass_difference = mS − mF,
    advantage/mass_ratio = mS/mF (a quotient of sums over rollouts; absent when no failure has
    mass), advantage/ess, the effective sample size of |A|, in [1/n, 1] for n valid rollouts.
  Source: "Don't Let Gains FADE: Breaking Down Policy Gradient Weights in RL" (arXiv:2607.01490).
  """
  chex.assert_rank([coefficients, rewards, correct, valid], 2)
  chex.assert_equal_shape([coefficients, rewards, correct, valid])
  coefficients = masked_fill(coefficients, valid)
  binary = jnp.all(rewards == correct, axis=1, keepdims=True, where=valid > 0)
  success = jnp.sum(jnp.maximum(coefficients, 0) * (~binary | (correct > 0)))
  failure = jnp.sum(jnp.maximum(-coefficients, 0) * (~binary | (correct <= 0)))
  rollouts = masked_count(valid).astype(success.dtype)
  return {
    "advantage/mass_success": Mean(total=success, weight=rollouts),
    "advantage/mass_failure": Mean(total=failure, weight=rollouts),
    "advantage/mass_difference": Mean(total=success - failure, weight=rollouts),
    "advantage/mass_ratio": Mean(total=success, weight=failure),
    "advantage/ess": effective_sample_size(jnp.abs(coefficients), valid),
  }
