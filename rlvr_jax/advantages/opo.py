"""OPO: the length-weighted baseline."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, as_group, stateless, zero_if_constant
from rlvr_jax.ops.masked import masked_count, masked_fill, upcast
from rlvr_jax.types import Array


def opo_advantages(rewards: Array, lengths: Array, valid: Array) -> Array:
  """A = r − Σ len·r/Σ len over the group.

  If |∇log π|² ∝ len, this baseline minimizes the variance of the policy gradient.

  Args:
    rewards: f32[P, G].
    lengths: [P, G], len in tokens; the baseline of a group without tokens is 0.
    valid: bool[P, G].
  Returns:
    f32[P, G].
  Source: "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585).
  """
  rewards = as_group("opo", rewards, valid)
  chex.assert_equal_shape([rewards, lengths])
  lengths = upcast(lengths)
  total = jnp.sum(masked_fill(lengths, valid), axis=1, keepdims=True)
  baseline = jnp.sum(lengths * rewards, axis=1, keepdims=True) / jnp.maximum(total, 1)
  return zero_if_constant(rewards - baseline, rewards, valid)


def opo() -> Advantage:
  """A = r − Σ len·r/Σ len, where len is the number of loss tokens.

  A rollout excluded by `config.overlong.filter` has no loss token, so its gradient and its weight
  in this baseline are 0. Other estimators include such rollouts in their baselines.
  """
  lengths = lambda batch: masked_count(batch.mask, axis=-1)
  return stateless(lambda batch: opo_advantages(batch.rewards, lengths(batch), batch.valid))
