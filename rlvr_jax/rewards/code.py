"""Grades programs by running them against tests in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlvr_jax.codejudge import fences, tasks
from rlvr_jax.codejudge.sandboxes import Sandboxes
from rlvr_jax.rewards.graders import THINK_CLOSE, THINK_OPEN
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.workers.worker import waiting

REWARDS = ("all", "fraction")
_MAX_WAIT_S = 3600.0  # the most seconds of a wait for other items' programs
_ANSWERS = re.compile(r"^[ \t]*<answer>\n?", re.MULTILINE)


def extract_program(completion: str) -> str:
  """Extracts the program from a completion, after any "</think>".

  Returns:
    The whole text, if it parses as Python. Else the last fenced block whose info string names
    Python. Else the last block that has no info string and parses as Python. Else the last block
    without an info string. Else the content of the last "<answer>" that begins a line. Else the
    whole text. "" if the completion begins with a "<think>" that is never closed; a later "<think>"
    may be part of a string in the program.
  """
  _, closing, answer = completion.rpartition(THINK_CLOSE)
  if not closing and answer.lstrip().startswith(THINK_OPEN):
    return ""
  answer = answer.replace("\r\n", "\n").replace("\ufeff", "")
  blocks = fences.find_blocks(answer)
  python_blocks = [block.text for block in blocks if block.is_python]
  unnamed_blocks = [block.text for block in blocks if not block.info]
  if tasks.is_python(answer):
    return answer
  if not python_blocks + unnamed_blocks:
    tagged = _ANSWERS.split(answer)[1:]
    return tagged[-1].partition("</answer>")[0] if tagged else answer
  if python_blocks or len(unnamed_blocks) == 1:
    return (python_blocks or unnamed_blocks)[-1]
  return next(filter(tasks.is_python, reversed(unnamed_blocks)), unnamed_blocks[-1])


def code(completion: str, reference: Mapping[str, Any], *, reward: str = "all") -> Grade:
  """Runs a program against its tests.

  Args:
    completion: a text whose last ```python block (or unnamed block) is the program, see
      `extract_program`.
    reference: the tests, see `codejudge.tasks`.
    reward: selects the score of a program that fails a test. "all": 0; "fraction": the fraction of
      the tests that the program passes.
  Returns:
    correct (score 1) if all tests pass; timeout if the program exceeds its time limit; unparseable
    if there is no program; otherwise wrong. A program that fails a test has the score that `reward`
    selects, and the feedback is its first failing test, with the expected output. A program that
    exceeds its memory has the score 0 and the feedback "memory limit exceeded". A program that
    breaks its judge has the score 0 and no feedback.
  Raises:
    SandboxError: the sandbox does not work, so the program was not judged.
    ValueError, KeyError: the reference or the reward is invalid.
  """
  tasks.check(reference)
  if "reward" in reference:
    raise ValueError(
      "the reference has a field 'reward', but the reward is a keyword of the grader; remove this"
      f" field, and set the grader to code(reward={reference['reward']!r})"
    )
  if reward not in REWARDS:
    raise ValueError(f"reward is {reward!r}, allowed: {list(REWARDS)}")
  source = extract_program(completion)
  if not source.strip():
    return Grade(Outcome.UNPARSEABLE, detail="no code")
  return _grade_verdict(_judge_program(source, reference), reward)


def _grade_verdict(verdict: Mapping[str, Any], reward: str) -> Grade:
  if "timeout" in verdict:
    return Grade(Outcome.TIMEOUT, detail="time limit exceeded")
  if "memory" in verdict:
    return _grade_wrong("memory limit exceeded")
  if "died" in verdict:
    return Grade(Outcome.WRONG, detail=f"the program broke its judge (status {verdict['died']})")
  if verdict["passed"] == verdict["total"]:
    return Grade(Outcome.CORRECT, 1.0)
  score = 0.0 if reward == "all" else verdict["passed"] / verdict["total"]
  return _grade_wrong(verdict["failure"], score)


def _grade_wrong(failure: str, score: float = 0.0) -> Grade:
  """The grade of a wrong program, with its failure as feedback for the policy."""
  return Grade(Outcome.WRONG, score, failure, feedback=failure)


_sandboxes = Sandboxes()


def _judge_program(source: str, tests: Mapping[str, Any]) -> dict[str, Any]:
  """The verdict of a sandbox on a program; this process may grade other programs meanwhile."""
  with waiting(_MAX_WAIT_S), _sandboxes.take() as (sandbox, leave_core):
    return tasks.judge(sandbox, source, tests, on_asleep=leave_core)


def code_self_test(*, reward: str = "all") -> None:
  """Opens this process's sandbox; raises an error unless it isolates and judges correctly."""
  cases = [{"input": [2], "output": 3}]
  reference = {"style": "function", "entry_point": "f", "cases": cases, "time_limit_s": 10.0}
  programs = ("def f(x):\n  return x + 1", "def f(x):\n  return x")
  outcomes = [code(program, reference, reward=reward).outcome for program in programs]
  if outcomes != [Outcome.CORRECT, Outcome.WRONG]:
    raise RuntimeError(
      f"the self-test of code failed: a right and a wrong program were graded {outcomes}, expected"
      " correct and wrong"
    )
