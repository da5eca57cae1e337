"""On-policy distillation by a loss on the ratio π/β, without tokens that lost much probability."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.distillation.base import Distillation, prepare
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array, TrainBatch


def opd_ratio(*, max_drop: float = 0.2, log_ratio_penalty: float = 1e-3) -> Distillation:
  """ℓ = −g·ρ·1[π(y) − β(y) ≥ −δ] + λ·(log ρ)² at every token y.

  Here ρ = π/β and g = sg(log τ − log π).

  Args:
    max_drop: δ in (0, 1]; a token is kept if its probability fell by at most δ; 1 keeps all tokens.
    log_ratio_penalty: λ ≥ 0.
  Source: prime-rl's `ref_kl_loss_fn`, which has the same default values.
  """
  check_between("opd_ratio", "max_drop", max_drop, low=0.0, high=1.0, open_low=True)
  check_between("opd_ratio", "log_ratio_penalty", log_ratio_penalty, low=0.0)

  def per_token(policy_logprobs: Array, batch: TrainBatch) -> Array:
    tokens = prepare(policy_logprobs, batch)
    moved = jnp.exp(jax.lax.stop_gradient(tokens.policy)) - jnp.exp(tokens.behavior)
    kept = moved >= -max_drop
    losses = -tokens.gap * jnp.exp(jnp.where(kept, tokens.log_ratios, 0.0))
    losses = jnp.where(kept, losses, 0.0) + log_ratio_penalty * jnp.square(tokens.log_ratios)
    return jnp.where(tokens.mask > 0, losses, 0.0)

  return Distillation(per_token=per_token)
