"""Distillation that weighs the places before which student and teacher have agreed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.distillation.base import Distillation, prepare
from rlvr_jax.ops.checks import check_between
from rlvr_jax.types import Array, TrainBatch

_LEAST_TOTAL = 1e-8  # s_T, nats, as TRL has it


def iw_opd(*, gamma: float = 0.5) -> Distillation:
  """ℓ = −(1 + γ·(1 − s_t/s_T))·g·log π, where g = log τ − log β and s_t = Σ_{u<t} |g_u|.

  s_T is the sum over the response. Early places weigh up to 1 + γ, and those behind all difference
  1. A weight sees the full response, so that the expected gradient is not exactly a divergence's.

  Args:
    gamma: γ ≥ 0; 0 weighs all places alike.
  Source: IW-OPD (arXiv:2606.22600), as TRL's `IWOPDTrainer` has it.
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
