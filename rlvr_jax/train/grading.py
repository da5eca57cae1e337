"""What grades a run's completions: graders, the pool of their processes, and outcomes' rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_collections
from absl import logging

from rlvr_jax.codejudge import cgroups
from rlvr_jax.codejudge.sandbox import ACCEPTED, UNSANDBOXED
from rlvr_jax.data import Problem, ProblemSource, Task
from rlvr_jax.data.task_utils import BY_REFERENCE
from rlvr_jax.ops.checks import check_between
from rlvr_jax.rewards.combined import weighted_reference
from rlvr_jax.rewards.loading import checked_grader
from rlvr_jax.rewards.outcome import OutcomePolicy, outcome_policy
from rlvr_jax.rewards.pool import GraderPool, default_workers
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.train import multihost, sharding
from rlvr_jax.train.host import alive

WEIGHTED, _CODE = "weighted", "code"  # by name
_GRADERS_SHOW_IN = 100  # problems of a source, whose references name the graders of them all


class _Regraded:
  """A source whose problems carry the references of another grader."""

  def __init__(self, source: ProblemSource, change: Callable[[Mapping[str, Any]], Any]):
    self._source, self._change = source, change

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Problem:
    problem = self._source[index]
    return dataclasses.replace(problem, reference=self._change(problem.reference))


class _Graders(NamedTuple):
  """What grades the problems of a phase."""

  main: str
  extra: tuple[tuple[str, float], ...] = ()

  @property
  def grader(self) -> str:
    return WEIGHTED if self.extra else self.main

  def reference(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `grader` gets in place of the task's reference."""
    # A task's own wrapping, if it is a mixture, is for the grader that asked for it.
    reference = given if self.main == BY_REFERENCE else _unwrapped(given)
    if self.extra:
      reference = weighted_reference(self.main, reference, self.extra)
      for part in reference["parts"][1:]:
        part["reference"] = _unwrapped(part["reference"])
    return reference

  def named(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, for a pool whose grader is `BY_REFERENCE`."""
    reference = self.reference(given)
    if self.grader == BY_REFERENCE:
      return reference
    return {"grader": self.grader, "reference": reference}


def _unwrapped(reference: Mapping[str, Any]) -> Mapping[str, Any]:
  """What the grader of a mixture's part gets; any other reference as it is."""
  return reference["reference"] if reference.keys() >= {"grader", "reference"} else reference


def with_graders(config: ml_collections.ConfigDict, task: Task) -> Task:
  """The task with the graders that the configuration names.

  Those of `config.grading` are for training, that of `config.evaluation` for held-out problems.
  Where the two differ the references name them, so that one pool serves both.

  Raises:
    ValueError: an unknown grader, hyper-parameters that it does not take, or a weight that is
      not a number. A module of the user's own is checked by the pool, whose workers import it.
  """
  said = config.grading.unsandboxed_code
  if said not in ("", ACCEPTED):
    raise ValueError(
      f"config.grading.unsandboxed_code = {said!r}: leave it empty, or say {ACCEPTED!r} to have"
      " generated programs run without a sandbox"
    )
  own = _checked(f"grader of the task {task.name}", task.grader)
  extra = tuple(_weighted(pair) for pair in config.grading.extra)
  training = _Graders(_said(config, "grading") or own, extra)
  held_out = _Graders(_said(config, "evaluation") or own)
  if training == held_out == _Graders(own):
    return task
  alike = training == held_out
  change = lambda graders: graders.reference if alike else graders.named
  return dataclasses.replace(
    task,
    grader=training.grader if alike else BY_REFERENCE,
    train=_Regraded(task.train, change(training)),
    warm_start=_Regraded(task.warm_start, change(training)),
    held_out=_Regraded(task.held_out, change(held_out)),
  )


def _checked(field: str, text: str) -> str:
  """A grader's string, the same for all ways to write it."""
  return str(checked_grader(field, text))


def _said(config: ml_collections.ConfigDict, phase: str) -> str:
  text = config[phase].grader
  return _checked(f"config.{phase}.grader", text) if text else ""


def _weighted(pair: Any) -> tuple[str, float]:
  field = "config.grading.extra"
  try:
    text, weight = pair
    weight = float(weight)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{field} has {pair!r}, expected pairs such as ('boxed', 0.1)") from error
  check_between(field, str(text), weight)
  return _checked(field, text), weight


def grader_pool(config: ml_collections.ConfigDict, task: Task) -> GraderPool:
  """The processes that grade; each tries all of the task's graders before the first completion.

  Raises:
    GraderStartError: a grader cannot work here.
  """
  settings = config.grading
  said = settings.unsandboxed_code
  sources = (task.train, task.held_out)
  some = [s[index] for s in sources for index in range(min(len(s), _GRADERS_SHOW_IN))]
  inner = [text for problem in some for text in _graders_in(problem.reference)]
  names = {checked_grader("grader", text).name for text in (task.grader, *inner)}
  if _CODE in names and (reason := cgroups.why_none()):
    logging.warning(
      "no control group is to be had for generated programs (%s): what memory and processor time"
      " they take is only polled. For limits by the kernel start the run where cgroup v2 is"
      " delegated, such as with systemd-run --user --scope",
      reason,
    )
  return GraderPool(
    task.grader,
    num_workers=settings.num_workers or default_workers(),
    timeout_s=settings.timeout_s,
    memory_mib=settings.memory_mib,
    environment={UNSANDBOXED: said} if said else {},
    preload=[*dict.fromkeys(inner)],
    on_grade=alive,
  )


def _graders_in(reference: Mapping[str, Any]) -> list[str]:
  """The graders that a reference names, of a combined grader's parts or of a mixture's."""
  found = [str(reference["grader"])] if reference.keys() >= {"grader", "reference"} else []
  parts = [*reference.get("parts", ()), *([reference["reference"]] if found else ())]
  return found + [text for part in parts for text in _graders_in(part)]


def make_outcome_policy(config: ml_collections.ConfigDict) -> OutcomePolicy:
  """What `config.grading.outcomes` says of every outcome."""
  return outcome_policy({k: _as_number(v) for k, v in config.grading.outcomes.items()})


def _as_number(text: str) -> float | str:
  """A locked configuration field has one type, so numbers beside names are written as text."""
  try:
    return float(text)
  except ValueError:
    return text


def make_collector(parts: Any, pool: GraderPool) -> Collector:
  """Encodes, decodes and grades as the configuration of a run's `build.Parts` says."""
  c = parts.config
  return Collector(
    tokenizer=parts.tokenizer,
    max_prompt_length=c.max_prompt_length,
    submit=pool.submit if jax.process_count() == 1 else multihost.SharedGrader(pool).submit,
    to_host=sharding.to_host,
    outcome_policy=make_outcome_policy(c),
    overlong_buffer=c.overlong.buffer,
    overlong_filter=c.overlong.filter,
  )
