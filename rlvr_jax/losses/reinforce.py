"""The policy gradient, with or without truncated importance weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, clip_metrics, prepare, score_function
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array, Metrics, TrainBatch


def reinforce(*, truncation: float | None = None) -> Loss:
  """ℓ = −sg(w)·A·log π with w = min(ρ, c), or w = 1.

  Args:
    truncation: c > 0; None takes w = 1, which ignores how far π is from β.
  Source: Williams 1992; truncated weights Ionides 2008, arXiv 1802.01561.
  """
  if truncation is not None:
    check_between("reinforce", "truncation", truncation, low=0.0, open_low=True)

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Any = None
  ) -> tuple[Array, Metrics]:
    del statistics
    tokens = prepare(policy_logprobs, batch, coefficients)
    ratios = tokens.ratios
    if truncation is None:
      weights, truncated = jnp.ones_like(ratios), jnp.zeros_like(ratios)
    else:
      weights, truncated = jnp.minimum(ratios, truncation), ratios > truncation
    return score_function(weights, tokens), clip_metrics(truncated, tokens)

  return Loss(per_token)
