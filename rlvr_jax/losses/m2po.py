"""M2PO: the batch's clip interval follows from a budget on the second moment of log ρ."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, Tokens, clip_metrics, prepare_tokens
from rlvr_jax.losses.ppo_clip import clipped_surrogate
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.masked import masked_mean
from rlvr_jax.types import Array, Mean, Metrics, TrainBatch


class Interval(NamedTuple):
  """The clip interval of ρ for the full batch; `m2po` says which tokens are harmful."""

  low: Array  # f32[], the lower end; 0 if nothing is clipped
  high: Array  # f32[], the upper end; inf if nothing is clipped
  second_moment: Array  # f32[], mean (log ρ)² of harmful tokens, nats²


def second_moment_threshold(squares: Array, harmful: Array, *, budget: float) -> Array:
  """The largest t² among the n harmful Δ² with Σ min(Δ², t²) < τn; 0 if no Δ² satisfies this.

  Args:
    squares: f32[...], Δ² = (log ρ)², nats².
    harmful: bool[...], the tokens to count.
    budget: τ, nats².
  Returns:
    f32[], nats².
  """
  ascending = jnp.sort(jnp.where(harmful, squares, jnp.inf), axis=None)
  count = jnp.sum(harmful)
  rank = jnp.arange(1, ascending.size + 1)
  ascending = jnp.where(rank <= count, ascending, 0.0)
  bounded_sum = jnp.cumsum(ascending) + (count - rank) * ascending
  fits = (rank <= count) & (bounded_sum < budget * count)
  return jnp.max(jnp.where(fits, ascending, 0.0))


def clip_interval(
  tokens: Tokens, *, budget: float, min_epsilon_low: float, min_epsilon_high: float
) -> Interval:
  """The interval of M2PO from all tokens of a batch; see `m2po`."""
  harmful = (tokens.mask > 0) & (tokens.coefficients * tokens.log_ratios > 0)
  squares = jnp.square(tokens.log_ratios)
  second_moment = masked_mean(squares, harmful)
  threshold = second_moment_threshold(squares, harmful, budget=budget)
  # Slightly less than t², so that rounding cannot exempt the token at t² from clipping. The
  # authors' code subtracts 1e-12.
  margin = jnp.maximum(1e-12, 64 * jnp.finfo(threshold.dtype).eps * threshold)
  bound = jnp.sqrt(jnp.maximum(threshold - margin, 0.0))
  within_budget = second_moment <= budget  # true without harmful tokens: the mean is then 0
  return Interval(
    low=jnp.where(within_budget, 0.0, jnp.minimum(jnp.exp(-bound), 1 - min_epsilon_low)),
    high=jnp.where(within_budget, jnp.inf, jnp.maximum(jnp.exp(bound), 1 + min_epsilon_high)),
    second_moment=second_moment,
  )


def m2po(
  *, budget: float = 0.04, min_epsilon_low: float = 0.3, min_epsilon_high: float = 0.5
) -> Loss:
  """`ppo_clip` with a clip interval that follows from a budget τ on the mean (log ρ)².

  ρ = π/β. Harmful tokens have A > 0 and ρ > 1, or A < 0 and ρ < 1. If the mean of (log ρ)² over the
  batch's harmful tokens is at most τ, nothing is clipped. Otherwise the interval is
  [min(e^−t, 1 − min_epsilon_low), max(e^t, 1 + min_epsilon_high)], with t² from
  `second_moment_threshold` over the full batch.

  Args:
    budget: τ > 0, nats².
    min_epsilon_low: in [0, 1]; the lower end is at most 1 − min_epsilon_low.
    min_epsilon_high: ≥ 0; the upper end is at least 1 + min_epsilon_high.
  Source: "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?"
    (arXiv:2510.01161).
  """
  check_between("m2po", "budget", budget, low=0.0, open_low=True)
  check_between("m2po", "min_epsilon_low", min_epsilon_low, low=0.0, high=1.0)
  check_between("m2po", "min_epsilon_high", min_epsilon_high, low=0.0)

  def statistics(policy_logprobs: Array, batch: TrainBatch, coefficients: Array) -> Interval:
    tokens = prepare_tokens(jax.lax.stop_gradient(policy_logprobs), batch, coefficients)
    return clip_interval(
      tokens,
      budget=budget,
      min_epsilon_low=min_epsilon_low,
      min_epsilon_high=min_epsilon_high,
    )

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Interval
  ) -> tuple[Array, Metrics]:
    tokens = prepare_tokens(policy_logprobs, batch, coefficients)
    interval = jax.lax.stop_gradient(statistics)
    losses, clipped = clipped_surrogate(
      tokens.log_ratios, tokens.coefficients, low=interval.low, high=interval.high
    )
    active = jnp.isfinite(interval.high)
    one = jnp.ones_like(interval.low)
    return losses, {
      **clip_metrics(clipped, tokens),
      "loss/second_moment": Mean(total=interval.second_moment, weight=one),
      "loss/clip_active": Mean(total=one * active, weight=one),
      # These metrics are means over the updates that clip.
      "loss/clip_low": Mean(total=interval.low * active, weight=one * active),
      "loss/clip_high": Mean(total=jnp.where(active, interval.high, 0.0), weight=one * active),
    }

  return Loss(per_token, statistics)
