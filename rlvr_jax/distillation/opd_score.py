"""On-policy distillation as a separate loss: a score function with a truncated ratio."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.distillation.base import Distillation, prepare
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array, TrainBatch


def opd_score(*, truncation: float | None = 2.0) -> Distillation:
  """ℓ = −sg(min(ρ, c))·g·log π, where ρ = π/β and g = sg(log τ − log π).

  Where ρ ≤ c, the expected gradient at each token is the gradient of KL(π‖τ), at any staleness.

  Args:
    truncation: c > 0; None does not truncate.
  Source: SDPO (arXiv:2601.20802), the authors' `compute_self_distillation_loss` for sampled tokens.
  """
  if truncation is not None:
    check_between("opd_score", "truncation", truncation, low=0.0, open_low=True)

  def per_token(policy_logprobs: Array, batch: TrainBatch) -> Array:
    tokens = prepare(policy_logprobs, batch)
    weights = jnp.exp(jax.lax.stop_gradient(tokens.log_ratios))
    if truncation is not None:
      weights = jnp.minimum(weights, truncation)
    return -weights * tokens.gap * tokens.policy

  return Distillation(per_token=per_token)
