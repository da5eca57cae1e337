"""Distillation in which a token weighs more if student and teacher agree on earlier tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.distillation.base import Distillation, prepare
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array, TrainBatch

_LEAST_TOTAL = 1e-8  # lower bound of s_T, nats, as in TRL


def iw_opd(*, gamma: float = 0.5) -> Distillation:
  """ℓ = −(1 + γ·(1 − s_t/s_T))·g·log π, where g = log τ − log β and s_t = Σ_{u<t} |g_u|.

  s_T is the sum of |g_u| over the response. Early tokens have weights up to 1 + γ. Tokens after the
  last token with g ≠ 0 have the weight 1. A weight depends on the full response, so the expected
  gradient is not exactly the gradient of a divergence.

  Args:
    gamma: γ ≥ 0; 0 gives all tokens the same weight.
  Source: IW-OPD (arXiv:2606.22600), as implemented in TRL's `IWOPDTrainer`.
  """
  check_between("iw_opd", "gamma", gamma, low=0.0)

  def per_token(policy_logprobs: Array, batch: TrainBatch) -> Array:
    tokens = prepare(policy_logprobs, batch)
    gap = tokens.teacher - tokens.behavior
    distance = jnp.abs(gap)
    before = jnp.cumsum(distance, axis=-1) - distance
    total = jnp.maximum(jnp.sum(distance, axis=-1, keepdims=True), _LEAST_TOTAL)
    weights = 1 + gamma * (1 - before / total)
    return -jax.lax.stop_gradient(weights * gap) * tokens.policy

  return Distillation(per_token=per_token)
