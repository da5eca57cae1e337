"""The interface of advantage estimators, with helpers for group estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops.component_repr import component_repr
from rlvr_jax.ops.groups import varies
from rlvr_jax.ops.masked import masked_count, masked_fill, upcast
from rlvr_jax.types import MEASURED, RECORDED, Array, Metrics, TrainBatch

NEEDS = (*RECORDED, *MEASURED)  # fields of a batch that an estimator may need
OVER = ("rollouts", "tokens")  # what a statistic of the batch counts


class Advantage(NamedTuple):
  """An estimator as pure functions; its state is part of the train state.

  Attributes:
    init: (initial_entropy f32[], nats per token) → state; () for an estimator without state.
    apply: (state, batch) → coefficients f32[P, G], 0 where `batch.valid` is False. They depend on
      the valid rollouts only. `state` is the one before this update.
    update: (state, batch, entropy f32[], solve_rate=None) → next state. `entropy` is the mean
      per-token entropy of the policy over loss tokens, nats, NaN without one. `solve_rate` is the
      policy's, from *before* any dynamic-sampling filter, NaN if unknown; None computes it from the
      batch.
    metrics: (state, batch) → metrics of the state and of the estimator on the batch.
    needs_binary: whether rewards must be 0 or 1; others are a configuration error.
    needs: fields of the batch that are None unless an estimator names them here, of `NEEDS`.
    per_token: (state, batch, coefficients f32[P, G]) → f32[P, G, T], what the loss gets in place of
      them; or the coefficients themselves, if the batch has no turns. None: all tokens of a rollout
      have its coefficient. A reweighting, or a loss of full responses, is a configuration error
      beside it.
  """

  init: Callable[[Array], Any]
  apply: Callable[[Any, TrainBatch], Array]
  update: Callable[..., Any]
  metrics: Callable[[Any, TrainBatch], Metrics]
  needs_binary: bool = False
  needs: tuple[str, ...] = ()
  per_token: Callable[[Any, TrainBatch, Array], Array] | None = None

  def __repr__(self) -> str:
    return component_repr(self)

  def in_loss(self, state: Any, batch: TrainBatch, coefficients: Array) -> Array:
    """What the loss gets, before a reweighting: f32[P, G], or f32[P, G, T] of `per_token`."""
    return coefficients if self.per_token is None else self.per_token(state, batch, coefficients)


def stateless(
  function: Callable[[TrainBatch], Array],
  *,
  needs_binary: bool = False,
  metrics: Callable[[TrainBatch], Metrics] = lambda batch: {},
) -> Advantage:
  """Makes an estimator without state; arguments as the fields of `Advantage`."""

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


def needed(name: str, batch: TrainBatch, field: str) -> Array:
  """A field of the batch, constant for differentiation, that an estimator needs.

  Args:
    name: the name of the estimator.
    field: one of `NEEDS`.
  Raises:
    ValueError: the batch lacks the field.
  """
  found = getattr(batch, field)
  if found is None:
    raise ValueError(
      f"advantage {name!r} needs batch.{field}, got None; give it, or choose another advantage"
    )
  return jax.lax.stop_gradient(found)


def as_group(name: str, rewards: Array, valid: Array) -> Array:
  """Rewards [P, G] in at least float32, 0 where not valid; for groups of at least two.

  Raises:
    ValueError: at trace time, G = 1; the message names the estimator, `name`.
  """
  chex.assert_rank(rewards, 2)
  chex.assert_equal_shape([rewards, valid])
  if rewards.shape[1] < 2:
    raise ValueError(
      f"advantage {name!r} compares the rollouts of one prompt, but the group size G ="
      f" {rewards.shape[1]}; set config.batch.group_size ≥ 2, or use 'reinforce'"
    )
  return masked_fill(rewards, valid)


def zero_if_constant(coefficients: Array, rewards: Array, valid: Array) -> Array:
  """Coefficients [P, G], exactly 0 in groups whose valid rewards are all equal, or fewer than two.

  Also 0 where not valid. Rewards are compared with one another, since r − r̄ may differ from 0: the
  mean of G copies of 0.1 need not be 0.1.
  """
  return jnp.where(varies(rewards, valid) & (valid > 0), coefficients, 0.0)


def counts_over(batch: TrainBatch, over: str) -> Array:
  """How often each rollout counts in a statistic of the batch, f32[P, G]; 0 where not valid.

  Args:
    over: one of `OVER`. "rollouts": every valid one counts once; "tokens": once per loss token.
  """
  counts = {
    "rollouts": lambda: upcast(batch.valid > 0),
    "tokens": lambda: masked_count(batch.mask, axis=-1),
  }
  return masked_fill(counts[over](), batch.valid)


def batch_moments(x: Array, counts: Array) -> tuple[Array, Array]:
  """(x − μ f32[P, G], σ f32[]), σ unbiased, over a batch; both exactly 0 where its x are all equal.

  Args:
    x: f32[P, G].
    counts: f32[P, G], from `counts_over`.
  """
  x = masked_fill(x, counts)
  total = jnp.maximum(jnp.sum(counts), 1)
  centered = masked_fill(x - jnp.sum(counts * x) / total, counts)
  variance = jnp.sum(counts * jnp.square(centered)) / jnp.maximum(total - 1, 1)
  # Of equal rewards the mean need not be exact.
  differs = varies(x.reshape(1, -1), counts.reshape(1, -1))[0, 0]
  return jnp.where(differs, centered, 0.0), jnp.where(differs, jnp.sqrt(variance), 0.0)
