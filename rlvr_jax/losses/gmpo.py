"""GMPO: the geometric mean of clipped token ratios."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, Tokens, exp_or_constant, follow, token_loss
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.ratios import mean_log_ratios
from rlvr_jax.types import Array


def gmpo(*, epsilon_low: float = 0.4, epsilon_high: float = 0.4) -> Loss:
  """ℓ = −A·exp(mean_t d̃), d̃ = s·min(s·d, s·clip(d, −ε_low, ε_high)), d = log ρ, s = sign(A).

  Here ρ = π/β. Every token of a rollout has the rollout's ℓ as its value. The gradient with respect
  to a token's log-probability comes only from that token's ℓ (`follow`). Under any aggregation the
  losses have the gradient of the formula, and vetoing a token removes exactly this token's
  gradient. The loss is intended for the aggregation `sequence_mean`.

  Args:
    epsilon_low, epsilon_high: ≥ 0, nats; log ρ is clipped to [−ε_low, ε_high].
  Source: "Geometric-Mean Policy Optimization" (arXiv:2507.20673).
  """
  check_between("gmpo", "epsilon_low", epsilon_low, low=0.0)
  check_between("gmpo", "epsilon_high", epsilon_high, low=0.0)

  def per_token(tokens: Tokens) -> tuple[Array, Array]:
    sign = jnp.sign(tokens.coefficients)
    bound = jnp.clip(tokens.log_ratios, -epsilon_low, epsilon_high)
    clipped = sign * bound < sign * tokens.log_ratios
    log_ratios = jnp.where(clipped, bound, tokens.log_ratios)
    log_ratios = jnp.where(sign == 0, 0.0, log_ratios)  # 0 times a ratio beyond float32 is NaN
    log_mean = follow(mean_log_ratios(log_ratios, tokens.mask), log_ratios)
    return -tokens.coefficients * exp_or_constant(log_mean), clipped

  return token_loss(per_token)._replace(of_responses=True, ratio_to="old")
