"""The interface of advantage estimators, and helpers that the group estimators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax.numpy as jnp

from rlvr_jax.ops.component_repr import component_repr
from rlvr_jax.ops.groups import varies
from rlvr_jax.ops.masked import masked_fill
from rlvr_jax.types import Array, Metrics, TrainBatch


class Advantage(NamedTuple):
  """An estimator as pure functions; its state is part of the train state.

  Attributes:
    init: (initial_entropy f32[], nats per token) → state, () when there is none.
    apply: (state, batch) → coefficients f32[P, G], 0 where `batch.valid` is False. They are those
      of the valid rollouts alone. `state` is the one before this update.
    update: (state, batch, entropy f32[], solve_rate=None) → next state. `entropy` is the mean
      per-token entropy of the policy over loss tokens, nats. `solve_rate` is the policy's, from
      *before* any dynamic-sampling filter, NaN if it is unknown; None takes it from the batch.
    metrics: (state, batch) → metrics of the state, and of how the estimator takes the batch.
    needs_binary: True if only rewards of 0 and 1 make sense; others are a configuration error.
  """

  init: Callable[[Array], Any]
  apply: Callable[[Any, TrainBatch], Array]
  update: Callable[..., Any]
  metrics: Callable[[Any, TrainBatch], Metrics]
  needs_binary: bool = False

  def __repr__(self) -> str:
    return component_repr(self)


def stateless(
  function: Callable[[TrainBatch], Array],
  *,
  needs_binary: bool = False,
  metrics: Callable[[TrainBatch], Metrics] = lambda batch: {},
) -> Advantage:
  """An estimator that depends on the batch only; arguments as the fields of `Advantage`."""

  def update(state: Any, batch: TrainBatch, entropy: Array, solve_rate: Array | None = None) -> Any:
    del batch, entropy, solve_rate
    return state

  return Advantage(
    init=lambda initial_entropy: (),
    apply=lambda state, batch: function(batch),
    update=update,
    metrics=lambda state, batch: metrics(batch),
    needs_binary=needs_binary,
  )


def as_group(name: str, rewards: Array, valid: Array) -> Array:
  """Rewards [P, G] in at least float32, 0 where not valid.

  Raises:
    ValueError: G = 1, at trace time, with the estimator's name.
  """
  chex.assert_rank(rewards, 2)
  chex.assert_equal_shape([rewards, valid])
  if rewards.shape[1] < 2:
    raise ValueError(
      f"advantage {name!r} compares the rollouts of one prompt, but the group size G ="
      f" {rewards.shape[1]}; set at least 2 rollouts per prompt, or use 'reinforce'"
    )
  return masked_fill(rewards, valid)


def zero_if_constant(coefficients: Array, rewards: Array, valid: Array) -> Array:
  """Coefficients [P, G], exactly 0 in groups whose valid rewards are all equal, or fewer than two.

  And 0 where not valid. By equality: the mean of G copies of 0.1 need not be 0.1, so r − r̄ need not
  be 0.
  """
  return jnp.where(varies(rewards, valid) & (valid > 0), coefficients, 0.0)
