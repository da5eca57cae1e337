"""OTB: a baseline for each token position, chosen to minimize the gradient's variance."""

from __future__ import annotations

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, as_group, needed, stateless, zero_if_constant
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.ops.masked import masked_fill, masked_mean, mean_metric
from rlvr_jax.ops.ratios import log_ratios, sequence_log_ratios
from rlvr_jax.types import Array, Metrics, TrainBatch

LEVELS = ("token", "sequence")
EPSILON = 1e-8  # added to the sum of energies


def token_energies(logprobs: Array, squared_probabilities: Array) -> Array:
  """e = 1 − 2π(y) + Σ_v π(v)²: the squared norm of ∇log π(y) with respect to the logits.

  Args:
    logprobs: [...], log π(y), nats.
    squared_probabilities: [...], Σ_v π(v)².
  Returns:
    [...], e in [0, 2), in at least float32.
  """
  return jnp.maximum(1 - 2 * jnp.exp(logprobs) + squared_probabilities, 0.0)


def otb_advantages(
  rewards: Array,
  energies: Array,
  mask: Array,
  valid: Array,
  *,
  zero_tail: bool = True,
  zero_constant: bool = True,
) -> Array:
  """A_t = r − Σ_i E_it·r_i/(Σ_i E_it + 1e-8); E_it sums the energies of rollout i up to token t.

  The sums are over the rollouts of the group that have a t-th loss token. The index t counts
  only loss tokens, so that an environment's tokens do not shift the comparison.

  Args:
    rewards: f32[P, G].
    energies: f32[P, G, T], e of each token.
    mask: [P, G, T], loss tokens.
    valid: bool[P, G].
    zero_tail: whether the baseline is 0 at tokens that only one rollout of the group reaches;
      otherwise the baseline there is the rollout's own reward, so that A = 0.
    zero_constant: whether A = 0 in a group whose rewards are all equal, also at tokens that only
      one rollout reaches.
  Returns:
    f32[P, G, T], 0 at tokens that are not in the loss.
  Source: "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL"
    (arXiv:2602.07078); verl 0.9.1, `core_algos.py`.
  """
  rewards = as_group("otb", rewards, valid)
  chex.assert_equal_shape([energies, mask])
  counted = (mask > 0) & (valid > 0)[..., None]
  rewards = rewards[..., None]
  weights = _by_number(jnp.cumsum(masked_fill(energies, counted), axis=-1), counted)
  total = jnp.sum(weights, axis=1, keepdims=True) + EPSILON
  baselines = _at_tokens(jnp.sum(weights * rewards, axis=1, keepdims=True) / total, counted)
  own = jnp.zeros_like(rewards) if zero_tail else rewards
  advantages = rewards - jnp.where(in_tail(counted), own, baselines)
  if zero_constant:
    advantages = zero_if_constant(advantages, rewards, (valid > 0)[..., None])
  return masked_fill(advantages, counted)


def in_tail(counted: Array) -> Array:
  """Whether a token lies beyond the loss tokens of all other rollouts of its group.

  Args:
    counted: bool[P, G, T], loss tokens of valid rollouts.
  Returns:
    bool[P, G, T]; arbitrary at tokens that are not counted.
  """
  reached = jnp.arange(counted.shape[-1]) < jnp.sum(counted, axis=-1, keepdims=True)
  return _at_tokens(jnp.sum(reached, axis=1, keepdims=True) == 1, counted)


def _by_number(values: Array, counted: Array) -> Array:
  """Moves the values of a rollout's counted tokens to the front, in order, and pads with zeros."""
  places = jnp.where(counted, _numbers(counted), counted.shape[-1])
  lay = lambda values, places: jnp.zeros_like(values).at[places].set(values, mode="drop")
  return jax.vmap(jax.vmap(lay))(values, places)


def _at_tokens(values: Array, counted: Array) -> Array:
  """The inverse of `_by_number`, for values [P, 1, T] that the rollouts of a group share."""
  values = jnp.broadcast_to(values, counted.shape)
  return jnp.take_along_axis(values, jnp.maximum(_numbers(counted), 0), axis=-1)


def _numbers(counted: Array) -> Array:
  """The index of each counted token among the counted tokens of its rollout."""
  return jnp.cumsum(counted, axis=-1) - 1


def otb(
  *,
  truncation: float | None = None,
  level: str = "token",
  zero_tail: bool = True,
  zero_constant: bool = True,
) -> Advantage:
  """A_t = r − Σ_i E_it·r_i/Σ_i E_it with E_it = Σ_{s≤t} w²·(1 − 2π(y_s) + Σ_v π(v)²).

  Each token of a response has its own baseline. This baseline minimizes the variance of the policy
  gradient if E_it is the squared norm of the gradient of response i up to token t. π is the policy
  before the update. Its log-probabilities need no extra forward pass if the batch is one
  micro-batch. Metrics of a rollout's coefficient use the mean of A_t over the rollout's tokens.

  Args:
    truncation: c > 0 in the loss's weights w = min(π/β, c) (`config.correction`); None sets w = 1,
      for rollouts sampled from the policy itself.
    level: "token", where π/β is the ratio of one token; or "sequence", where π/β is the product of
      the ratios of the response's tokens.
    zero_tail: whether the baseline is 0 beyond the end of the second longest response, as in verl;
      otherwise A = 0 beyond this end.
    zero_constant: whether A = 0 in a group with equal rewards. If False, the longest response has A
      = r beyond the end of the second longest, as in verl.
  Source: "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL"
    (arXiv:2602.07078); verl 0.9.1, `core_algos.py`.
  """
  if truncation is not None:
    check_between("otb", "truncation", truncation, low=0.0, open_low=True)
  check_choice("otb", "level", level, LEVELS)
  if level != "token" and truncation is None:
    raise ValueError(
      f"otb: level = {level!r} has no effect with truncation = None, where all weights are 1; set"
      " truncation, or leave level out"
    )
  check_choice("otb", "zero_tail", zero_tail, (True, False))
  check_choice("otb", "zero_constant", zero_constant, (True, False))
  names = ("policy_logprobs", "squared_probabilities")

  def energies(batch: TrainBatch) -> Array:
    logprobs, squares = (masked_fill(needed("otb", batch, name), batch.mask) for name in names)
    found = token_energies(logprobs, squares)
    if truncation is None:
      return found
    log_weights = log_ratios(logprobs, batch.behavior_logprobs, batch.mask)
    if level == "sequence":
      log_weights = sequence_log_ratios(log_weights, batch.mask)
    return found * jnp.exp(2 * jnp.minimum(log_weights, math.log(truncation)))

  def per_token(state: Any, batch: TrainBatch, coefficients: Array | None = None) -> Array:
    del state, coefficients
    return otb_advantages(
      batch.rewards,
      energies(batch),
      batch.mask,
      batch.valid,
      zero_tail=zero_tail,
      zero_constant=zero_constant,
    )

  def mean_of_rollout(batch: TrainBatch) -> Array:
    return masked_mean(per_token((), batch), batch.mask, axis=-1)

  def metrics(batch: TrainBatch) -> Metrics:
    counted = (batch.mask > 0) & (batch.valid > 0)[..., None]
    return {
      "advantage/energy": mean_metric(energies(batch), counted),
      "advantage/tail": mean_metric(in_tail(counted), counted),
    }

  return stateless(mean_of_rollout, metrics=metrics)._replace(needs=names, per_token=per_token)
