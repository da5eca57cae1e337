"""SAPO: a soft gate on the ratio instead of a clip."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, Tokens, token_loss
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array

LARGEST_LOG_RATIO = 80.0  # nats; its exponential is finite in float32


def sapo(*, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> Loss:
  """ℓ = −A·(4/τ)·σ(τ(ρ−1)) with ρ = π/β; τ depends on the sign of A.

  The gradient is −ρ·A·∇log π times the gate 4σ(1−σ) in (0, 1], which is 1 at ρ = 1. The clip
  fraction is the mean of 1 − gate: the share of the gradient that the gate removes.

  Args:
    temperature_positive: τ > 0 where A > 0.
    temperature_negative: τ > 0 where A ≤ 0; larger values suppress off-policy failures faster.
  Source: "Soft Adaptive Policy Optimization" (arXiv:2511.20347).
  """
  check_between("sapo", "temperature_positive", temperature_positive, low=0.0, open_low=True)
  check_between("sapo", "temperature_negative", temperature_negative, low=0.0, open_low=True)

  def per_token(tokens: Tokens) -> tuple[Array, Array]:
    temperature = jnp.where(tokens.coefficients > 0, temperature_positive, temperature_negative)
    # The gate of a ratio at this bound is already 0; an infinite ratio would give the gradient 0·∞.
    ratios = jnp.exp(jnp.minimum(tokens.log_ratios, LARGEST_LOG_RATIO))
    sigmoid = jax.nn.sigmoid(temperature * (ratios - 1))
    gate = 4 * sigmoid * (1 - sigmoid)
    return -tokens.coefficients * (4 / temperature) * sigmoid, 1 - gate

  return token_loss(per_token)._replace(ratio_to="old")
