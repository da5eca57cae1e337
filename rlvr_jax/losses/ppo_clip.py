"""PPO's clipped surrogate, the loss of GRPO, DAPO and Dr. GRPO."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, Tokens, exp_or_constant, token_loss
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array


def clipped_surrogate(
  log_ratios: Array,
  coefficients: Array,
  *,
  low: Array | float,
  high: Array | float,
  negative_high: float = jnp.inf,
) -> tuple[Array, Array]:
  """max(−Aρ, −A·clip(ρ, low, high)): bounds ρ above by `high` if A > 0, below by `low` if A < 0.

  Args:
    log_ratios: f32[P, G, T], log ρ, nats.
    coefficients: f32[P, G, 1] or f32[P, G, T], A; a token with A = 0 has the loss 0.
    low, high: the interval of ρ within which nothing is clipped.
    negative_high: the largest ρ where A < 0.
  Returns:
    The losses f32[P, G, T], and bool[P, G, T], True at tokens with ρ beyond a bound. These tokens
    have no gradient.
  """
  log_ratios = jnp.where(coefficients == 0, 0.0, log_ratios)
  ratios = jnp.exp(jax.lax.stop_gradient(log_ratios))
  lower = jnp.where(coefficients > 0, 0.0, low)
  upper = jnp.where(coefficients > 0, high, negative_high)
  clipped = (ratios < lower) | (ratios > upper)
  ratios = jnp.where(clipped, jnp.clip(ratios, lower, upper), exp_or_constant(log_ratios))
  return -coefficients * ratios, clipped


def ppo_clip(
  *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, dual_clip: float | None = None
) -> Loss:
  """ℓ = max(−Aρ, −A·clip(ρ, 1−ε_low, 1+ε_high)); with `dual_clip`, ℓ ≤ −A·c where A < 0.

  ρ = π/β. GRPO uses ε_low = ε_high = 0.2, DAPO uses 0.2 and 0.28. μ-GRPO's relaxed interval [0, 5]
  has ε_low = 1.0 and ε_high = 4.0.

  Args:
    epsilon_low: in [0, 1].
    epsilon_high: ≥ 0.
    dual_clip: c > 1, usually 3; None does not bound the loss of large ratios where A < 0.
  Source: "Proximal Policy Optimization Algorithms" (arXiv:1707.06347); "DeepSeekMath: Pushing the
    Limits of Mathematical Reasoning in Open Language Models" (arXiv:2402.03300); dual clip
    "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (arXiv:1912.09729).
  """
  check_between("ppo_clip", "epsilon_low", epsilon_low, low=0.0, high=1.0)
  check_between("ppo_clip", "epsilon_high", epsilon_high, low=0.0)
  if dual_clip is not None:
    check_between("ppo_clip", "dual_clip", dual_clip, low=1.0, open_low=True)

  def per_token(tokens: Tokens) -> tuple[Array, Array]:
    return clipped_surrogate(
      tokens.log_ratios,
      tokens.coefficients,
      low=1 - epsilon_low,
      high=1 + epsilon_high,
      negative_high=jnp.inf if dual_clip is None else dual_clip,
    )

  return token_loss(per_token)._replace(ratio_to="old")
