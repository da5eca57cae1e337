"""Ratios ρ = π/β of policy and behavior policy, per token and response, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops import kl
from rlvr_jax.ops.groups import group_mean
from rlvr_jax.ops.masked import (
  for_tokens,
  masked_count,
  masked_fill,
  masked_max,
  masked_min,
  masked_sum,
  mean_metric,
)
from rlvr_jax.types import Array, EffectiveSampleSize, Max, Metrics, Min, TrainBatch


def log_ratios(logprobs: Array, other_logprobs: Array, mask: Array) -> Array:
  """Log of the token ratio, log π − log β.

  Args:
    logprobs: f32[..., T], log π, nats.
    other_logprobs: f32[..., T], log β, nats.
    mask: [..., T], response tokens.
  Returns:
    f32[..., T], nats; exactly 0 where masked (a ratio of 1), whatever the inputs are there.
  """
  chex.assert_equal_shape([logprobs, other_logprobs, mask])
  return masked_fill(logprobs, mask) - masked_fill(other_logprobs, mask)


def sequence_log_ratios(log_ratios: Array, mask: Array) -> Array:
  """log Π_t ρ_t of each response: f32[..., T] → f32[..., 1]; 0 for an empty response."""
  return jnp.sum(masked_fill(log_ratios, mask), axis=-1, keepdims=True)


def mean_log_ratios(log_ratios: Array, mask: Array) -> Array:
  """Log of the geometric mean of ρ over each response: f32[..., T] → f32[..., 1]."""
  tokens = masked_count(mask, axis=-1)[..., None]
  return sequence_log_ratios(log_ratios, mask) / jnp.maximum(tokens, 1)


def effective_sample_size(weights: Array, mask: Array) -> EffectiveSampleSize:
  """The sums Σ w, Σ w² and n over the kept entries, which add up across micro-batches."""
  return EffectiveSampleSize(
    total=masked_sum(weights, mask),
    total_squares=masked_sum(jnp.square(masked_fill(weights, mask)), mask),
    count=masked_count(mask),
  )


def normalized_ess(log_weights: Array, mask: Array, axis: int | None = None) -> Array:
  """(Σ w)²/(n·Σ w²) from log w, in [1/n, 1]; 1 if no entry is kept.

  The largest weight is divided out first, so that squares neither overflow nor vanish.

  Args:
    log_weights: f32[...], nats.
    mask: [...], entries to keep.
    axis: reduced axis, kept with size 1; None reduces all to a scalar.
  Source: "A Note on Importance Sampling using Standardized Weights" (Kong 1992).
  """
  keepdims = axis is not None
  is_kept = mask > 0
  log_weights = masked_fill(log_weights, mask)
  largest = jnp.max(log_weights, axis=axis, keepdims=True, where=is_kept, initial=-jnp.inf)
  # If no entry is kept, largest = −inf; the entries are dropped below.
  weights = jnp.where(is_kept, jnp.exp(log_weights - jnp.where(is_kept, largest, 0.0)), 0.0)
  count = jnp.sum(is_kept, axis=axis, keepdims=keepdims).astype(weights.dtype)
  total = jnp.sum(weights, axis=axis, keepdims=keepdims)
  squares = jnp.sum(jnp.square(weights), axis=axis, keepdims=keepdims)
  empty = count == 0
  return jnp.where(empty, 1.0, jnp.square(total) / jnp.where(empty, 1.0, count * squares))


def behavior_metrics(policy_logprobs: Array, batch: TrainBatch) -> Metrics:
  """Distance of the policy from β, over the loss tokens of a batch or micro-batch.

  The tokens come from β, so the KL is KL(β‖π), of which k1 and k3 are unbiased estimates.

  Args:
    policy_logprobs: f32[P, G, T], nats, under the parameters being updated.
  Returns:
    behavior/ratio_mean, ratio_max, ess (in [1/n, 1]), kl_k1 and kl_k3 (nats per token).
  """
  chex.assert_rank(policy_logprobs, 3)
  mask = batch.mask
  policy_logprobs = jax.lax.stop_gradient(policy_logprobs)
  ratios = jnp.exp(log_ratios(policy_logprobs, batch.behavior_logprobs, mask))
  estimates = {
    f"behavior/kl_{name}": mean_metric(k(batch.behavior_logprobs, policy_logprobs, mask), mask)
    for name, k in (("k1", kl.k1), ("k3", kl.k3))
  }
  return {
    "behavior/ratio_mean": mean_metric(ratios, mask),
    "behavior/ratio_max": Max(value=masked_max(ratios, mask, initial=-jnp.inf)),
    "behavior/ess": effective_sample_size(ratios, mask),
    **estimates,
  }


def ratios_by_sign(policy_logprobs: Array, batch: TrainBatch, coefficients: Array) -> Metrics:
  """Statistics of ρ by the sign of the coefficient: mean, max, min.

  Args:
    policy_logprobs: f32[P, G, T], nats, under the parameters being updated.
    coefficients: f32[P, G] or f32[P, G, T], A, as given to the loss.
  Returns:
    behavior/ratio_mean_positive, _max_positive, _min_positive, and the same metrics with _negative.
  """
  chex.assert_rank([policy_logprobs, coefficients], [3, {2, 3}])
  policy_logprobs = jax.lax.stop_gradient(policy_logprobs)
  ratios = jnp.exp(log_ratios(policy_logprobs, batch.behavior_logprobs, batch.mask))
  metrics: Metrics = {}
  for sign, by_sign in (("positive", coefficients > 0), ("negative", coefficients < 0)):
    tokens = (batch.mask > 0) & for_tokens(by_sign)
    metrics |= {
      f"behavior/ratio_mean_{sign}": mean_metric(ratios, tokens),
      f"behavior/ratio_max_{sign}": Max(value=masked_max(ratios, tokens, initial=-jnp.inf)),
      f"behavior/ratio_min_{sign}": Min(value=masked_min(ratios, tokens, initial=jnp.inf)),
    }
  return metrics


def lag_metrics(batch: TrainBatch) -> Metrics:
  """staleness/mean and staleness/max: the lag, in updates, of loss tokens that this run sampled."""
  lags = jnp.asarray(batch.lags)
  from_this_run = (batch.mask > 0) & (lags >= 0)
  lags = lags.astype(jnp.float32)
  return {
    "staleness/mean": mean_metric(lags, from_this_run),
    "staleness/max": Max(value=masked_max(lags, from_this_run, initial=-jnp.inf)),
  }


def source_metrics(policy_logprobs: Array, batch: TrainBatch, names: Sequence[str]) -> Metrics:
  """For each source: its share of loss tokens, its solve rate and the policy's distance from it.

  A source is where some groups of the batch come from: the trained policy, another policy or a
  store. The solve rate is computed as in `update_metrics.batch_metrics`.

  Args:
    policy_logprobs: f32[P, G, T], nats, under the parameters being updated.
    names: names of the sources, in the order of their indices in `batch.sources`.
  Returns:
    source/NAME/token_share, pass_rate, ratio_mean, ess and kl_k3 (nats per token).
  """
  policy_logprobs = jax.lax.stop_gradient(policy_logprobs)
  log_ratio = log_ratios(policy_logprobs, batch.behavior_logprobs, batch.mask)
  divergence = kl.k3(batch.behavior_logprobs, policy_logprobs, batch.mask)
  metrics: Metrics = {}
  for number, name in enumerate(names):
    groups = jnp.asarray(batch.sources) == number
    tokens = (batch.mask > 0) & groups[:, None, None]
    graded = groups & jnp.any(batch.valid > 0, axis=1)
    metrics |= {
      f"source/{name}/token_share": mean_metric(tokens, batch.mask),
      f"source/{name}/pass_rate": mean_metric(group_mean(batch.correct, batch.valid)[:, 0], graded),
      f"source/{name}/ratio_mean": mean_metric(jnp.exp(log_ratio), tokens),
      f"source/{name}/ess": effective_sample_size(jnp.exp(log_ratio), tokens),
      f"source/{name}/kl_k3": mean_metric(divergence, tokens),
    }
  return metrics
