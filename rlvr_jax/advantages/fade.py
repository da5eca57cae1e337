"""FADE: focal advantage with dynamic entropy."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage
from rlvr_jax.advantages.power import power_asym_advantages
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.ops.groups import group_mean
from rlvr_jax.ops.masked import upcast
from rlvr_jax.types import Array, Mean, Metrics, TrainBatch

SCHEDULES = ("adaptive", "entropy", "logarithmic")


class FadeState(NamedTuple):
  """FADE's state between updates."""

  solve_rate: Array  # f32[], p̂, a moving average
  entropy: Array  # f32[], Ĥ, a moving average, nats per token
  initial_entropy: Array  # f32[], nats per token
  target_entropy: Array  # f32[], H*, nats per token
  updates: Array  # i32[], updates so far


class Exponents(NamedTuple):
  alpha: Array  # f32[], α ≥ 1
  delta: Array  # f32[], δ in (0, 1]


def adaptive_exponents(state: FadeState, *, alpha_max: float, delta_min: float) -> Exponents:
  """α = clip(3(1−p̂)/(2p̂), 1, α_max), δ = clip(1 + Ĥ − H*, δ_min, 1).

  `state` holds the moving averages p̂ of the solve rate and Ĥ of the entropy, and the target entropy
  H*.
  """
  return Exponents(
    # At p̂ = 0 the quotient is +inf, which is clipped to α_max.
    alpha=jnp.clip(3 * (1 - state.solve_rate) / (2 * state.solve_rate), 1.0, alpha_max),
    delta=jnp.clip(1 + state.entropy - state.target_entropy, delta_min, 1.0),
  )


def entropy_exponents(state: FadeState, *, alpha_max: float, delta_min: float) -> Exponents:
  """δ as in `adaptive_exponents`; α decreases from α_max to 1 while the entropy Ĥ decreases to H*.

  α is linear in Ĥ between the initial entropy and the target entropy H*. **open**: the paper names
  this ablation but gives no formula.
  """
  span = state.initial_entropy - state.target_entropy
  excess = state.entropy - state.target_entropy
  # A target at or above the initial entropy is already reached: α = 1.
  left = jnp.where(span > 0, excess / jnp.where(span > 0, span, 1.0), 0.0)
  return adaptive_exponents(state, alpha_max=alpha_max, delta_min=delta_min)._replace(
    alpha=1 + (alpha_max - 1) * jnp.clip(left, 0.0, 1.0)
  )


def logarithmic_exponents(
  state: FadeState, *, alpha_max: float, delta_min: float, decay_updates: int
) -> Exponents:
  """α decreases from α_max to 1, and δ from 1 to δ_min, in proportion to log(1+t)/log(1+T).

  t is the number of updates so far, and T is `decay_updates`. From t = T on, α is 1 and δ is δ_min.
  **open**: the paper names this ablation but gives no formula.
  """
  elapsed = jnp.log1p(state.updates.astype(state.entropy.dtype))
  done = jnp.minimum(elapsed / jnp.log1p(decay_updates), 1.0)
  return Exponents(alpha=alpha_max - (alpha_max - 1) * done, delta=1 - (1 - delta_min) * done)


def fade(
  *,
  alpha_max: float = 3.0,
  delta_min: float = 0.3,
  smoothing: float = 0.02,
  target_entropy: float = 0.5,
  target_is_relative: bool = True,
  schedule: str = "adaptive",
  decay_updates: int = 1000,
) -> Advantage:
  """A = (1−r̄)^(α−1)·(r − r̄ if r ≥ r̄ else (r − r̄)/δ), with α and δ computed from the run so far.

  r̄ is the mean reward of the group. Update t computes α and δ from the state that update t − 1
  left. Then it updates the state's moving averages: p̂ of the solve rate, and Ĥ of the entropy.
  Ablations: `alpha_max=1.0` fixes α at 1, `delta_min=1.0` fixes δ at 1, and `schedule` selects
  other schedules of α and δ.

  Args:
    alpha_max: ≥ 1.
    delta_min: in (0, 1].
    smoothing: in (0, 1], weight of the new value in p̂ and Ĥ. **open**: the paper does not give it.
    target_entropy: H* > 0, as a fraction of the initial entropy if `target_is_relative`, otherwise
      in nats per token; the paper also runs 1.0 and 1.3 nats. The default, half of the initial
      entropy, leaves δ near 1 if that entropy is 0.1 to 0.5 nats; then sweep absolute values.
    target_is_relative: whether `target_entropy` is a fraction of the initial entropy.
    schedule: FADE's schedule of α and δ: "adaptive" (`adaptive_exponents`), "entropy"
      (`entropy_exponents`) or "logarithmic" (`logarithmic_exponents`).
    decay_updates: T > 0, the number of updates over which "logarithmic" decays; the other schedules
      ignore it.
  Returns:
    An estimator with `FadeState`, for binary rewards.
  Source: "Don't Let Gains FADE: Breaking Down Policy Gradient Weights in RL" (arXiv:2607.01490).
  """
  check_between("fade", "alpha_max", alpha_max, low=1.0)
  check_between("fade", "delta_min", delta_min, low=0.0, high=1.0, open_low=True)
  check_between("fade", "smoothing", smoothing, low=0.0, high=1.0, open_low=True)
  check_between("fade", "target_entropy", target_entropy, low=0.0, open_low=True)
  check_choice("fade", "target_is_relative", target_is_relative, (True, False))
  check_choice("fade", "schedule", schedule, SCHEDULES)
  check_between("fade", "decay_updates", decay_updates, low=0.0, open_low=True)

  def exponents(state: FadeState) -> Exponents:
    if schedule == "logarithmic":
      return logarithmic_exponents(
        state, alpha_max=alpha_max, delta_min=delta_min, decay_updates=decay_updates
      )
    rule = adaptive_exponents if schedule == "adaptive" else entropy_exponents
    return rule(state, alpha_max=alpha_max, delta_min=delta_min)

  def init(initial_entropy: Array) -> FadeState:
    entropy = upcast(initial_entropy)
    target = target_entropy * entropy if target_is_relative else target_entropy
    return FadeState(
      solve_rate=jnp.full_like(entropy, 0.5),
      entropy=entropy,
      initial_entropy=entropy,
      target_entropy=jnp.broadcast_to(target, entropy.shape).astype(entropy.dtype),
      updates=jnp.zeros((), jnp.int32),
    )

  def apply(state: FadeState, batch: TrainBatch) -> Array:
    alpha, delta = exponents(state)
    return power_asym_advantages(
      batch.rewards, batch.correct, batch.valid, alpha=alpha, delta=delta, name="fade"
    )

  def update(
    state: FadeState, batch: TrainBatch, entropy: Array, solve_rate: Array | None = None
  ) -> FadeState:
    if solve_rate is None:
      has_valid = jnp.any(batch.valid > 0, axis=1)  # without valid rollouts the mean is NaN
      solve_rate = jnp.mean(group_mean(batch.correct, batch.valid)[:, 0], where=has_valid)
    return state._replace(
      solve_rate=_moving_average(state.solve_rate, solve_rate, smoothing),
      entropy=_moving_average(state.entropy, entropy, smoothing),
      updates=state.updates + 1,
    )

  def metrics(state: FadeState, batch: TrainBatch) -> Metrics:
    del batch
    values = {
      **exponents(state)._asdict(),
      "solve_rate": state.solve_rate,
      "entropy": state.entropy,
      "target_entropy": state.target_entropy,
    }
    return {
      f"advantage/fade_{name}": Mean(total=value, weight=jnp.ones_like(value))
      for name, value in values.items()
    }

  return Advantage(init, apply, update, metrics, needs_binary=True)


def _moving_average(old: Array, new: Array, weight: float) -> Array:
  """The next moving average; it stays at `old` if `new` is NaN, because nothing was measured."""
  # The dtype stays the state's, since another dtype would cause a recompilation.
  average = ((1 - weight) * old + weight * new).astype(old.dtype)
  return jnp.where(jnp.isnan(new), old, average)
