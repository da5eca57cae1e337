"""Grades programs by running them against tests, in a sandbox."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from rlvr_jax.codejudge import sandbox as sandboxes
from rlvr_jax.codejudge import tasks
from rlvr_jax.rewards import deadlines
from rlvr_jax.rewards.graders import THINK_CLOSE, THINK_OPEN
from rlvr_jax.rewards.outcome import Grade, Outcome

REWARDS = ("all", "fraction")

_PYTHON = ("python", "python3", "py")
# Indentation, with a list's marker if it is on the fence's line; fence; info string.
_OPENING = re.compile(r"([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(`{3,}(?!.*`)|~{3,})[ \t]*(\S*)")


def program_text(completion: str) -> str:
  """The program in a completion, after any "</think>".

  Returns:
    the last block whose info string is Python; else, of the blocks without an info string, the last
    that parses as Python, or the last; else all text, also if it is Python with fences only in its
    strings. "" if a "<think>" is never closed; programs may have these tags in their strings.
  """
  _, closed, answer = completion.rpartition(THINK_CLOSE)
  if not closed and answer.lstrip().startswith(THINK_OPEN):
    return ""
  answer = answer.replace("\r\n", "\n").replace("\ufeff", "")
  blocks = _blocks(answer)
  called = [text for info, text in blocks if info in _PYTHON]
  unnamed = [text for info, text in blocks if not info]
  if not called + unnamed or tasks.is_python(answer):
    return answer
  if called or len(unnamed) == 1:
    return (called or unnamed)[-1]
  return next(filter(tasks.is_python, reversed(unnamed)), unnamed[-1])


def _blocks(text: str) -> list[tuple[str, str]]:
  """Info string and text of each fenced block; one that is never closed runs to the end."""
  blocks: list[tuple[str, list[str]]] = []
  fence: re.Match[str] | None = None
  for line in io.StringIO(text):
    if fence is None:
      if fence := _OPENING.match(line):
        blocks.append((fence[3].lower(), []))
    elif _closes(line, fence):
      fence = None
    else:
      blocks[-1][1].append(line[min(len(fence[1]), tasks.indentation(line)) :])
  return [(info, "".join(lines)) for info, lines in blocks]


def _closes(line: str, fence: re.Match[str]) -> bool:
  """As in CommonMark: at least as long, without an info string, and not indented like code."""
  mark = line.strip()
  bare = len(mark) >= len(fence[2]) and set(mark) == {fence[2][0]}
  return bare and tasks.indentation(line) <= len(fence[1]) + 3


def code(completion: str, reference: Mapping[str, Any], *, reward: str = "all") -> Grade:
  """Runs a program against its tests.

  Args:
    completion: the program is its last ```python block (or unnamed block), see `program_text`.
    reference: the tests, see `codejudge.tasks`.
    reward: score of a program that does not pass all tests: 0 for "all", or for "fraction" the
      fraction of tests that it passes.
  Returns:
    correct (score 1) if all tests pass; wrong, with the score that `reward` chooses; timeout; or
    unparseable if there is no program.
  Raises:
    SandboxError: the sandbox does not work, so the program has not been judged.
    ValueError, KeyError: the reference or the reward is not as above.
  """
  tasks.check(reference)
  if "reward" in reference:
    raise ValueError(
      f"the reference has a reward; leave it out, and write code(reward={reference['reward']!r})"
    )
  if reward not in REWARDS:
    raise ValueError(f"reward is {reward!r}, allowed: {list(REWARDS)}")
  source = program_text(completion)
  if not source.strip():
    return Grade(Outcome.UNPARSEABLE, detail="no code")
  return _grade(_verdict(source, reference), reward)


def _grade(verdict: Mapping[str, Any], reward: str) -> Grade:
  if "timeout" in verdict:
    return Grade(Outcome.TIMEOUT, detail="time limit exceeded")
  if "memory" in verdict:
    return Grade(Outcome.WRONG, detail="memory limit exceeded")
  if "died" in verdict:
    return Grade(Outcome.WRONG, detail=f"the program broke its judge (status {verdict['died']})")
  if verdict["passed"] == verdict["total"]:
    return Grade(Outcome.CORRECT, 1.0)
  score = 0.0 if reward == "all" else verdict["passed"] / verdict["total"]
  return Grade(Outcome.WRONG, score, verdict["failure"])


_sandbox: sandboxes.Sandbox | None = None  # of this process; opened when first needed


def _verdict(source: str, tests: Mapping[str, Any]) -> dict[str, Any]:
  global _sandbox
  if _sandbox is None:
    _sandbox = sandboxes.open_sandbox()
  deadlines.announce(sandboxes.longest_s(tasks.time_limit_s(tests)))
  try:
    return tasks.judge(_sandbox, source, tests, on_asleep=deadlines.asleep)
  except sandboxes.SandboxError:
    _sandbox.close()
    _sandbox = None  # the next item gets a new one
    raise


def code_self_test(*, reward: str = "all") -> None:
  """Opens this process's sandbox; raises unless it isolates and tells right from wrong."""
  cases = [{"input": [2], "output": 3}]
  reference = {"style": "function", "entry_point": "f", "cases": cases, "time_limit_s": 10.0}
  programs = ("def f(x):\n  return x + 1", "def f(x):\n  return x")
  got = [code(program, reference, reward=reward).outcome for program in programs]
  if got != [Outcome.CORRECT, Outcome.WRONG]:
    raise RuntimeError(f"a right and a wrong program were graded {got}")
