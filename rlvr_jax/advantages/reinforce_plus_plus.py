"""REINFORCE++: rewards normalized over the batch, with or without the group's mean as baseline."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.advantages.base import (
  OVER,
  Advantage,
  as_group,
  batch_moments,
  counts_over,
  stateless,
  zero_if_constant,
)
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.ops.groups import group_mean
from rlvr_jax.ops.masked import masked_fill
from rlvr_jax.types import Array, TrainBatch

EPSILON = 1e-8  # under the root


def normalized_over_batch(x: Array, counts: Array) -> Array:
  """(x − μ)/√(σ² + 1e-8), f32[P, G], with the mean μ and variance σ² of the batch.

  Args:
    x: f32[P, G], rewards, or rewards minus a baseline.
    counts: f32[P, G], the result of `base.counts_over`.
  """
  centered, deviation = batch_moments(x, counts)
  return centered / jnp.sqrt(jnp.square(deviation) + EPSILON)


def reinforce_plus_plus(*, baseline: bool = False, over: str = "rollouts") -> Advantage:
  """A = (r − μ)/√(σ² + 1e-8), μ and σ over the rollouts of the batch, or over their loss tokens.

  With `baseline`, r − r̄ is normalized in place of r; r̄ is the mean of the group. Then μ over
  rollouts is 0, and a constant group has exactly A = 0. μ over tokens is not 0, since long
  responses weigh more: a constant group gets −μ/√(σ² + 1e-8). Without `baseline`, rewards are
  compared only with the batch's μ, so that a constant group has A ≠ 0 unless its reward is μ.

  With moments over tokens, rollouts without a loss token do not count and have A = 0. The paper has
  the KL to a reference policy in the reward; here it is a part of the loss, `config.reference`.

  Args:
    baseline: whether r̄ is subtracted first.
    over: "rollouts", each of which counts once; or "tokens", as in the paper.
  Source: "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
    Normalization" (arXiv:2501.03262); as in verl 0.9.1, `core_algos.py`.
  """
  check_choice("reinforce_plus_plus", "baseline", baseline, (True, False))
  check_choice("reinforce_plus_plus", "over", over, OVER)

  def plain(batch: TrainBatch) -> Array:
    return normalized_over_batch(masked_fill(batch.rewards, batch.valid), counts_over(batch, over))

  def with_baseline(batch: TrainBatch) -> Array:
    rewards = as_group("reinforce_plus_plus", batch.rewards, batch.valid)
    centered = rewards - group_mean(rewards, batch.valid)
    centered = zero_if_constant(centered, rewards, batch.valid)
    advantages = normalized_over_batch(centered, counts_over(batch, over))
    if over == "rollouts":  # μ is 0 up to rounding
      return zero_if_constant(advantages, rewards, batch.valid)
    return advantages

  return stateless(with_baseline if baseline else plain)
