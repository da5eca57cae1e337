"""Whether sampler and trainer compute the same log-probabilities from the same parameters."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from rlvr_jax.rollouts.batch import PolicySnapshot
from rlvr_jax.train.setup.behavior_sources import Source, max_gap
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.types import Params, TrainBatch


class AgreementError(RuntimeError):
  """Sampler and trainer compute different log-probabilities from the same parameters."""


def behavior_gaps(
  parts: Parts, batch: TrainBatch, mask: np.ndarray, policy: PolicySnapshot, frozen: Params
) -> dict[str, float]:
  """Gaps of log-probabilities between sampler and trainer, nats per token, by source.

  Args:
    parts: of the run.
    batch: a few groups of every source are compared.
    mask: f32[P, G, T], 1 for every sampled token, whether or not it is in the loss.
    policy: the one that sampled the batch.
    frozen: the parameters that are not trained, on the devices that generate.
  Returns:
    agreement/SOURCE_mean and agreement/SOURCE_max.
  Raises:
    AgreementError: the gap of a source that samples with the policy's own parameters is too large.
  """
  gaps: dict[str, float] = {}
  start = 0
  for source in parts.sources:
    few = slice(start, start + min(source.prompts, parts.gap_prompts))
    start += source.prompts
    rollouts: Any = (batch.prompts, batch.tokens, mask, batch.behavior_logprobs)
    here = parts.to_generation(jax.tree.map(lambda x, few=few: x[few], rollouts))
    mean, largest = jax.device_get(
      parts.programs.behavior_gap(policy.params, frozen, *here, sampling=source.sampling)
    )
    gaps[f"agreement/{source.name}_mean"] = float(mean)
    gaps[f"agreement/{source.name}_max"] = float(largest)
    _check_gap(parts, source, float(mean), policy.version)
  return gaps


def _check_gap(parts: Parts, source: Source, gap: float, version: int) -> None:
  """Raises AgreementError if the source must agree with the trainer and does not."""
  network = parts.model.config
  bound = max_gap(parts.config, network, source)
  if not gap <= (bound if source.exact else sys.float_info.max):
    raise AgreementError(
      f"sampler and trainer disagree: the log-probabilities that the {source.name} source"
      f" recorded under version {version} of the policy differ by {gap:.2g} nats per token on"
      f" average, allowed are {bound:.2g} in {network.compute_dtype}. One of the two does not"
      " compute the model's distribution; if the difference is rounding, raise"
      " config.max_behavior_gap"
    )
