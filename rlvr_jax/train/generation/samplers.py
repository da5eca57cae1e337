"""Makes samplers whose only source is the run's policy: for evaluation and the initial entropy."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from rlvr_jax.models.flops import forward_flops
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts.answers import Answers
from rlvr_jax.rollouts.grading import Grading, sampled_places
from rlvr_jax.rollouts.group import Policy
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.sampler import (
  LocalSampler,
  SamplerSettings,
  SamplingSource,
)
from rlvr_jax.train.generation.printing import keep_alive
from rlvr_jax.types import Params


def sampler_of_policy(
  programs: EnginePrograms,
  frozen: Params,
  grading: Grading,
  answers: Answers,
  settings: SamplerSettings,
) -> LocalSampler:
  """A sampler of the trainer's policy alone, such as the sampler of evaluations.

  Args:
    programs: the programs of the sampler's engine.
    frozen: the parameters that are not trained.
    grading: the grading of the run.
    answers: answers of graders and environments, for this sampler alone.
    settings: the settings of the sampler.
  """
  source = SamplingSource(programs, functools.partial(_load, programs, frozen))
  return LocalSampler([source], grading, answers, settings, keep_alive)


def _load(programs: EnginePrograms, frozen: Params, policy: Policy) -> Params:
  """The weights of a policy, as an engine takes them."""
  return programs.load(policy.params, frozen)


def sampling_flops(network: TransformerConfig, arrays: Mapping[str, np.ndarray]) -> float:
  """Model FLOPs that it takes to sample groups with these arrays.

  Args:
    network: settings of the policy's network.
    arrays: the arrays of groups, by name.
  """
  # Every sampled token, whether or not it is in the loss.
  predicted = sampled_places(arrays).sum(-1)
  return forward_flops(network, arrays["prompts.lengths"], arrays["lengths"], predicted=predicted)
