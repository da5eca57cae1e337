"""CISPO: clipped importance weights, gradient through every token."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, Tokens, score_function, token_loss
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array


def cispo(*, epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> Loss:
  """ℓ = −sg(clip(ρ, 1−ε_low, 1+ε_high))·A·log π with ρ = π/β; sg stops gradients.

  Args:
    epsilon_low: in [0, 1]; with 1, as in the paper, small ratios are not clipped.
    epsilon_high: ≥ 0.
  Source: "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention"
    (arXiv:2506.13585). **open**: the paper tunes ε_high and does not give it; the defaults are
    GRPO's.
  """
  check_between("cispo", "epsilon_low", epsilon_low, low=0.0, high=1.0)
  check_between("cispo", "epsilon_high", epsilon_high, low=0.0)

  def per_token(tokens: Tokens) -> tuple[Array, Array]:
    weights = jnp.clip(tokens.ratios, 1 - epsilon_low, 1 + epsilon_high)
    return score_function(weights, tokens), weights != tokens.ratios

  return token_loss(per_token)._replace(ratio_to="old")
