"""The interface of advantage estimators, and helpers that the group estimators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax.numpy as jnp

from rlvr_jax.ops.component_repr import component_repr
from rlvr_jax.ops.masked import upcast
from rlvr_jax.types import Array, Metrics, TrainBatch


class Advantage(NamedTuple):
  """An estimator as pure functions; its state is part of the train state.

  Attributes:
    init: (initial_entropy f32[], nats per token) → state, () when there is none.
    apply: (state, batch) → coefficients f32[P, G]; `state` is the one before this update.
    update: (state, batch, entropy f32[], solve_rate=None) → next state. `entropy` is the mean
      per-token entropy of the policy over loss tokens, nats. `solve_rate` is the mean correctness
      *before* any dynamic-sampling filter; None takes it from the batch.
    metrics: (state) → metrics of the state.
    needs_binary: True if only rewards of 0 and 1 make sense; others are a configuration error.
  """

  init: Callable[[Array], Any]
  apply: Callable[[Any, TrainBatch], Array]
  update: Callable[..., Any]
  metrics: Callable[[Any], Metrics]
  needs_binary: bool = False

  def __repr__(self) -> str:
    return component_repr(self)


def stateless(function: Callable[[TrainBatch], Array], *, needs_binary: bool = False) -> Advantage:
  """An estimator that depends on the batch only."""

  def update(state: Any, batch: TrainBatch, entropy: Array, solve_rate: Array | None = None) -> Any:
    del batch, entropy, solve_rate
    return state

  return Advantage(
    init=lambda initial_entropy: (),
    apply=lambda state, batch: function(batch),
    update=update,
    metrics=lambda state: {},
    needs_binary=needs_binary,
  )


def as_group(name: str, rewards: Array) -> Array:
  """Rewards [P, G] in at least float32.

  Raises:
    ValueError: G = 1, at trace time, with the estimator's name.
  """
  chex.assert_rank(rewards, 2)
  if rewards.shape[1] < 2:
    raise ValueError(
      f"advantage {name!r} compares the rollouts of one prompt, but the group size G ="
      f" {rewards.shape[1]}; set at least 2 rollouts per prompt, or use 'reinforce'"
    )
  return upcast(rewards)


def group_mean(rewards: Array) -> Array:
  """r̄: f32[P, G] → f32[P, 1]."""
  return jnp.mean(rewards, axis=1, keepdims=True)


def zero_if_constant(coefficients: Array, rewards: Array) -> Array:
  """Coefficients [P, G], exactly 0 in groups whose rewards are all equal.

  By equality: the mean of G copies of 0.1 need not be 0.1, so r − r̄ need not be 0.
  """
  constant = jnp.all(rewards == rewards[:, :1], axis=1, keepdims=True)
  return jnp.where(constant, 0.0, coefficients)
