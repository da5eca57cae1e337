"""OPO: the length-weighted baseline."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, as_group, stateless, zero_if_constant
from rlvr_jax.ops.masked import masked_count, upcast
from rlvr_jax.types import Array


def opo_advantages(rewards: Array, lengths: Array) -> Array:
  """A = r − Σ len·r/Σ len, the baseline of least variance if |∇log π|² is proportional to length.

  Args:
    rewards: f32[P, G].
    lengths: [P, G], tokens; a group without tokens has the baseline 0.
  Returns:
    f32[P, G].
  Source: "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585).
  """
  rewards = as_group("opo", rewards)
  chex.assert_equal_shape([rewards, lengths])
  lengths = upcast(lengths)
  total = jnp.sum(lengths, axis=1, keepdims=True)
  baseline = jnp.sum(lengths * rewards, axis=1, keepdims=True) / jnp.maximum(total, 1)
  return zero_if_constant(rewards - baseline, rewards)


def opo() -> Advantage:
  """A = r − Σ len·r/Σ len, len in loss tokens: filtered rollouts do not affect the baseline."""
  return stateless(lambda batch: opo_advantages(batch.rewards, masked_count(batch.mask, axis=-1)))
