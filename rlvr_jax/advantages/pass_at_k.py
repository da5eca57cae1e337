"""The gradient of pass@k."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, as_group, group_mean, stateless, zero_if_constant
from rlvr_jax.advantages.power import power_asym_advantages
from rlvr_jax.ops.checks import check_choice, check_integer
from rlvr_jax.ops.masked import upcast
from rlvr_jax.types import Array, TrainBatch


def pass_at_k_advantages(rewards: Array, correct: Array, *, k: int) -> Array:
  """A = k(w − w̄), w = 1 if correct else 1 − C(G−1−c, k−1)/C(G−1, k−1): unbiased at finite G.

  w is the probability that k rollouts, this one and k−1 others sampled without replacement, contain
  a correct one; c is the number of correct rollouts.

  Args:
    rewards: f32[P, G].
    correct: f32[P, G] in {0, 1}.
    k: 1 ≤ k ≤ G.
  Returns:
    f32[P, G]; gradient masses k·p·q^k and the same as G → ∞.
  Raises:
    ValueError: k > G, at trace time.
  Source: "Pass@K Policy Optimization: Solving Harder Reinforcement Learning Problems"
    (arXiv:2505.15201); "Pass@k Training for Adaptively Balancing Exploration and Exploitation of
    Large Reasoning Models" (arXiv:2508.10751).
  """
  rewards = as_group("pass_at_k", rewards)
  chex.assert_equal_shape([rewards, correct])
  size = rewards.shape[1]
  if k > size:
    raise ValueError(
      f"advantage 'pass_at_k' with k = {k} needs at least k rollouts per prompt, got G = {size};"
      f" lower k or raise the group size"
    )
  correct = upcast(correct)
  others_wrong = size - 1 - jnp.sum(correct, axis=1, keepdims=True)
  # C(n, k−1)/C(G−1, k−1) as a product of k−1 factors within [0, 1].
  drawn = jnp.arange(k - 1, dtype=correct.dtype)
  factors = jnp.maximum(others_wrong[..., None] - drawn, 0) / (size - 1 - drawn)
  weights = jnp.where(correct > 0, 1.0, 1 - jnp.prod(factors, axis=-1))
  return zero_if_constant(k * (weights - group_mean(weights)), rewards)


def pass_at_k(*, k: int = 4, form: str = "unbiased") -> Advantage:
  """Gradient of pass@k by `pass_at_k_advantages`, or by its infinite-group form.

  Args:
    k: ≥ 1, and no more than the group size.
    form: "unbiased", or "plug_in": k(1−r̄)^(k−1)·(r − r̄).
  """
  check_choice("pass_at_k", "form", form, ("unbiased", "plug_in"))
  check_integer("pass_at_k", "k", k, low=1)

  def unbiased(batch: TrainBatch) -> Array:
    return pass_at_k_advantages(batch.rewards, batch.correct, k=k)

  def plug_in(batch: TrainBatch) -> Array:
    return k * power_asym_advantages(
      batch.rewards, batch.correct, alpha=float(k), delta=1.0, name="pass_at_k"
    )

  return stateless(
    lambda batch: (unbiased if form == "unbiased" else plug_in)(batch), needs_binary=True
  )
