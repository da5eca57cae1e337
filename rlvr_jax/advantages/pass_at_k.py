"""Advantages whose policy gradient is the gradient of pass@k."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, as_group, stateless, zero_if_constant
from rlvr_jax.advantages.power import power_asym_advantages
from rlvr_jax.ops.checks import check_choice, check_integer
from rlvr_jax.ops.groups import count_valid, group_mean
from rlvr_jax.ops.masked import masked_fill
from rlvr_jax.types import Array, Mean, Metrics, TrainBatch


def pass_at_k_advantages(rewards: Array, correct: Array, valid: Array, *, k: int) -> Array:
  """A = k(w − w̄) with w = 1 if correct, else 1 − C(n−1−c, k−1)/C(n−1, k−1).

  w is the probability that k rollouts, this one and k−1 others sampled without replacement, contain
  a correct rollout. The group has n valid rollouts, of which c are correct.

  k·w is unbiased: E[k·w ∇log π] = ∇pass@k. The mean w̄ contains the rollout's own w. So E[A ∇log π]
  = (1 − k/n)·∇pass@k: the direction is right, but the gradient is shorter. For k = 1, A is that of
  `grpo_mean`. A group with n ≤ k gets 0: all w are equal if n = k, and undefined if n < k.

  Args:
    rewards: f32[P, G].
    correct: f32[P, G] in {0, 1}; any value other than 1 counts as incorrect.
    valid: bool[P, G].
    k: 1 ≤ k < G.
  Returns:
    f32[P, G]. As G → ∞, the gradient masses of successes and of failures are both k·p·q^k, where
    p = 1 − q is the solve rate.
  Raises:
    ValueError: at trace time, if k ≥ G.
  Source: "Pass@K Policy Optimization: Solving Harder Reinforcement Learning Problems"
    (arXiv:2505.15201); "Pass@k Training for Adaptively Balancing Exploration and Exploitation of
    Large Reasoning Models" (arXiv:2508.10751).
  """
  rewards = as_group("pass_at_k", rewards, valid)
  chex.assert_equal_shape([rewards, correct])
  size = rewards.shape[1]
  if k >= size:
    raise ValueError(
      f"advantage 'pass_at_k' with k = {k} needs more than k rollouts per prompt, got G = {size}:"
      f" every coefficient would be 0; lower k or raise the group size"
    )
  is_correct = masked_fill(correct, valid) == 1
  others = count_valid(valid).astype(rewards.dtype)[..., None] - 1
  others_wrong = others - jnp.sum(is_correct, axis=1, keepdims=True)[..., None]
  # C(n−1−c, k−1)/C(n−1, k−1) as a product of k−1 factors within [0, 1].
  drawn = jnp.arange(k - 1, dtype=rewards.dtype)
  factors = jnp.maximum(others_wrong - drawn, 0) / jnp.maximum(others - drawn, 1)
  weights = jnp.where(is_correct, 1.0, 1 - jnp.prod(factors, axis=-1))
  coefficients = k * (weights - group_mean(weights, valid))
  coefficients = jnp.where(count_valid(valid) <= k, 0.0, coefficients)
  return zero_if_constant(coefficients, rewards, valid)


def at_most_k(k: int, valid: Array) -> Metrics:
  """The metric advantage/at_most_k: the share of groups with at most k valid rollouts."""
  few = count_valid(valid) <= k
  return {"advantage/at_most_k": Mean(jnp.sum(few), jnp.asarray(few.size, jnp.float32))}


def pass_at_k(*, k: int = 4, form: str = "unbiased") -> Advantage:
  """Advantages whose policy gradient is ∇pass@k: `pass_at_k_advantages`, or its limit for G → ∞.

  Args:
    k: ≥ 1, and below the group size.
    form: "unbiased" (up to the factor 1 − k/n); or "plug_in", which is k(1−r̄)^(k−1)·(r − r̄).
  """
  check_choice("pass_at_k", "form", form, ("unbiased", "plug_in"))
  check_integer("pass_at_k", "k", k, low=1)

  def unbiased(batch: TrainBatch) -> Array:
    return pass_at_k_advantages(batch.rewards, batch.correct, batch.valid, k=k)

  def plug_in(batch: TrainBatch) -> Array:
    return k * power_asym_advantages(
      batch.rewards, batch.correct, batch.valid, alpha=float(k), delta=1.0, name="pass_at_k"
    )

  def metrics(batch: TrainBatch) -> Metrics:
    return at_most_k(k, batch.valid) if form == "unbiased" else {}

  return stateless(
    lambda batch: (unbiased if form == "unbiased" else plug_in)(batch),
    needs_binary=True,
    metrics=metrics,
  )
