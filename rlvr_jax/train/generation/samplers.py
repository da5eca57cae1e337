"""The samplers of a run: of training, of evaluation, and of the first entropy."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from rlvr_jax.rollouts.answers import Answers
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.sampler import (
  LocalSampler,
  Progress,
  SamplerSettings,
  SamplingSource,
)
from rlvr_jax.train.cluster.process import restart_deadline
from rlvr_jax.train.generation.policies import Policies
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.types import Params

_PRINT_EVERY_S = 30.0


def training_sampler(
  parts: Parts,
  policies: Policies,
  answers: Answers,
  raise_if_ending: Callable[[], None] = lambda: None,
) -> LocalSampler:
  """The sampler of a run's rollouts.

  Args:
    parts, policies: of the run.
    answers: for this sampler alone.
    raise_if_ending: called after every burst; raises if this program is to end.
  """
  schedule = parts.schedule
  sources = [
    SamplingSource(
      source.programs, functools.partial(policies.load, source), of_this_run=source.of_this_run
    )
    for source in parts.sources.live
  ]
  repeats = schedule.recorded is not None and schedule.recorded.has_several
  settings = SamplerSettings(
    group_size=parts.shape.group_size,
    new_weights=parts.config.fleet.new_weights,
    has_plans=repeats,
    oldest_needed=schedule.oldest_sampling if repeats else lambda version: version,
    deadline_s=parts.config.generation_deadline_s,
  )
  printer = _Printer(raise_if_ending)
  return LocalSampler(sources, parts.grading, answers, settings, printer)


def held_out_sampler(parts: Parts, frozen: Params, answers: Answers) -> LocalSampler:
  """The sampler of evaluations; `frozen`: the parameters that are not trained."""
  c = parts.config
  settings = SamplerSettings(
    c.evaluation.num_samples, purpose="evaluation", deadline_s=c.generation_deadline_s
  )
  return _of_policy(parts, parts.programs.held_out_engine, frozen, answers, settings)


def entropy_sampler(parts: Parts, frozen: Params, answers: Answers) -> LocalSampler:
  """The sampler whose responses have the entropy of the initial policy."""
  settings = SamplerSettings(
    parts.shape.group_size,
    purpose="initial_entropy",
    deadline_s=parts.config.generation_deadline_s,
  )
  return _of_policy(parts, parts.programs.engine, frozen, answers, settings)


def _of_policy(
  parts: Parts,
  programs: EnginePrograms,
  frozen: Params,
  answers: Answers,
  settings: SamplerSettings,
) -> LocalSampler:
  load = lambda policy: programs.load(policy.params, frozen)
  sources = [SamplingSource(programs, load)]
  return LocalSampler(sources, parts.grading, answers, settings, lambda _: restart_deadline())


class _Printer:
  """Prints how far a long refresh is."""

  def __init__(self, raise_if_ending: Callable[[], None]):
    self._raise_if_ending = raise_if_ending
    self._began = self._printed = time.monotonic()
    self._finished = 0  # groups since it began
    self._tokens = self._steps = 0  # of slots, when it began

  def __call__(self, progress: Progress) -> None:
    restart_deadline()
    self._raise_if_ending()
    now, usage = time.monotonic(), progress.usage
    self._finished += progress.finished
    if not progress.left:  # what comes next is another refresh
      self._began = self._printed = now
      self._finished, self._tokens, self._steps = 0, usage.slot_tokens, usage.slot_steps
    if now - self._printed < _PRINT_EVERY_S or usage.slot_steps == self._steps:
      return
    self._printed, elapsed = now, now - self._began
    left = ""
    if self._finished:
      left = f", about {elapsed * progress.left / self._finished:.0f} s left"
    tokens, steps = usage.slot_tokens - self._tokens, usage.slot_steps - self._steps
    say(
      f"sampling: {self._finished}/{self._finished + progress.left} groups,"
      f" {tokens / elapsed:,.0f} tokens/s, {tokens / steps:.0%} of {progress.slots} slots"
      f" busy{left}"
    )
