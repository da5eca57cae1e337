"""TOPR: tapered off-policy REINFORCE."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, Tokens, score_function, token_loss
from rlvr_jax.ops.ratios import sequence_log_ratios
from rlvr_jax.types import Array


def topr() -> Loss:
  """ℓ = −sg(w)·A·log π with w = 1 where A ≥ 0, and w = min(Π_t ρ_t, 1) where A < 0.

  ρ_t = π/β is the ratio of token t, and the product is over the tokens of the response. sg stops
  gradients.

  Source: "Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs"
    (arXiv:2503.14286).
  """

  def per_token(tokens: Tokens) -> tuple[Array, Array]:
    negative = tokens.coefficients < 0
    sequence_log_ratio = sequence_log_ratios(tokens.log_ratios, tokens.mask)
    weights = jnp.where(negative, jnp.exp(jnp.minimum(sequence_log_ratio, 0.0)), 1.0)
    capped = negative & (sequence_log_ratio > 0)
    return score_function(weights, tokens), capped

  return token_loss(per_token)._replace(of_responses=True)
