"""OPOB: a baseline chosen to minimize the gradient's variance, for rollouts of another policy."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, as_group, needed, stateless, zero_if_constant
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.ops.groups import group_mean
from rlvr_jax.ops.masked import masked_fill, upcast
from rlvr_jax.ops.ratios import log_ratios, normalized_ess, sequence_log_ratios
from rlvr_jax.types import Array, Mean, Metrics, TrainBatch

EPSILON = 1e-8  # added to the sum of weights, and to the deviation


def opob_advantages(
  rewards: Array,
  log_weights: Array,
  squared_norms: Array,
  valid: Array,
  *,
  by_deviation: bool = False,
) -> Array:
  """A = r − B, B = Σ W²‖g‖²·r/(Σ W²‖g‖² + 1e-8) over the group.

  Args:
    rewards: f32[P, G].
    log_weights: f32[P, G], log W, where W is the product of π/β over a response's tokens.
    squared_norms: f32[P, G], ‖g‖², where g is the gradient of a response's log-probability.
    valid: bool[P, G].
    by_deviation: whether A is divided by s + 1e-8, where s is the biased standard deviation of the
      group's rewards.
  Returns:
    f32[P, G].
  Source: "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs" (arXiv:2602.17616) and the
    authors' code.
  """
  rewards = as_group("opob", rewards, valid)
  chex.assert_equal_shape([rewards, log_weights, squared_norms])
  log_weights = masked_fill(log_weights, valid)
  # The largest W is divided out, so that squares neither overflow nor vanish; ε is not scaled.
  largest = jnp.max(log_weights, axis=1, keepdims=True, where=valid > 0, initial=-jnp.inf)
  largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
  weights = masked_fill(jnp.exp(2 * (log_weights - largest)) * upcast(squared_norms), valid)
  total = jnp.sum(weights, axis=1, keepdims=True) + EPSILON * jnp.exp(-2 * largest)
  baseline = jnp.sum(weights * rewards, axis=1, keepdims=True) / jnp.where(total > 0, total, 1.0)
  advantages = rewards - baseline
  if by_deviation:
    variance = group_mean(jnp.square(rewards - group_mean(rewards, valid)), valid)
    advantages /= jnp.sqrt(variance) + EPSILON
  return zero_if_constant(advantages, rewards, valid)


def opob(*, by_deviation: bool = False) -> Advantage:
  """A = r − Σ W²‖g‖²·r/Σ W²‖g‖² over the group; W = Π_t π/β of a response, without truncation.

  ‖g‖² is the diagonal of the Gram matrix of `config.gram`. g is the gradient of a response's
  log-probability: with respect to the output head if `config.gram` is "streaming", with respect to
  all parameters if it is "per_rollout(parameters='all')". If W = 1 and ‖g‖² is the length,
  this formula is that of `opo`. π is the policy before the update.

  Args:
    by_deviation: whether A is divided by the standard deviation of the group's rewards, as in the
      authors' runs.
  Source: "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs" (arXiv:2602.17616) and the
    authors' code.
  """
  check_choice("opob", "by_deviation", by_deviation, (True, False))

  def log_weights(batch: TrainBatch) -> Array:
    policy = needed("opob", batch, "policy_logprobs")
    ratios = log_ratios(policy, batch.behavior_logprobs, batch.mask)
    return sequence_log_ratios(ratios, batch.mask)[..., 0]

  def apply(batch: TrainBatch) -> Array:
    norms = needed("opob", batch, "squared_norms")
    return opob_advantages(
      batch.rewards, log_weights(batch), norms, batch.valid, by_deviation=by_deviation
    )

  def metrics(batch: TrainBatch) -> Metrics:
    ess = normalized_ess(log_weights(batch), batch.valid)
    return {"advantage/sequence_ess": Mean(total=ess, weight=jnp.ones_like(ess))}

  return stateless(apply, metrics=metrics)._replace(needs=("policy_logprobs", "squared_norms"))
