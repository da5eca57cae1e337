"""Grading of a run: its graders, the pool of grading processes, and the rewards of outcomes."""

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
from rlvr_jax.data.curriculum import Curriculum
from rlvr_jax.data.task_utils import BY_REFERENCE
from rlvr_jax.ops.checks import check_between
from rlvr_jax.rewards.by_name import checked_grader, weighted_reference
from rlvr_jax.rewards.outcome import MASK, Outcome, OutcomePolicy, outcome_policy
from rlvr_jax.rewards.pool import GraderPool, default_workers
from rlvr_jax.rewards.worker_process import GraderStartError
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import alive
from rlvr_jax.train.reporting.progress import warn

WEIGHTED, _CODE = "weighted", "code"  # by name
_NUM_INSPECTED = 100  # problems per source whose references are searched for names of graders


class _Regraded:
  """A source whose problems have their references converted for another grader."""

  def __init__(self, source: ProblemSource, change: Callable[[Mapping[str, Any]], Any]):
    self._source, self._change = source, change

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Problem:
    problem = self._source[index]
    return dataclasses.replace(problem, reference=self._change(problem.reference))


def _regraded(source: ProblemSource, change: Callable[[Mapping[str, Any]], Any]) -> ProblemSource:
  if isinstance(source, Curriculum):  # and stays one
    return source.changed(lambda p: dataclasses.replace(p, reference=change(p.reference)))
  return _Regraded(source, change)


class _Graders(NamedTuple):
  """The graders of the problems of a phase."""

  main: str
  extra: tuple[tuple[str, float], ...] = ()

  @property
  def grader(self) -> str:
    return WEIGHTED if self.extra else self.main

  def reference(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reference for `grader`, made from the task's reference."""
    # The references of a mixture are wrapped for `by_reference` only.
    reference = given if self.main == BY_REFERENCE else _unwrapped(given)
    if self.extra:
      reference = weighted_reference(self.main, reference, self.extra)
      for part in reference["parts"][1:]:
        part["reference"] = _unwrapped(part["reference"])
    return reference

  def named(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """As `reference`, for a pool whose grader is `BY_REFERENCE`."""
    reference = self.reference(given)
    if self.grader == BY_REFERENCE:
      return reference
    return {"grader": self.grader, "reference": reference}


def _unwrapped(reference: Mapping[str, Any]) -> Mapping[str, Any]:
  """The inner reference of a mixture's reference; any other reference unchanged."""
  return reference["reference"] if reference.keys() >= {"grader", "reference"} else reference


def with_graders(config: ml_collections.ConfigDict, task: Task) -> Task:
  """The task with the graders of the configuration.

  Those of `config.grading` are for training, that of `config.evaluation` for held-out problems.
  If the two differ, the references name them, so that one pool serves both.

  Raises:
    ValueError: an unknown grader, hyper-parameters that it does not take, or a weight that is
      not a number. A user's module is checked by the pool, whose workers import it.
  """
  unsandboxed = config.grading.unsandboxed_code
  if unsandboxed not in ("", ACCEPTED):
    raise ValueError(
      f"config.grading.unsandboxed_code = {unsandboxed!r}: leave it empty, or set it to"
      f" {ACCEPTED!r} to run generated programs without a sandbox"
    )
  default = _checked(f"grader of the task {task.name}", task.grader)
  extra = tuple(_weighted(pair) for pair in config.grading.extra)
  training = _Graders(_configured(config, "grading") or default, extra)
  held_out = _Graders(_configured(config, "evaluation") or default)
  if training == held_out == _Graders(default):
    return task
  same = training == held_out
  change = lambda graders: graders.reference if same else graders.named
  return dataclasses.replace(
    task,
    grader=training.grader if same else BY_REFERENCE,
    train=_regraded(task.train, change(training)),
    warm_start=_regraded(task.warm_start, change(training)),
    held_out=_regraded(task.held_out, change(held_out)),
  )


def _checked(field: str, text: str) -> str:
  """A grader's string after checks, in a canonical form."""
  return str(checked_grader(field, text))


def _configured(config: ml_collections.ConfigDict, phase: str) -> str:
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
  """The grading processes; each runs the self-tests of the task's graders at its start.

  Raises:
    GraderStartError: a grader cannot work here.
  """
  settings = config.grading
  unsandboxed = settings.unsandboxed_code
  sources = (task.train, task.held_out)
  some = [s[index] for s in sources for index in range(min(len(s), _NUM_INSPECTED))]
  inner = [text for problem in some for text in _graders_in(problem.reference)]
  names = {checked_grader("grader", text).name for text in (task.grader, *inner)}
  if _CODE in names and (reason := cgroups.why_none()):
    logging.warning(
      "no control group is available for generated programs (%s): their memory and processor time"
      " are only polled. For limits by the kernel, start the run where cgroup v2 is delegated, such"
      " as with systemd-run --user --scope",
      reason,
    )
  return GraderPool(
    task.grader,
    num_workers=settings.num_workers or default_workers(),
    timeout_s=settings.timeout_s,
    memory_mib=settings.memory_mib,
    environment={UNSANDBOXED: unsandboxed} if unsandboxed else {},
    preload=[*dict.fromkeys(inner)],
    on_grade=alive,
  )


def check_first_grade(config: ml_collections.ConfigDict, pool: GraderPool, task: Task) -> None:
  """Grades an answer to the first problem: a grader that fails on it may fail on all.

  Raises:
    GraderStartError: the grader failed, and config.grading.outcomes gives failures no reward.
  """
  if make_outcome_policy(config)[Outcome.CRASHED] != MASK:
    return
  (grade,) = pool.grade(["no answer"], [task.train[0].reference])
  if grade.outcome is Outcome.CRASHED:
    raise GraderStartError(
      f"the grader {task.grader} crashed on the answer 'no answer' to the first training problem:"
      f" {grade.detail}; a grader must give a grade, or a number, for any text"
    )


def announce_partial_credit(config: ml_collections.ConfigDict, task: Task) -> None:
  """Says at the start of a run that scores of wrong answers will be lost, if some may be given."""
  reward = make_outcome_policy(config)[Outcome.WRONG]
  if isinstance(reward, str):  # the score, or an action
    return
  some = [task.train[index] for index in range(min(len(task.train), _NUM_INSPECTED))]
  named = [task.grader, *(text for p in some for text in _graders_in(p.reference))]
  partly = [text for text in dict.fromkeys(named) if _may_score_partly(text)]
  partly = ["config.grading.extra" if text == WEIGHTED else text for text in partly]
  if partly:
    warn(
      f"a wrong answer's reward is {reward:g}, also where {', '.join(partly)} scores it between 0"
      " and 1; for partial credit set config.grading.outcomes.wrong = score"
    )


def _may_score_partly(text: str) -> bool:
  """Whether a grader may give wrong answers a score; of one's own it is not known."""
  spec = checked_grader("grader", text)
  known = spec.name in (WEIGHTED, "reasoning_gym") or spec.arguments.get("reward") == "fraction"
  return known or ":" in spec.name


def _graders_in(reference: Mapping[str, Any]) -> list[str]:
  """The graders that a reference names, for the parts of a combined grader or of a mixture."""
  found = [str(reference["grader"])] if reference.keys() >= {"grader", "reference"} else []
  parts = [*reference.get("parts", ()), *([reference["reference"]] if found else ())]
  return found + [text for part in parts for text in _graders_in(part)]


def make_outcome_policy(config: ml_collections.ConfigDict) -> OutcomePolicy:
  """The rewards of `config.grading.outcomes`."""
  return outcome_policy({k: _as_number(v) for k, v in config.grading.outcomes.items()})


def _as_number(text: str) -> float | str:
  """A field of a locked configuration has one type, so numbers among names are written as text."""
  try:
    return float(text)
  except ValueError:
    return text


def make_collector(parts: Any, pool: GraderPool) -> Collector:
  """The collector of a run, whose `build.Parts` are `parts`."""
  c = parts.config
  shared = multihost.SharedGrader(pool) if jax.process_count() > 1 else None
  submit: Any = shared.submit if shared else pool.submit
  results: Any = shared.results if shared else multihost.grades
  return Collector(
    tokenizer=parts.tokenizer,
    max_prompt_length=c.max_prompt_length,
    submit=submit,
    results=results,
    outcome_policy=make_outcome_policy(c),
    overlong_buffer=c.overlong.buffer,
    overlong_filter=c.overlong.filter,
  )
