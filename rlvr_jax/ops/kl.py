"""Per-token estimators of KL(p‖q) = E_p[log p − log q] from tokens sampled from p.

Source: "Approximating KL Divergence" (Schulman 2020, joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.ops.masked import masked_fill
from rlvr_jax.types import Array


def _log_ratio(p_logprobs: Array, q_logprobs: Array, mask: Array) -> Array:
  """log q − log p, 0 where masked."""
  chex.assert_equal_shape([p_logprobs, q_logprobs, mask])
  return masked_fill(q_logprobs, mask) - masked_fill(p_logprobs, mask)


def k1(p_logprobs: Array, q_logprobs: Array, mask: Array) -> Array:
  """log p − log q: unbiased, of either sign, with high variance.

  Args:
    p_logprobs: f32[...], nats, under the distribution that the tokens were sampled from.
    q_logprobs: f32[...], nats, under the other distribution.
    mask: [...], entries to keep.
  Returns:
    f32[...], nats; 0 where masked.
  """
  return -_log_ratio(p_logprobs, q_logprobs, mask)


def k2(p_logprobs: Array, q_logprobs: Array, mask: Array) -> Array:
  """(log p − log q)²/2: biased, never negative. For the arguments see `k1`.

  For tokens sampled from p, the expected gradient of k2 with respect to p is the gradient of
  KL(p‖q).
  """
  return jnp.square(_log_ratio(p_logprobs, q_logprobs, mask)) / 2


def k3(
  p_logprobs: Array, q_logprobs: Array, mask: Array, *, log_ratio_bound: float | None = None
) -> Array:
  """q/p − 1 − log(q/p): unbiased, never negative. For the other arguments see `k1`.

  Args:
    log_ratio_bound: q/p is computed as exp(log(q/p)), with the exponent clipped to
      ±`log_ratio_bound` (10 in P3O); None does not clip.
  """
  log_ratio = _log_ratio(p_logprobs, q_logprobs, mask)
  exponent = log_ratio
  if log_ratio_bound is not None:
    exponent = jnp.clip(log_ratio, -log_ratio_bound, log_ratio_bound)
  return jnp.expm1(exponent) - log_ratio
