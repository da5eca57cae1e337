"""The interface of advantage estimators, and helpers for estimators that use groups."""

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
    init: (initial_entropy f32[], nats per token) → state, which is () for an estimator without
      state.
    apply: (state, batch) → coefficients f32[P, G], 0 where `batch.valid` is False. The coefficients
      depend on the valid rollouts only. `state` is the state before this update.
    update: (state, batch, entropy f32[], solve_rate=None) → next state. `entropy` is the mean
      per-token entropy of the policy over loss tokens, nats; NaN if there is no loss token.
      `solve_rate` is the policy's solve rate *before* any dynamic-sampling filter, NaN if unknown;
      if it is None, `update` computes it from the batch.
    metrics: (state, batch) → metrics of the state, and metrics that the estimator computes from the
      batch.
    needs_binary: whether rewards must be 0 or 1; other rewards are then a configuration error.
    needs: the optional fields of the batch, from `NEEDS`, that the estimator reads. Other optional
      fields may be None.
    per_token: (state, batch, coefficients f32[P, G]) → the loss's coefficients f32[P, G, T]. An
      estimator that compares turns returns `coefficients` unchanged if the batch has no turns.
      None: a rollout's coefficient applies to all its tokens. `per_token` cannot be combined with a
      reweighting or with a loss of full responses, such as `gmpo`: this is a configuration error.
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
    """The loss's coefficients before a reweighting: f32[P, G], or f32[P, G, T] from `per_token`."""
    return coefficients if self.per_token is None else self.per_token(state, batch, coefficients)


def stateless(
  function: Callable[[TrainBatch], Array],
  *,
  needs_binary: bool = False,
  metrics: Callable[[TrainBatch], Metrics] = lambda batch: {},
) -> Advantage:
  """Makes an estimator without state.

  Args:
    function: `Advantage.apply` as a function of the batch alone.
    needs_binary: see `Advantage`.
    metrics: `Advantage.metrics` as a function of the batch alone.
  """

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
  """A field of the batch that an estimator needs; no gradient flows through the result.

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
  """Rewards [P, G] in at least float32, 0 for rollouts that are not valid.

  Raises:
    ValueError: at trace time, if G = 1; the message names the estimator, `name`.
  """
  chex.assert_rank(rewards, 2)
  chex.assert_equal_shape([rewards, valid])
  if rewards.shape[1] < 2:
    raise ValueError(
      f"advantage {name!r} compares the rollouts of one prompt, but the group size is G ="
      f" {rewards.shape[1]}; set config.batch.group_size ≥ 2, or use advantage 'reinforce'"
    )
  return masked_fill(rewards, valid)


def zero_if_constant(coefficients: Array, rewards: Array, valid: Array) -> Array:
  """Coefficients [P, G], set to exactly 0 in groups without two different valid rewards.

  The coefficients of rollouts that are not valid are also 0. Rewards are compared with one another,
  not with their mean r̄: because of rounding, the mean of G copies of 0.1 need not be 0.1.
  """
  return jnp.where(varies(rewards, valid) & (valid > 0), coefficients, 0.0)


def counts_over(batch: TrainBatch, over: str) -> Array:
  """How often each rollout counts in a statistic of the batch, f32[P, G]; 0 if it is not valid.

  Args:
    over: one of `OVER`. "rollouts": every valid rollout counts once; "tokens": a valid rollout
      counts once for each of its loss tokens.
  """
  counts = {
    "rollouts": lambda: upcast(batch.valid > 0),
    "tokens": lambda: masked_count(batch.mask, axis=-1),
  }
  return masked_fill(counts[over](), batch.valid)


def batch_moments(x: Array, counts: Array) -> tuple[Array, Array]:
  """x − μ, f32[P, G], and σ, f32[]: mean μ and unbiased standard deviation σ of x over the batch.

  If all x with a count above 0 are equal, x − μ and σ are exactly 0.

  Args:
    x: f32[P, G].
    counts: f32[P, G], from `counts_over`.
  """
  x = masked_fill(x, counts)
  total = jnp.maximum(jnp.sum(counts), 1)
  centered = masked_fill(x - jnp.sum(counts * x) / total, counts)
  variance = jnp.sum(counts * jnp.square(centered)) / jnp.maximum(total - 1, 1)
  # The mean of equal rewards need not be exact.
  differs = varies(x.reshape(1, -1), counts.reshape(1, -1))[0, 0]
  return jnp.where(differs, centered, 0.0), jnp.where(differs, jnp.sqrt(variance), 0.0)
