"""Whether sampler and trainer compute the same log-probabilities from the same parameters."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlvr_jax.rollouts.batch import PolicySnapshot, drop_scores
from rlvr_jax.train.setup.behavior_sources import Source, Sources
from rlvr_jax.train.setup.placement import Placement
from rlvr_jax.types import Array, Params, TrainBatch


class AgreementError(RuntimeError):
  """Sampler and trainer compute different log-probabilities from the same parameters."""


def behavior_gaps(
  batch: TrainBatch,
  mask: np.ndarray,
  policy: PolicySnapshot,
  frozen: Params,
  *,
  sources: Sources,
  placement: Placement,
  behavior_gap: Callable[..., tuple[Array, Array]],
) -> dict[str, float]:
  """Gaps of log-probabilities between sampler and trainer, nats per token, by source.

  The trainer's are those of the forward pass of updates, over packed rows, see `behavior_gap`.

  Args:
    batch: a few groups of every source are compared.
    mask: f32[P, G, T], 1 for every sampled token, whether or not it is in the loss.
    policy: the one that sampled the batch.
    frozen: the parameters that are not trained, on the devices that generate.
    sources, placement: of the run.
    behavior_gap: `Programs.behavior_gap`.
  Returns:
    agreement/SOURCE_mean and agreement/SOURCE_max.
  Raises:
    AgreementError: the gap of a source that samples with the policy's own parameters is too large.
  """
  gaps: dict[str, float] = {}
  sampled_mask: Any = mask
  sampled = dataclasses.replace(drop_scores(batch), mask=sampled_mask)
  start = 0
  for source in sources:
    few = slice(start, start + min(source.prompts, placement.compared_groups))
    start += source.prompts
    rollouts = placement.pack_to_compare(jax.tree.map(operator.itemgetter(few), sampled))
    mean, largest = jax.device_get(
      behavior_gap(policy.params, frozen, rollouts, sampling=source.sampling)
    )
    gaps[f"agreement/{source.name}_mean"] = float(mean)
    gaps[f"agreement/{source.name}_max"] = float(largest)
    _check_gap(source, float(mean), policy.version)
  return gaps


def _check_gap(source: Source, gap: float, version: int) -> None:
  """Raises AgreementError if the gap is larger than the precision of the products explains."""
  if not gap <= source.max_gap:
    raise AgreementError(
      f"sampler and trainer disagree: the log-probabilities that the {source.name} source"
      f" recorded under version {version} of the policy differ by {gap:.2g} nats per token on"
      f" average, allowed are {source.max_gap:.2g}. One of the two does not compute the model's"
      " distribution; if the difference is rounding, raise config.max_behavior_gap"
    )
