"""Metrics that every update reports, whatever its method."""

from __future__ import annotations

import math

import jax.numpy as jnp

from rlvr_jax.ops.masked import mean_metric
from rlvr_jax.ops.ratios import behavior_metrics, lag_metrics, ratios_by_sign, source_metrics
from rlvr_jax.types import Array, Mean, Metrics, Packed, TrainBatch


def batch_metrics(batch: TrainBatch) -> Metrics:
  """Rewards, groups and lengths of a full batch."""
  count = jnp.float32(batch.rewards.shape[0])
  share = lambda groups: Mean(total=groups.astype(jnp.float32).sum(), weight=count)
  solved = batch.correct.mean(axis=1)
  answered = jnp.any(batch.mask > 0, axis=-1).astype(jnp.float32)
  metrics: Metrics = {
    "reward/mean": Mean(total=batch.rewards.mean(axis=1).sum(), weight=count),
    "reward/pass_rate": Mean(total=solved.sum(), weight=count),
    "groups/effective": share(jnp.any(batch.rewards != batch.rewards[:, :1], axis=1)),
    "groups/all_correct": share(solved == 1),
    "groups/all_wrong": share(solved == 0),
    "response/length": Mean(total=batch.mask.sum(), weight=answered.sum()),
  }
  if batch.packed is not None:
    metrics |= _row_metrics(batch.packed)
  return metrics


def _row_metrics(packed: Packed) -> Metrics:
  """Number of micro-batches of a batch, and the share of their positions that is not padding."""
  count = jnp.asarray(packed.num_micro_batches, jnp.float32)
  held = (packed.rows.prompts >= 0).astype(jnp.float32).sum()
  places = count * math.prod(packed.tokens.shape[1:])
  return {
    "rows/micro_batches": Mean(total=count, weight=jnp.float32(1)),
    "rows/filled": Mean(total=held, weight=places),
  }


def policy_metrics(
  logprobs: Array,
  entropy: Array,
  batch: TrainBatch,
  coefficients: Array,
  sources: tuple[str, ...],
) -> Metrics:
  """Differences of the policy and the behavior policy of one micro-batch, and the entropy.

  Args:
    logprobs, entropy: f32[P, G, T], of the policy.
    coefficients: f32[P, G], as given to the loss.
    sources: names of the policies that sampled the rollouts; several are reported separately.
  """
  metrics = {
    **behavior_metrics(logprobs, batch),
    **ratios_by_sign(logprobs, batch, coefficients),
    "policy/entropy": mean_metric(entropy, batch.mask),
  }
  if batch.lags is not None:
    metrics |= lag_metrics(batch)
  if len(sources) > 1:
    metrics |= source_metrics(logprobs, batch, sources)
  return metrics
