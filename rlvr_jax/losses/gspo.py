"""GSPO: the clipped surrogate on the ratio of full responses."""

from __future__ import annotations

from rlvr_jax.losses.base import Loss, Tokens, follow, token_loss
from rlvr_jax.losses.ppo_clip import clipped_surrogate
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.ratios import mean_log_ratios
from rlvr_jax.types import Array


def gspo(*, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Loss:
  """`ppo_clip` on the ratio s_i = exp(mean_t log ρ) of response i, where ρ = π/β.

  At each token s_i is written as sg(s_i)·π/sg(π), where sg stops gradients. This is the paper's
  GSPO-token, in which each token may have its own A. The loss is intended for the aggregation
  `sequence_mean`.

  Args:
    epsilon_low: in [0, 1].
    epsilon_high: ≥ 0.
  Source: "Group Sequence Policy Optimization" (arXiv:2507.18071).
  """
  check_between("gspo", "epsilon_low", epsilon_low, low=0.0, high=1.0)
  check_between("gspo", "epsilon_high", epsilon_high, low=0.0)

  def per_token(tokens: Tokens) -> tuple[Array, Array]:
    losses, clipped = clipped_surrogate(
      follow(mean_log_ratios(tokens.log_ratios, tokens.mask), tokens.policy_logprobs),
      tokens.coefficients,
      low=1 - epsilon_low,
      high=1 + epsilon_high,
    )
    return losses, clipped

  return token_loss(per_token)._replace(ratio_to="old")
