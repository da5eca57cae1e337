"""Behavior log-probabilities as some inference servers record them: of the policy, not the sampler.

A deliberate violation for experiments: the ratio to them does not see the temperature of sampling.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlvr_jax.rollouts.batch import Graded
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.reporting.progress import warn
from rlvr_jax.train.setup.behavior_sources import Sources
from rlvr_jax.train.setup.placement import Placement
from rlvr_jax.types import Array, Params


def announce(sources: Sources) -> None:
  """Warns at the start of a run that it records raw log-probabilities."""
  for source in sources:
    if source.raw:
      warn(
        f"config.sources.{source.name}.recorded = raw: the behavior log-probabilities of"
        f" rollouts sampled at temperature {source.sampling.temperature:g} are the policy's at"
        " temperature 1, as some inference servers record them; ratios ignore the temperature"
      )


def replace_with_raw(
  graded: Graded,
  mask: np.ndarray,
  params: Params,
  frozen: Params,
  *,
  sources: Sources,
  placement: Placement,
  replays_routes: bool,
  logprobs_at_temperature_1: Callable[..., Array],
) -> Graded:
  """Makes raw log-probabilities the behavior policy's, for the sources that record those.

  The batch keeps both. What was sampled from has been compared with the trainer before.

  Args:
    graded: of all sources.
    mask: f32[P, G, T], 1 for every sampled token, whether or not it is in the loss.
    params, frozen: of the policy that sampled the batch, on the devices that generate.
    sources, placement: of the run.
    replays_routes: see `Method`.
    logprobs_at_temperature_1: that function of `Programs`.
  """
  if not any(source.raw for source in sources):
    return graded

  batch = graded.train
  places = np.arange(1, mask.shape[-1] + 1, dtype=np.int32)
  lengths = np.max(np.where(mask > 0, places, np.int32(0)), axis=-1)
  inputs: tuple[Any, ...] = batch.prompts, batch.tokens, lengths
  if replays_routes:
    inputs += batch.prompt_routes, batch.routes

  def raw_of(groups: slice) -> np.ndarray:
    """f32[P, G, T], raw log-probabilities of some groups, computed a few at a time."""
    parts = []
    for first in range(groups.start, groups.stop, placement.scored_groups):
      end = min(first + placement.scored_groups, groups.stop)
      few = operator.itemgetter(slice(first, end))
      on_devices = placement.to_generation(jax.tree.map(few, inputs))
      parts.append(sharding.to_host(logprobs_at_temperature_1(params, frozen, *on_devices)))
    return np.concatenate(parts)

  behavior: Any = np.array(batch.behavior_logprobs)
  gaps = {}
  end = 0
  for source in sources:
    start, end = end, end + source.prompts
    groups = slice(start, end)
    if source.raw:
      raw = np.where(mask[groups] > 0, raw_of(groups), 0.0)
      difference = np.abs(raw - behavior[groups]).sum()
      gaps[f"source/{source.name}/raw_gap"] = float(difference / mask[groups].sum())
      behavior[groups] = raw
  train = dataclasses.replace(
    batch, behavior_logprobs=behavior, sampled_logprobs=batch.behavior_logprobs
  )
  return graded._replace(train=train, statistics=graded.statistics | gaps)
