"""The policy gradient, with or without truncated importance weights."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, Tokens, score_function, token_loss
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array


def reinforce(*, truncation: float | None = None) -> Loss:
  """ℓ = −sg(w)·A·log π with w = min(ρ, c) for ρ = π/β, or with w = 1; sg stops gradients.

  Args:
    truncation: c > 0; None uses w = 1, without a correction for the distance of π from β.
  Source: Williams 1992; for truncated weights Ionides 2008 and "IMPALA: Scalable Distributed
    Deep-RL with Importance Weighted Actor-Learner Architectures" (arXiv:1802.01561).
  """
  if truncation is not None:
    check_between("reinforce", "truncation", truncation, low=0.0, open_low=True)

  def per_token(tokens: Tokens) -> tuple[Array, Array | bool]:
    if truncation is None:
      return score_function(1.0, tokens), False
    ratios = tokens.ratios
    return score_function(jnp.minimum(ratios, truncation), tokens), ratios > truncation

  return token_loss(per_token)._replace(ratio_to="none" if truncation is None else "sampler")
