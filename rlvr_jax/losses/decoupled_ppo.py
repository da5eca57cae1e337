"""Decoupled PPO: a clip around a recent policy π_prox, and weights π_prox/β for the sampler β."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, clip_metrics, prepare_tokens, proximal_logprobs
from rlvr_jax.losses.ppo_clip import clipped_surrogate
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.masked import mean_metric
from rlvr_jax.ops.ratios import log_ratios
from rlvr_jax.types import Array, Metrics, TrainBatch


def decoupled_ppo(
  *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, behavior_weight_cap: float = 2.0
) -> Loss:
  """ℓ = min(π_prox/β, cap)·`ppo_clip` on the ratio π/π_prox; β is the behavior policy.

  π_prox is the policy just before the first update on a batch; `config.proximal_every` lets a newer
  policy replace it before a later update on this batch. The training step provides the
  log-probabilities of π_prox as `batch.proximal_logprobs`.

  Args:
    epsilon_low: in [0, 1].
    epsilon_high: ≥ 0.
    behavior_weight_cap: cap, above 0.
  Raises:
    ValueError: at trace time, if the batch has no `proximal_logprobs`.
  Source: "Batch size-invariance for policy optimization" (arXiv:2110.00641).
  """
  check_between("decoupled_ppo", "epsilon_low", epsilon_low, low=0.0, high=1.0)
  check_between("decoupled_ppo", "epsilon_high", epsilon_high, low=0.0)
  check_between("decoupled_ppo", "behavior_weight_cap", behavior_weight_cap, low=0.0, open_low=True)

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Any = None
  ) -> tuple[Array, Metrics]:
    del statistics
    proximal = proximal_logprobs("decoupled_ppo", batch)
    tokens = prepare_tokens(policy_logprobs, batch, coefficients)
    surrogate, clipped = clipped_surrogate(
      log_ratios(policy_logprobs, proximal, batch.mask),
      tokens.coefficients,
      low=1 - epsilon_low,
      high=1 + epsilon_high,
    )
    behavior_weights = jnp.exp(log_ratios(proximal, batch.behavior_logprobs, batch.mask))
    capped = jnp.where(behavior_weights > behavior_weight_cap, 1.0, 0.0)
    return jnp.minimum(behavior_weights, behavior_weight_cap) * surrogate, {
      **clip_metrics(clipped, tokens),
      "loss/behavior_weight_capped": mean_metric(capped, batch.mask),
    }

  return Loss(per_token, needs_proximal=True)
