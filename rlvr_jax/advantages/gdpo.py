"""GDPO: normalizes each of several rewards within the group, then their sum over the batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.advantages.base import (
  OVER,
  Advantage,
  as_group,
  batch_moments,
  counts_over,
  needed,
  stateless,
  zero_if_constant,
)
from rlvr_jax.advantages.grpo import grpo_advantages
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.ops.groups import group_deviation, group_mean, varies
from rlvr_jax.ops.masked import masked_fill, mean_metric
from rlvr_jax.types import Array, Metrics, TrainBatch


def leave_one_out_advantages(
  rewards: Array, valid: Array, *, epsilon: float, name: str = "gdpo"
) -> Array:
  """(r − b)/(s + ε) for one reward, with the *other* rollouts' mean b and unbiased deviation s.

  If the other rollouts' rewards are all equal, the result is r − b, as in NeMo-RL. It is 0 in a
  constant group.

  Args:
    rewards: f32[P, G].
    valid: bool[P, G].
    epsilon: ≥ 0.
    name: name of the estimator, for error messages.
  """
  rewards = as_group(name, rewards, valid)
  P, G = rewards.shape
  others = ((valid > 0)[:, None, :] & ~jnp.eye(G, dtype=bool)).reshape(P * G, G)
  of_others = lambda statistic: statistic(jnp.repeat(rewards, G, axis=0), others).reshape(P, G)
  centered = rewards - of_others(group_mean)
  differ = of_others(varies)
  deviation = jnp.where(differ, of_others(group_deviation) + epsilon, 1.0)
  return zero_if_constant(centered / deviation, rewards, valid)


def gdpo_advantages(
  rewards: Array,
  counts: Array,
  valid: Array,
  *,
  weights: Sequence[float],
  epsilon: float,
  batch_epsilon: float,
  leave_one_out: bool = False,
) -> Array:
  """A = (a − μ)/(σ + ε_B), a = Σ_k ω_k (r_k − r̄_k)/(std_k + ε).

  The sum a has the mean μ and the standard deviation σ over the batch. Reward k has the mean r̄_k
  and the standard deviation std_k in the group.

  Args:
    rewards: f32[P, G, K].
    counts: f32[P, G], how often a rollout counts in μ and σ, from `base.counts_over`.
    valid: bool[P, G].
    weights: ω, K numbers; () sets all to 1.
    epsilon, batch_epsilon: ε and ε_B, ≥ 0.
    leave_one_out: whether r̄_k and std_k are taken over the other rollouts.
  Returns:
    f32[P, G]; it is −μ/(σ + ε_B) in a group that is constant in all rewards.
  Raises:
    ValueError: at trace time, the number of weights is not K.
  """
  chex.assert_rank([rewards, counts, valid], [3, 2, 2])
  K = rewards.shape[-1]
  weights = tuple(weights) or (1.0,) * K
  if len(weights) != K:
    raise ValueError(
      f"gdpo: weights = {weights} has length {len(weights)}, but there are K = {K} rewards: the"
      " main grader's, and one for each grader in config.grading.extra; give one weight for each"
      " reward, or weights = () to set all weights to 1"
    )
  of_one = leave_one_out_advantages if leave_one_out else grpo_advantages
  normalize = functools.partial(of_one, valid=valid, epsilon=epsilon, name="gdpo")
  normalized = jax.vmap(normalize, in_axes=-1, out_axes=-1)(rewards)
  total = jnp.sum(jnp.asarray(weights, normalized.dtype) * normalized, axis=-1)
  centered, deviation = batch_moments(total, counts)
  return centered / jnp.where(deviation > 0, deviation + batch_epsilon, 1.0)


def gdpo(
  *,
  weights: Sequence[float] = (),
  epsilon: float = 1e-4,
  batch_epsilon: float = 1e-4,
  over: str = "rollouts",
  leave_one_out: bool = False,
) -> Advantage:
  """A = (a − μ)/(σ + ε_B), a = Σ_k ω_k (r_k − r̄_k)/(std_k + ε).

  The sum a has the mean μ and the standard deviation σ over the batch. The rewards
  r_k are the scores of the main grader and of `config.grading.extra`, in this order. Other
  estimators get one reward, such as the weighted sum of these scores, which can be equal for
  rollouts with different scores. GDPO tells these rollouts apart, and a reward that hardly varies
  counts as much as a reward that varies much. A constant reward contributes 0.

  A group that is constant in every reward has exactly A = 0 if μ is a mean over rollouts. If μ is a
  mean over tokens and rewards depend on the length, μ is not 0, and a constant group gets
  −μ/(σ + ε_B).

  Args:
    weights: ω, a number for each reward; () sets all to 1. The weights in `config.grading.extra`
      have no effect here.
    epsilon: ε ≥ 0, added to the deviations of the group; 1e-4 in the authors' code, 1e-6 in other
      implementations.
    batch_epsilon: ε_B ≥ 0, added to the batch's deviation; 1e-4 in the authors' code, 0 in NeMo-RL.
    over: whether μ and σ are taken over "rollouts", or over loss "tokens" (verl).
    leave_one_out: whether r̄_k and std_k are taken over the group's other rollouts (NeMo-RL).
  Source: "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL
    Optimization" (arXiv:2601.05242) and the authors' code.
  """
  check_between("gdpo", "epsilon", epsilon, low=0.0)
  check_between("gdpo", "batch_epsilon", batch_epsilon, low=0.0)
  check_choice("gdpo", "over", over, OVER)
  check_choice("gdpo", "leave_one_out", leave_one_out, (True, False))
  if not isinstance(weights, (tuple, list)):
    raise ValueError(f"gdpo: weights = {weights!r} is not a tuple of numbers, such as (1.0, 0.5)")
  for number, weight in enumerate(weights):
    check_between("gdpo", f"weights[{number}]", weight)

  def apply(batch: TrainBatch) -> Array:
    rewards = _rewards_of(batch)
    advantages = gdpo_advantages(
      rewards,
      counts_over(batch, over),
      batch.valid,
      weights=weights,
      epsilon=epsilon,
      batch_epsilon=batch_epsilon,
      leave_one_out=leave_one_out,
    )
    advantages = masked_fill(advantages, batch.valid)
    if over == "rollouts":
      return jnp.where(jnp.any(_varying(rewards, batch.valid), axis=-1), advantages, 0.0)
    return advantages

  def metrics(batch: TrainBatch) -> Metrics:
    rewards = _rewards_of(batch)
    varying = _varying(rewards, batch.valid)
    found: Metrics = {}
    for k in range(rewards.shape[-1]):
      found[f"advantage/reward_mean_{k}"] = mean_metric(rewards[..., k], batch.valid)
      found[f"advantage/reward_varies_{k}"] = mean_metric(varying[..., k], batch.valid)
    return found

  return stateless(apply, metrics=metrics)._replace(needs=("rewards_by_name",))


def _rewards_of(batch: TrainBatch) -> Array:
  """The rewards f32[P, G, K] of a batch, 0 where not valid."""
  return masked_fill(needed("gdpo", batch, "rewards_by_name"), batch.valid[..., None])


def _varying(rewards: Array, valid: Array) -> Array:
  """For each reward [P, G, K], whether it varies within the group, bool[P, G, K]."""
  found = jax.vmap(lambda r: varies(r, valid), in_axes=-1, out_axes=-1)(rewards)
  return jnp.broadcast_to(found, rewards.shape)
