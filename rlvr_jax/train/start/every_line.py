"""Grades every line of a run's data once, before the first update."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from rlvr_jax.data import Problem, ProblemSource, Task
from rlvr_jax.data.sources import listed_sources
from rlvr_jax.rewards.by_name import right_completion
from rlvr_jax.rewards.grading import GraderPool, GraderStartError
from rlvr_jax.rewards.outcome import MASK, Outcome, OutcomePolicy
from rlvr_jax.train.reporting.progress import say, warn
from rlvr_jax.train.setup.grading import ChangedProblems, used_graders

_NUM_GENERATED = 100  # problems that are graded if a source generates its problems
_MOST_AT_ONCE = 64  # problems graded at once: the tests of a program may take megabytes
_OWN_S = 20.0  # seconds for a user's own graders, which may call another program
_NUM_NAMED = 5  # problems that a message names
_SAY_FROM_S = 5.0  # the duration is printed if it is longer


def check_every_line(outcome_policy: OutcomePolicy, pool: GraderPool, task: Task) -> int:
  """Grades two answers to every problem: an empty answer, and the reference answer.

  The reference answer must be graded as correct. It is graded only if `right_completion` gives a
  completion for it. If problems are generated when sampled, only the first problems are graded.
  With a user's own grader, which may be slow, no more gradings begin after some seconds. Each of
  several processes grades its share.

  Returns:
    The number of problems that were graded.
  Raises:
    GraderStartError: a reference answer is not graded as correct, or the grader crashed and
      config.grading.outcomes masks crashes. The message names files and lines.
  """
  began = time.monotonic()
  has_own = any(":" in text for text in (task.grader, *used_graders(task)))
  problems = enumerate(itertools.chain(_checked(task.train), _checked(task.held_out)))
  faults: dict[str, str] = {}  # file and line of a training problem → what went wrong
  slow: dict[str, str] = {}
  count, at_once = 0, 1
  while chunk := list(itertools.islice(problems, at_once)):
    count, at_once = chunk[-1][0] + 1, min(2 * at_once, _MOST_AT_ONCE)
    items = []
    for index, problem in chunk[jax.process_index() :: jax.process_count()]:
      right = right_completion(task.grader, problem.reference)
      where = problem.where or f"problem {index}"
      items += [(where, problem, right, True)] if right is not None else []
      items.append((where, problem, "", False))
    grades = pool.grade([text for *_, text, _ in items], [p.reference for _, p, *_ in items])
    for (where, _, text, is_right), grade in zip(items, grades, strict=True):
      said = f"{where}: the answer {text!r:.200} is graded {grade.outcome} ({grade.detail})"
      is_crash = grade.outcome is Outcome.CRASHED and outcome_policy[Outcome.CRASHED] == MASK
      if grade.outcome is Outcome.TIMEOUT:  # may be due to a busy machine
        slow.setdefault(where, said)
      elif is_crash or (is_right and grade.outcome is not Outcome.CORRECT):
        faults.setdefault(where, said)
    if has_own and time.monotonic() - began > _OWN_S:
      warn(f"the graders are slow: only the first {count} problems were graded before the start")
      break
  if slow:
    warn(f"the grader exceeds its time limit on {_describe(slow, count)}")
  if faults:
    raise GraderStartError(
      f"the grader does not fit {_describe(faults, count)}. A grader must grade a problem's"
      " reference answer as correct, and must not crash on any text: correct these lines, leave"
      " them out, or set another grader"
    )
  if (seconds := time.monotonic() - began) > _SAY_FROM_S:
    say(f"graded {count} problems in {seconds:.0f} s")
  return count


def check_every_problem(task: Task, check: Callable[[Problem], Any]) -> None:
  """Calls `check` for every training problem; of generated problems only for the first ones."""
  for problem in _checked(task.train):
    check(problem)


def _checked(source: ProblemSource) -> Iterator[Problem]:
  """The problems of a source to check: all listed problems, and the first generated problems."""
  if isinstance(source, ChangedProblems):
    yield from map(source.change, _checked(source.source))
    return
  listed = listed_sources(source)
  for part in listed:
    yield from (part[index] for index in range(len(part)))
  if not any(part is source for part in listed):
    first = (source[index] for index in range(min(len(source), _NUM_GENERATED)))
    yield from (problem for problem in first if not problem.where)


def _describe(places: dict[str, str], count: int) -> str:
  """Describes faulty problems: how many of `count`, and what happened at the first few."""
  named = "; ".join(list(places.values())[:_NUM_NAMED])
  more = "; …" if len(places) > _NUM_NAMED else ""
  return f"{len(places)} of {count} problems: {named}{more}"
