"""Sums per-token losses to (total, weight) pairs, which add up over micro-batches and devices."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.ops.checks import check_choice
from rlvr_jax.ops.masked import masked_count, masked_mean, masked_sum
from rlvr_jax.types import Array, Mean

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")


def aggregate(losses: Array, mask: Array, *, how: str, max_response_length: int) -> Mean:
  """The aggregated loss as a pair (total, weight); the loss is total / weight.

  token_mean: Σ mℓ / Σ m, with the mask m and per-token losses ℓ. sequence_mean: each rollout's
  token mean, averaged over rollouts. sequence_sum: each rollout's token sum, averaged over
  rollouts. constant: Σ mℓ / (P·G·max_response_length), as in Dr. GRPO. Rollouts without a loss
  token do not count, except in `constant`.

  Args:
    losses: f32[P, G, T]; any value where masked.
    mask: [P, G, T], 1 on loss tokens.
    how: one of `AGGREGATIONS`.
    max_response_length: tokens, the limit of the sampler; read by `constant` only.
  Returns:
    The pair (total, weight). Both are 0 if there is no loss token, except in `constant`, where only
    the total is 0.
  Raises:
    ValueError: unknown `how`.
  """
  chex.assert_rank(losses, 3)
  chex.assert_equal_shape([losses, mask])
  check_choice("aggregate", "how", how, AGGREGATIONS)
  if how == "sequence_mean":
    total = jnp.sum(masked_mean(losses, mask, axis=-1))
  else:
    total = masked_sum(losses, mask)
  if how == "token_mean":
    weight = masked_count(mask)
  elif how == "constant":
    weight = jnp.asarray(float(mask.shape[0] * mask.shape[1] * max_response_length))
  else:
    weight = masked_count(masked_count(mask, axis=-1))
  return Mean(total=total, weight=weight.astype(total.dtype))
