"""Behavior log-probabilities at temperature 1, as some inference servers record them.

This is a deliberate error for experiments: ratios to these values ignore the temperature of
sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlvr_jax.rollouts.grading import sampled_places
from rlvr_jax.rollouts.group import Group, join
from rlvr_jax.rollouts.sources import Sources
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.reporting.progress import warn
from rlvr_jax.types import Array, Params, Prompts


def announce(sources: Sources) -> None:
  """Warns about each source of a run that records raw log-probabilities."""
  for source in sources:
    if source.raw:
      warn(
        f"config.sources.{source.name}.recorded = raw: the behavior log-probabilities of"
        f" rollouts sampled at temperature {source.sampling.temperature:g} are the policy's at"
        " temperature 1, as some inference servers record them; ratios ignore the temperature"
      )


def replace_with_raw(
  groups: Sequence[Group],
  params: Params,
  frozen: Params,
  *,
  sources: Sources,
  placement: Placement,
  replays_routes: bool,
  logprobs_at_temperature_1: Callable[..., Array],
) -> tuple[list[Group], dict[str, float]]:
  """The groups, with raw behavior log-probabilities for the sources that record raw values.

  If a source records raw values, every group also keeps the sampler's values, as
  `sampled_logprobs`. Call this after the sampler's values have been compared with the trainer's.

  Args:
    groups: the groups of a draw, in the order of their sources.
    params, frozen: parameters of the policy that sampled the groups, on the devices for generation.
    sources, placement: sources and placement of the run.
    replays_routes: see `Method`.
    logprobs_at_temperature_1: the function of this name in `Programs`.
  Returns:
    (the groups, metrics of the differences by source).
  """

  def raw_of(few: Sequence[Group]) -> np.ndarray:
    """f32[P, G, T], raw log-probabilities of a few groups."""
    arrays: dict[str, Any] = join(few)
    names = ["tokens", "lengths", *(["prompt_routes", "routes"] if replays_routes else [])]
    prompts = Prompts(arrays["prompts.tokens"], arrays["prompts.lengths"])
    inputs: tuple[Any, ...] = prompts, *(arrays[name] for name in names)
    on_devices = placement.to_generation(inputs)
    logprobs = logprobs_at_temperature_1(params, frozen, *on_devices)
    return np.asarray(sharding.to_host(logprobs))

  found, gaps, step = [], {}, placement.scored_groups
  for index, source in enumerate(sources):
    of_source = [group for group in groups if group.source == index]
    if not source.raw:
      found += [with_both(group, group.arrays["behavior_logprobs"]) for group in of_source]
      continue
    parts = [raw_of(of_source[i : i + step]) for i in range(0, len(of_source), step)]
    arrays = join(of_source)
    sampled = sampled_places(arrays)
    raw = np.where(sampled, np.concatenate(parts), np.float32(0))
    difference = np.abs(raw - arrays["behavior_logprobs"]).sum()
    gaps[f"source/{source.name}/raw_gap"] = float(difference / sampled.sum())
    found += [with_both(group, new) for group, new in zip(of_source, raw, strict=True)]
  return found, gaps


def with_both(group: Group, behavior_logprobs: np.ndarray) -> Group:
  """The group with these behavior log-probabilities; `sampled_logprobs` keeps the sampler's."""
  arrays = {
    "behavior_logprobs": behavior_logprobs,
    "sampled_logprobs": group.arrays["behavior_logprobs"],
  }
  return group._replace(arrays=group.arrays | arrays)
