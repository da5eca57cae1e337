"""Metrics that every update reports, independent of the method."""

from __future__ import annotations

import math

import jax.numpy as jnp

from rlvr_jax.ops.groups import group_mean, varies
from rlvr_jax.ops.masked import mean_metric
from rlvr_jax.ops.ratios import behavior_metrics, lag_metrics, ratios_by_sign, source_metrics
from rlvr_jax.ops.row_blocks import short_row
from rlvr_jax.types import Array, Mean, Metrics, Packed, TrainBatch


def batch_metrics(batch: TrainBatch) -> Metrics:
  """Metrics of the rewards, groups and lengths of a full batch.

  Rewards and solve rates are averaged over the valid rollouts of each group, then over groups.
  Groups without a valid rollout do not count.
  """
  valid = batch.valid > 0
  has_valid = jnp.any(valid, axis=1)
  count = has_valid.astype(jnp.float32).sum()
  share = lambda groups: Mean(total=(groups & has_valid).astype(jnp.float32).sum(), weight=count)
  mean_over_groups = lambda x: Mean(total=group_mean(x, valid).sum(), weight=count)
  answered = jnp.any(batch.mask > 0, axis=-1).astype(jnp.float32)
  metrics: Metrics = {
    "reward/mean": mean_over_groups(batch.rewards),
    "reward/pass_rate": mean_over_groups(batch.correct),
    "groups/effective": share(varies(batch.rewards, valid)[:, 0]),
    "groups/all_correct": share(jnp.all(batch.correct == 1, axis=1, where=valid)),
    "groups/all_wrong": share(jnp.all(batch.correct == 0, axis=1, where=valid)),
    "response/length": Mean(total=batch.mask.sum(), weight=answered.sum()),
  }
  if batch.packed is not None:
    metrics |= _row_metrics(batch.packed)
  return metrics


def _row_metrics(packed: Packed) -> Metrics:
  """The number of micro-batches of a batch, and the fraction of their positions with a token."""
  count = jnp.asarray(packed.num_micro_batches, jnp.float32)
  filled_places = (packed.rows.prompts >= 0).astype(jnp.float32).sum()
  places = count * math.prod(packed.tokens.shape[1:])
  if packed.num_short is not None:
    _, rows, length = packed.tokens.shape
    places -= jnp.asarray(packed.num_short, jnp.float32) * rows * (length - short_row(length))
  return {
    "rows/micro_batches": Mean(total=count, weight=jnp.float32(1)),
    "rows/filled": Mean(total=filled_places, weight=places),
  }


def policy_metrics(
  logprobs: Array,
  entropy: Array,
  batch: TrainBatch,
  coefficients: Array,
  sources: tuple[str, ...],
) -> Metrics:
  """Metrics of one micro-batch: the policy's entropy and distance from the behavior policy.

  Args:
    logprobs, entropy: f32[P, G, T], the policy's log-probabilities and entropies.
    coefficients: f32[P, G] or f32[P, G, T], as given to the loss.
    sources: names of the policies that sampled the rollouts; if there are several, some metrics
      are also reported per source.
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
