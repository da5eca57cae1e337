"""VESPO: the weight is a smooth function of the full response's ratio, narrower for failures."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.losses.base import (
  Loss,
  clip_metrics,
  prepare_tokens,
  proximal_logprobs,
  score_function,
)
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.masked import masked_count, mean_metric
from rlvr_jax.ops.ratios import log_ratios, sequence_log_ratios
from rlvr_jax.types import Array, Metrics, TrainBatch

# The authors' bounds on log W, nats.
LOG_WEIGHT_BOUNDS = (math.log(1e-8), 20.0)
# Responses whose weight is below this bound count in `loss/clip_fraction`.
LOST_WEIGHT = 1e-3


def vespo(
  *,
  k_positive: float = 2.0,
  lambda_positive: float = 3.0,
  k_negative: float = 3.0,
  lambda_negative: float = 2.0,
  token_truncation: float | None = None,
) -> Loss:
  """ℓ = −sg(φ(W))·A·log π with log φ(W) = λ + k·log W − λ·W.

  W = Π_t π/β is the ratio of the full response; log W is clipped to [log 1e−8, 20]. sg stops
  gradients. φ(1) = 1, and φ is largest at W = k/λ. The loss is intended for the aggregation
  `token_mean`. Long responses push W to 0 or to infinity, where φ vanishes. `loss/clip_fraction` is
  the share of loss tokens in responses with φ < 1e−3.

  Args:
    k_positive, lambda_positive: k ≥ 0 and λ ≥ 0 where A ≥ 0.
    k_negative, lambda_negative: k ≥ 0 and λ ≥ 0 where A < 0.
    token_truncation: c > 0 caps each token's ratio of π_prox to the sampler β: log W = Σ
      log(π/π_prox) + Σ min(log(π_prox/β), log c), with π_prox as in `decoupled_ppo`. None
      applies no cap.
  Source: "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM
    Training" (arXiv:2602.10693) and the authors' code, which has the default values.
  """
  for name, value in {
    "k_positive": k_positive,
    "lambda_positive": lambda_positive,
    "k_negative": k_negative,
    "lambda_negative": lambda_negative,
  }.items():
    check_between("vespo", name, value, low=0.0)
  if token_truncation is not None:
    check_between("vespo", "token_truncation", token_truncation, low=0.0, open_low=True)

  def log_weights(policy_logprobs: Array, batch: TrainBatch) -> Array:
    """The logarithm of each response's ratio W, f32[P, G, 1], within the authors' bounds."""
    if token_truncation is None:
      terms = log_ratios(policy_logprobs, batch.behavior_logprobs, batch.mask)
    else:
      proximal = proximal_logprobs("vespo", batch)
      of_sampler = log_ratios(proximal, batch.behavior_logprobs, batch.mask)
      terms = log_ratios(policy_logprobs, proximal, batch.mask)
      terms += jnp.minimum(of_sampler, math.log(token_truncation))
    return jnp.clip(sequence_log_ratios(terms, batch.mask), *LOG_WEIGHT_BOUNDS)

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Any = None
  ) -> tuple[Array, Metrics]:
    del statistics
    tokens = prepare_tokens(policy_logprobs, batch, coefficients)
    log_w = jax.lax.stop_gradient(log_weights(policy_logprobs, batch))
    k = jnp.where(tokens.coefficients < 0, k_negative, k_positive)
    lam = jnp.where(tokens.coefficients < 0, lambda_negative, lambda_positive)
    phi = jnp.exp(lam + k * log_w - lam * jnp.exp(log_w))
    has_tokens = masked_count(tokens.mask, axis=-1)[..., None]
    return score_function(phi, tokens), {
      **clip_metrics(phi < LOST_WEIGHT, tokens),
      "loss/sequence_weight": mean_metric(phi, has_tokens),
    }

  return Loss(per_token, needs_proximal=token_truncation is not None, of_responses=True)
