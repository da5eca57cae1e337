"""Grading of a run: graders, environments, their processes, and the rewards of outcomes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
from absl import logging

from rlvr_jax import specs
from rlvr_jax.codejudge import cgroups
from rlvr_jax.codejudge.sandbox import ACCEPTED, UNSANDBOXED
from rlvr_jax.data import Problem, ProblemSource, Task, Tokenizer
from rlvr_jax.data.curriculum import Curriculum
from rlvr_jax.data.sources import Change
from rlvr_jax.data.task_utils import BY_REFERENCE
from rlvr_jax.data.tokenizer import encode_first_turn
from rlvr_jax.environments.by_name import parse_environment, tries_of
from rlvr_jax.environments.dialogues import EnvironmentPool, EnvironmentStartError
from rlvr_jax.ops.checks import (
  MAX_INT32,
  MAX_SCORE,
  check_between,
  check_choice,
  check_integer,
)
from rlvr_jax.ops.keys import seeds_for
from rlvr_jax.rewards.by_name import parse_grader, weighted_reference
from rlvr_jax.rewards.grading import GraderPool, GraderStartError
from rlvr_jax.rewards.outcome import MASK, Outcome, OutcomePolicy, outcome_policy
from rlvr_jax.rollouts.answers import Answers, Processes
from rlvr_jax.rollouts.dialogues import CUT_NOTE, CUTS, Dialogues, DialogueSettings, as_mapping
from rlvr_jax.rollouts.grading import Grading
from rlvr_jax.train.checkpointing.workdir import Enter
from rlvr_jax.train.cluster import multihost, waiting
from rlvr_jax.train.cluster.process import restart_deadline
from rlvr_jax.train.reporting.progress import warn
from rlvr_jax.types import BatchShape
from rlvr_jax.workers.pool import Failure, default_workers

MAX_WORKERS = 1024  # largest number of processes of graders, or of environments
# Environments whose scores are 0 and 1, or the scores of the task's grader.
KNOWN_SCORES = ("guess", "python", "retry")
WEIGHTED, _CODE = "weighted", "code"  # names of graders
_NO_ANSWER = "no answer"  # a text that no grader or environment takes for an answer
_FIRST_TURN_S = 3600.0  # seconds, longer than any limit of a turn
_NUM_BEGUN = 8  # problems per source whose dialogues are begun for a check
_NUM_INSPECTED = 100  # problems per source whose references are searched for names of graders


class ChangedProblems:
  """A source of problems that changes each problem when it is read."""

  def __init__(self, source: ProblemSource, change: Change):
    self.source, self.change = source, change

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int) -> Problem:
    return self.change(self.source[index])


def _change(source: ProblemSource, change: Change) -> ProblemSource:
  return source.map(change) if isinstance(source, Curriculum) else ChangedProblems(source, change)


class _Graders(NamedTuple):
  """The graders of training problems, or of held-out problems."""

  main: str
  extra: tuple[tuple[str, float], ...] = ()

  @property
  def grader(self) -> str:
    return WEIGHTED if self.extra else self.main

  def change(self, problem: Problem) -> Problem:
    """The problem, with its reference in the form that `grader` takes."""
    # In a mixture of tasks, the wrapped reference is for `by_reference` only.
    own = problem.own_reference
    reference = problem.reference if self.main == BY_REFERENCE else own
    if self.extra:
      reference = weighted_reference(self.main, reference, self.extra)
      for part in reference["parts"][1:]:
        part["reference"] = own
    return problem.wrap(reference)

  def change_by_reference(self, problem: Problem) -> Problem:
    """The problem with a reference that names its grader, for a pool that grades `BY_REFERENCE`."""
    changed = self.change(problem)
    if self.grader == BY_REFERENCE:
      return changed
    return problem.wrap({"grader": self.grader, "reference": changed.reference})


def with_graders(settings: ml_collections.ConfigDict, held_out_grader: str, task: Task) -> Task:
  """The task with the graders of the configuration.

  If the graders of training and of held-out problems differ, each problem's reference names its
  grader, so that one pool serves both kinds of problems.

  Args:
    settings: `config.grading`, the graders of training.
    held_out_grader: `config.evaluation.grader`.
    task: the task; its own grader is used if `settings.grader` or `held_out_grader` is empty.
  Raises:
    ValueError: a number is out of range, a grader is unknown or does not take its hyper-parameters,
      or a weight is not a number. A user's module is checked by the pool, whose workers import it.
  """
  check_integer("config.grading", "memory_mib", settings.memory_mib, low=1, high=MAX_INT32)
  check_integer("config.grading", "num_workers", settings.num_workers, low=0, high=MAX_WORKERS)
  check_between("config.grading", "timeout_s", settings.timeout_s, low=0, open_low=True)
  unsandboxed = settings.unsandboxed_code
  if unsandboxed not in ("", ACCEPTED):
    raise ValueError(
      f"config.grading.unsandboxed_code = {unsandboxed!r}: leave it empty, or set it to"
      f" {ACCEPTED!r} to run generated programs without a sandbox"
    )
  default = str(parse_grader(f"grader of the task {task.name}", task.grader))
  extra = tuple(_check_weighted(pair) for pair in settings.extra)
  training = _Graders(_check("config.grading.grader", settings.grader) or default, extra)
  held_out = _Graders(_check("config.evaluation.grader", held_out_grader) or default)
  if training == held_out == _Graders(default):
    return task
  same = training == held_out
  change = lambda graders: graders.change if same else graders.change_by_reference
  return dataclasses.replace(
    task,
    grader=training.grader if same else BY_REFERENCE,
    train=_change(task.train, change(training)),
    warm_start=_change(task.warm_start, change(training)),
    held_out=_change(task.held_out, change(held_out)),
  )


def _check(field: str, text: str) -> str:
  """A grader's string in canonical form, or "" if it is empty; ValueError if it is invalid."""
  return str(parse_grader(field, text)) if text else ""


def _check_weighted(pair: Any) -> tuple[str, float]:
  """A grader's string in a canonical form, and its weight."""
  field = "config.grading.extra"
  try:
    text, weight = pair
    weight = float(weight)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{field} has {pair!r}, expected pairs such as ('boxed', 0.1)") from error
  check_between(field, str(text), weight, low=-MAX_SCORE, high=MAX_SCORE)
  return _check(field, text), weight


def grader_pool(settings: ml_collections.ConfigDict, task: Task) -> GraderPool:
  """The pool of grading processes; each process first runs the self-tests of the task's graders.

  Args:
    settings: `config.grading`.
    task: the task of the run.
  Raises:
    GraderStartError: a grader cannot work here.
  """
  unsandboxed = settings.unsandboxed_code
  inner = _graders_of(task.grader, [task.train, task.held_out])
  names = {parse_grader("grader", text).name for text in (task.grader, *inner)}
  if _CODE in names and (reason := cgroups.unavailable_reason()):
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
    preload=inner,
    on_grade=restart_deadline,
  )


def check_first_grade(outcome_policy: OutcomePolicy, pool: GraderPool, task: Task) -> None:
  """Grades an answer to the first problem; a grader that fails here may fail on all problems.

  Raises:
    GraderStartError: the grader failed, and config.grading.outcomes masks rollouts whose grader
      failed.
  """
  if outcome_policy[Outcome.CRASHED] != MASK:
    return
  (grade,) = pool.grade([_NO_ANSWER], [task.train[0].reference])
  if grade.outcome is Outcome.CRASHED:
    raise GraderStartError(
      f"the grader {task.grader} crashed on the answer 'no answer' to the first training problem:"
      f" {grade.detail}; a grader must give a grade, or a number, for any text"
    )


def announce_partial_credit(
  outcome_policy: OutcomePolicy, task: Task, environment: str = ""
) -> None:
  """Warns at the start of a run if rewards will ignore the scores of wrong answers.

  Args:
    outcome_policy: the rewards of outcomes.
    task: the task of the run.
    environment: `config.environment.name`.
  """
  reward = outcome_policy[Outcome.WRONG]
  if isinstance(reward, str):  # the score, or an action
    return
  named = dict.fromkeys([task.grader, *_graders_of(task.grader, [task.train])])
  partly = [text for text in named if _may_score_partly(text)]
  partly = ["config.grading.extra" if text == WEIGHTED else text for text in partly]
  if environment:
    spec = parse_environment("config.environment.name", environment)
    partly += [environment] if spec.name not in KNOWN_SCORES else []
  if partly:
    warn(
      f"a wrong answer's reward is {reward:g}, even if {', '.join(partly)} scores it between 0"
      " and 1; for partial credit set config.grading.outcomes.wrong = score"
    )


def _may_score_partly(text: str) -> bool:
  """Whether a grader may give wrong answers a score; assumed of any user's own grader."""
  spec = parse_grader("grader", text)
  known = spec.name in (WEIGHTED, "reasoning_gym") or spec.arguments.get("reward") == "fraction"
  return known or ":" in spec.name


def used_graders(task: Task) -> list[str]:
  """The graders of a task: its own grader, or the graders that references name instead."""
  if task.grader != BY_REFERENCE:
    return [task.grader]
  return _graders_of(task.grader, [task.train, task.held_out])


def _graders_of(grader: str, sources: Sequence[ProblemSource]) -> list[str]:
  """The distinct graders that references of the first problems name, see `named_graders`."""
  some = [s[index] for s in sources for index in range(min(len(s), _NUM_INSPECTED))]
  named = (text for problem in some for text in named_graders(grader, problem.reference))
  return [*dict.fromkeys(named)]


def named_graders(grader: str, reference: Mapping[str, Any]) -> list[str]:
  """The graders that a reference names, if `grader` is `BY_REFERENCE` or `WEIGHTED`; else []."""
  if grader not in (BY_REFERENCE, WEIGHTED):
    return []
  parts = [reference] if grader == BY_REFERENCE else reference["parts"]
  pairs = [(part["grader"], part["reference"]) for part in parts]
  return [text for pair in pairs for text in (pair[0], *named_graders(*pair))]


def check_environment(settings: ml_collections.ConfigDict, tokenizer: Tokenizer) -> None:
  """Raises ValueError if the configuration of dialogues is invalid; see also `EnvironmentPool`.

  Args:
    settings: `config.environment`.
    tokenizer: the tokenizer of the run.
  """
  if not settings.name:
    return
  spec = parse_environment("config.environment.name", settings.name)
  check_integer("config.environment", "max_turns", settings.max_turns, low=1)
  tries = tries_of(spec)
  if isinstance(tries, int) and tries > settings.max_turns:  # the last try would never be reached
    raise ValueError(
      f"config.environment.name = {settings.name!r} has {tries} tries, but"
      f" config.environment.max_turns = {settings.max_turns}; lower tries, or raise max_turns"
    )
  check_integer("config.environment", "memory_mib", settings.memory_mib, low=1)
  check_integer("config.environment", "processes", settings.processes, low=0, high=MAX_WORKERS)
  check_between("config.environment", "deadline_s", settings.deadline_s, low=0.0, open_low=True)
  check_integer("config.environment", "max_reply_length", settings.max_reply_length, low=0)
  check_choice("config.environment", "cut", settings.cut, CUTS)
  least = len(tokenizer.encode(CUT_NOTE))
  if 0 < settings.max_reply_length < least:
    raise ValueError(
      f"config.environment.max_reply_length = {settings.max_reply_length}: the note that a reply"
      f" was cut has {least} tokens; set max_reply_length to at least {least}, or to 0 for no limit"
    )
  try:
    tokenizer.check_turns((), settings.stop_strings)
  except ValueError as error:
    raise ValueError(f"config.environment.name = {settings.name!r}: {error}") from error


def start_pools(
  grading: ml_collections.ConfigDict,
  environment: ml_collections.ConfigDict,
  task: Task,
  tokenizer: Tokenizer,
  enter: Enter,
) -> tuple[GraderPool, EnvironmentPool | None]:
  """Starts the processes of graders and environments, which `make_answers` takes.

  Args:
    grading: `config.grading`.
    environment: `config.environment`.
    task, tokenizer: task and tokenizer of the run.
    enter: registers a pool to be closed, and returns it.
  Raises:
    GraderStartError, EnvironmentStartError: a grader or the environment cannot work here, or the
      chat template has no place for the environment's replies.
  """
  graders = enter(grader_pool(grading, task))
  environments = _environment_pool(environment, graders)
  if environments is not None:
    enter(environments)
    try:
      tokenizer.check_turns(environments.roles)
    except ValueError as error:
      text = f"config.environment.name = {environment.name!r}: {error}"
      raise EnvironmentStartError(text) from error
  return graders, environments


def _environment_pool(
  settings: ml_collections.ConfigDict, pool: GraderPool
) -> EnvironmentPool | None:
  """The processes of environments on the first process of a run; None if there are none.

  Args:
    settings: `config.environment`.
    pool: the grader pool, for environments that ask for a grade.
  Raises:
    EnvironmentStartError: the environment cannot work here.
  """
  if not settings.name or not multihost.is_first():
    return None
  return EnvironmentPool(
    settings.name,
    processes=settings.processes or default_workers(),
    deadline_s=settings.deadline_s,
    memory_mib=settings.memory_mib,
    grade=pool.submit,
  )


def check_first_dialogue(
  outcome_policy: OutcomePolicy, pool: EnvironmentPool | None, task: Task
) -> str:
  """Plays a turn of the first problem; an environment that fails here may fail everywhere.

  Args:
    outcome_policy: the rewards of outcomes.
    pool: the environments from `start_pools`; None if there are none on this process.
    task: the task of the run.
  Returns:
    A text that says how the environment answered; "" without a pool.
  Raises:
    EnvironmentStartError: the environment failed, and config.grading.outcomes masks dialogues
      whose environment failed.
  """
  if pool is None:
    return ""
  began = time.monotonic()
  first = task.train[0]
  started = pool.reset(as_mapping(first), 0, first.reference).result(_FIRST_TURN_S)
  if isinstance(started, Failure):  # any failure counts: no text has been sent that could cause it
    where, failure = "at its reset", started._replace(kind="failed")
  else:
    turn = pool.step(started.dialogue, _NO_ANSWER).result(_FIRST_TURN_S)
    pool.close_dialogue(started.dialogue)
    if not isinstance(turn, Failure):
      did = f"ended with the score {turn.score}" if turn.done else f"replied {turn.reply[:80]!r}"
      seconds = time.monotonic() - began
      return f"the first problem's environment {did} to {_NO_ANSWER!r} within {seconds:.2f} s"
    where, failure = f"on the text {_NO_ANSWER!r}", turn
  text = f"the first training problem's environment: {failure.kind} {where}: {failure.detail}"
  if failure.kind == "failed" and outcome_policy[Outcome.ENVIRONMENT_FAILED] == MASK:
    raise EnvironmentStartError(text)
  return text


def make_answers(
  settings: ml_collections.ConfigDict,
  tokenizer: Tokenizer,
  graders: GraderPool,
  environments: EnvironmentPool | None = None,
) -> Answers:
  """The `Answers` to the turns of one sampler's rollouts.

  Args:
    settings: `config.environment`.
    tokenizer: the tokenizer of the run.
    graders, environments: results of `start_pools`.
  """
  limits = DialogueSettings(
    max_turns=settings.max_turns,
    max_reply_length=settings.max_reply_length,
    cut=settings.cut,
    stop_strings=tuple(settings.stop_strings),
    grade_all_turns=settings.grade_all_turns,
  )
  dialogues = Dialogues(limits, tokenizer, environments) if settings.name else None
  processes = Processes(jax.process_index(), jax.process_count(), waiting.gather_answers)
  return Answers(tokenizer, graders.submit, dialogues, processes)


def check_first_messages(
  answers: Answers, tokenizer: Tokenizer, max_prompt_length: int, *sources: ProblemSource
) -> None:
  """Raises PromptError if the first messages of dialogues are too long; all processes call this.

  Only the first problems are checked: messages of other problems are measured when the problems
  are drawn, since they depend on a seed.

  Args:
    answers: the result of `make_answers`.
    tokenizer, max_prompt_length: tokenizer of the run, and the most tokens of its prompts.
    sources: the sources of problems.
  """
  for source in sources:
    problems = [source[index] for index in range(min(len(source), _NUM_BEGUN))]
    if problems:
      begun = answers.begin(problems, seeds_for(0, "rollout", 0, len(problems)), of=len(problems))
      for problem, beginning in zip(problems, begun, strict=True):
        encode_first_turn(problem, tokenizer, max_prompt_length, beginning.messages)


def make_grading(
  outcomes: Mapping[str, str],
  overlong: ml_collections.ConfigDict,
  tokenizer: Tokenizer,
  shape: BatchShape,
) -> Grading:
  """The `Grading` of a run, which determines how grades become rewards.

  Args:
    outcomes: `config.grading.outcomes`.
    overlong: `config.overlong`.
    tokenizer: the tokenizer of the run.
    shape: the shape of a training batch.
  Raises:
    ValueError: an outcome or action is unknown, or `overlong.buffer` exceeds the longest response.
  """
  check_between("config.overlong", "buffer", overlong.buffer, low=0)
  if overlong.buffer > shape.max_response_length:
    raise ValueError(
      f"config.overlong.buffer = {overlong.buffer} tokens is more than"
      f" config.max_response_length = {shape.max_response_length}; lower the buffer"
    )
  return Grading(
    tokenizer=tokenizer,
    max_prompt_length=shape.max_prompt_length,
    outcome_policy=make_outcome_policy(outcomes),
    overlong_buffer=overlong.buffer,
    overlong_filter=overlong.filter,
  )


def make_outcome_policy(outcomes: Mapping[str, str]) -> OutcomePolicy:
  """The rewards of `config.grading.outcomes`."""
  return outcome_policy({name: _as_number(reward) for name, reward in outcomes.items()})


def _as_number(text: str) -> float | str:
  """The number that a text holds, or the text; a field that may be a name or a number is text."""
  try:
    return float(text)
  except ValueError:
    return text


def shaped_outcomes(outcome_policy: OutcomePolicy) -> dict[str, float | str]:
  """The outcomes whose reward may differ from 0 and 1.

  If the reward of a correct answer is its score, the score is assumed to be 1.
  """
  plain = ("mask", "stop", 0.0, 1.0)
  binary = lambda outcome, reward: reward in plain or (outcome, reward) == ("correct", "score")
  return {o.value: reward for o, reward in outcome_policy.items() if not binary(o.value, reward)}


def scores_partly(environment: str, outcome_policy: OutcomePolicy) -> bool:
  """Whether the reward of a correct dialogue may differ from 1.

  Args:
    environment: `config.environment.name`.
    outcome_policy: the rewards of outcomes.
  """
  if not environment or outcome_policy[Outcome.CORRECT] != "score":
    return False
  spec = specs.parse("config.environment.name", environment)
  discounts = spec.arguments.get("discount", 1.0) != 1.0
  return spec.name not in KNOWN_SCORES or discounts
