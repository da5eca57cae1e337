"""TOPR: tapered off-policy REINFORCE."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, clip_metrics, prepare, score_function
from rlvr_jax.ops.ratios import sequence_log_ratios
from rlvr_jax.types import Array, Metrics, TrainBatch


def topr() -> Loss:
  """ℓ = −sg(w)·A·log π, w = 1 where A ≥ 0, min(Π_t ρ_t, 1) of the whole response where A < 0.

  Source: arXiv 2503.14286.
  """

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Any = None
  ) -> tuple[Array, Metrics]:
    del statistics
    tokens = prepare(policy_logprobs, batch, coefficients)
    negative = tokens.coefficients < 0
    sequence_log_ratio = sequence_log_ratios(tokens.log_ratios, tokens.mask)
    weights = jnp.where(negative, jnp.exp(jnp.minimum(sequence_log_ratio, 0.0)), 1.0)
    capped = negative & (sequence_log_ratio > 0)
    return score_function(weights, tokens), clip_metrics(capped, tokens)

  return Loss(per_token)
