"""Advantages with a focal factor (1−r̄)^(α−1), a weight 1/δ on failures, or both."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, as_group, stateless, zero_if_constant
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.groups import group_mean
from rlvr_jax.ops.masked import upcast
from rlvr_jax.types import Array


def asym_advantages(
  rewards: Array, valid: Array, *, delta: Array | float, name: str = "asym"
) -> Array:
  """A = r − r̄ if r ≥ r̄ else (r − r̄)/δ.

  Args:
    rewards: f32[P, G].
    valid: bool[P, G].
    delta: δ > 0; smaller values weight failures more.
    name: name of the estimator, for error messages.
  Returns:
    f32[P, G]. In large groups, the gradient mass is pq on successes and pq/δ on failures, where
    p = 1 − q is the solve rate.
  Source: "Don't Let Gains FADE: Breaking Down Policy Gradient Weights in RL" (arXiv:2607.01490).
  """
  rewards = as_group(name, rewards, valid)
  centered = rewards - group_mean(rewards, valid)
  return zero_if_constant(jnp.where(centered >= 0, centered, centered / delta), rewards, valid)


def power_asym_advantages(
  rewards: Array,
  correct: Array,
  valid: Array,
  *,
  alpha: Array | float,
  delta: Array | float,
  name: str = "power_asym",
) -> Array:
  """A = (1 − mean correctness)^(α−1) × `asym_advantages`.

  Args:
    rewards: f32[P, G].
    correct: f32[P, G] in {0, 1}.
    valid: bool[P, G].
    alpha: α ≥ 1; hard prompts dominate if α > 1.
    delta, name: as for `asym_advantages`.
  Returns:
    f32[P, G]. In large groups, the gradient mass is p·q^α on successes and p·q^α/δ on failures,
    where p = 1 − q is the solve rate.
  Source: "Don't Let Gains FADE: Breaking Down Policy Gradient Weights in RL" (arXiv:2607.01490).
  """
  chex.assert_equal_shape([rewards, correct])
  fail_rate = group_mean(1 - upcast(correct), valid)
  return fail_rate ** (alpha - 1) * asym_advantages(rewards, valid, delta=delta, name=name)


def power(*, alpha: float = 2.0) -> Advantage:
  """A = (1−r̄)^(α−1)·(r − r̄), α ≥ 1; see `power_asym_advantages` with δ = 1."""
  check_between("power", "alpha", alpha, low=1.0)
  return stateless(
    lambda batch: power_asym_advantages(
      batch.rewards, batch.correct, batch.valid, alpha=alpha, delta=1.0, name="power"
    ),
    needs_binary=True,
  )


def asym(*, delta: float = 0.5) -> Advantage:
  """A = r − r̄ if r ≥ r̄ else (r − r̄)/δ, δ > 0; see `asym_advantages`."""
  check_between("asym", "delta", delta, low=0.0, open_low=True)
  return stateless(lambda batch: asym_advantages(batch.rewards, batch.valid, delta=delta))


def power_asym(*, alpha: float = 2.0, delta: float = 0.5) -> Advantage:
  """A = (1−r̄)^(α−1)·(r − r̄ if r ≥ r̄ else (r − r̄)/δ); see `power_asym_advantages`."""
  check_between("power_asym", "alpha", alpha, low=1.0)
  check_between("power_asym", "delta", delta, low=0.0, open_low=True)
  return stateless(
    lambda batch: power_asym_advantages(
      batch.rewards, batch.correct, batch.valid, alpha=alpha, delta=delta
    ),
    needs_binary=True,
  )
