"""Behavior log-probabilities as some inference servers record them: of the policy, not the sampler.

A deliberate violation for experiments: the ratio to them does not see the temperature of sampling.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax
import numpy as np

from rlvr_jax.rollouts.batch import Graded
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.reporting.progress import warn
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.types import Params, Prompts


def announce(parts: Parts) -> None:
  """Says at the start of a run that it records raw log-probabilities."""
  for source in parts.sources:
    if source.raw:
      warn(
        f"config.sources.{source.name}.recorded = raw: the behavior log-probabilities of"
        f" rollouts sampled at temperature {source.sampling.temperature:g} are the policy's at"
        " temperature 1, as some inference servers record them; ratios ignore the temperature"
      )


def with_raw(
  graded: Graded, mask: np.ndarray, parts: Parts, params: Params, frozen: Params
) -> Graded:
  """Makes raw log-probabilities the behavior policy's, for the sources that are to record those.

  The batch keeps both. What was sampled from has been compared with the trainer before.

  Args:
    graded: of all sources.
    mask: f32[P, G, T], 1 for every sampled token, whether or not it is in the loss.
    parts: of the run.
    params, frozen: of the policy that sampled the batch, on the devices that generate.
  """
  if not any(source.raw for source in parts.sources):
    return graded
  batch, gaps, end = graded.train, {}, 0
  recorded: Any = np.array(batch.behavior_logprobs)
  for source in parts.sources:
    start, end = end, end + source.prompts
    if source.raw:
      own = jax.tree.map(operator.itemgetter(slice(start, end)), (batch.prompts, batch.tokens))
      raw = np.where(mask[start:end] > 0, _unheated(own, parts, params, frozen), 0.0)
      difference = np.abs(raw - recorded[start:end]).sum()
      gaps[f"source/{source.name}/raw_gap"] = float(difference / mask[start:end].sum())
      recorded[start:end] = raw
  exact = batch.behavior_logprobs
  train = dataclasses.replace(batch, behavior_logprobs=recorded, sampled_logprobs=exact)
  return graded._replace(train=train, statistics=graded.statistics | gaps)


def _unheated(
  rollouts: tuple[Prompts, Any], parts: Parts, params: Params, frozen: Params
) -> np.ndarray:
  """f32[P, G, T], log-probabilities of (prompts, tokens) at temperature 1, a few at a time."""
  c = parts.config
  of_group = c.batch.group_size * (c.max_prompt_length + c.max_response_length)
  size = max(c.batch.tokens_per_micro_batch // of_group, 1) * parts.placement.gap_prompts
  found = []
  for first in range(0, len(rollouts[1]), size):
    few = jax.tree.map(operator.itemgetter(slice(first, first + size)), rollouts)
    logprobs = parts.programs.unheated_logprobs(params, frozen, *parts.placement.to_generation(few))
    found.append(sharding.to_host(logprobs))
  return np.concatenate(found)
