"""The total-variation mask of VACO."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.corrections.base import Correction, Mismatch
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.ops.masked import masked_mean
from rlvr_jax.types import Array


def tv_mask(*, delta: float = 0.2, cap: float = 2.0, ratio: str = "sampler") -> Correction:
  """Drops tokens with A·log κ > 0 in responses with mean_t|κ − 1| > δ.

  In such responses the policy is far from the sampler, and an update would move the dropped tokens
  further away. The loss of the other tokens is multiplied by min(κ, cap). The mean of |κ − 1| over
  tokens estimates twice the total variation. The paper's loss is `ppo_clip` with ε_low = 0.2 and
  ε_high = 0.272.

  Args:
    delta: δ > 0. **open**: no source gives a value.
    cap: above 0.
    ratio: the ratio that decides which tokens are dropped. "sampler" is κ = π_prox/β, as in
      published code; κ does not show how far π itself has moved. "policy" is ρ = π/β. **open**.
  Source: VACO (arXiv:2603.01365), as implemented in open-instruct's `grpo_utils.py`.
  """
  check_between("tv_mask", "delta", delta, low=0.0, open_low=True)
  check_between("tv_mask", "cap", cap, low=0.0, open_low=True)
  check_choice("tv_mask", "ratio", ratio, ("sampler", "policy"))

  def apply(seen: Mismatch, statistics: None) -> tuple[Array, Array, Array]:
    del statistics
    log_ratio = seen.log_weights if ratio == "sampler" else seen.log_ratios
    distance = masked_mean(jnp.abs(jnp.expm1(log_ratio)), seen.mask, axis=-1)[..., None]
    dropped = (distance > delta) & (seen.coefficients * log_ratio > 0)
    kappa = jnp.exp(seen.log_weights)
    return jnp.minimum(kappa, cap), ~dropped, kappa > cap

  return Correction(apply)
