"""DRO: the policy gradient with a square penalty on the distance from the sampler."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, Tokens, score_function, token_loss
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array


def dro(*, penalty: float = 0.1) -> Loss:
  """ℓ = −A·log π + (b/2)·(log ρ)² with ρ = π/β; its gradient is −(A − b·log ρ)·∇log π.

  Args:
    penalty: b > 0. **open**: no source has a value.
  Source: verl 0.9.1, `core_algos.py`, which names no paper.
  """
  check_between("dro", "penalty", penalty, low=0.0, open_low=True)

  def per_token(tokens: Tokens) -> tuple[Array, bool]:
    losses = score_function(1.0, tokens) + penalty / 2 * jnp.square(tokens.log_ratios)
    return losses, False

  return token_loss(per_token)
