"""Off-policy sequence masking: drops failures that the policy has become unlikely to sample."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.corrections.base import Correction, Mismatch
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.ratios import mean_log_ratios
from rlvr_jax.types import Array


def opsm(*, delta: float = 0.5) -> Correction:
  """Keeps a response if A ≥ 0 or mean_t(log β − log π) ≤ δ; drops it otherwise.

  Args:
    delta: δ > 0, nats per token. **open**: no published value; TRL suggests 0.5, slime has 1e−4.
  Source: "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models" (arXiv:2512.02556).
  """
  check_between("opsm", "delta", delta, low=0.0, open_low=True)

  def apply(seen: Mismatch, statistics: None) -> tuple[Array, Array, Array]:
    del statistics
    kept = (seen.coefficients >= 0) | (-mean_log_ratios(seen.log_ratios, seen.mask) <= delta)
    return jnp.ones_like(seen.log_ratios), kept, jnp.zeros_like(kept)

  return Correction(apply, weighs=False, policies=2)
