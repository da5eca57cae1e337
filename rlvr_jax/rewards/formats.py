"""Graders of a completion's format: correct (score 1) if it has the format, else wrong (0).

They do not check the answer; `combined.weighted` adds them to a grader that does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlvr_jax.rewards.extraction import boxes
from rlvr_jax.rewards.graders import THINK_CLOSE, THINK_OPEN, after_thinking
from rlvr_jax.rewards.outcome import Grade, Outcome


def _grade(problem: str) -> Grade:
  if problem:
    return Grade(Outcome.WRONG, detail=problem)
  return Grade(Outcome.CORRECT, 1.0)


def boxed(completion: str, reference: Mapping[str, Any]) -> Grade:
  r"""Exactly one \boxed{…} or \fbox{…}, closed and not empty, after any "</think>"."""
  del reference
  text = after_thinking(completion)
  if text is None:
    return _grade(f"no {THINK_CLOSE}")
  found, unclosed = boxes(text)
  if len(found) != 1 or unclosed:
    return _grade(
      f"{len(found)} boxes{' and one never closed' if unclosed else ''}, expected exactly one"
    )
  return _grade("" if found[0].content.strip() else "an empty box")


def think_answer(completion: str, reference: Mapping[str, Any]) -> Grade:
  """One "<think>…</think>" at the start, not empty, then an answer.

  If the prompt already ends with "<think>", graders get that tag at the text's beginning, and the
  completion must not open it again.
  """
  del reference
  text = completion.strip()
  if not text.startswith(THINK_OPEN):
    return _grade(f"does not start with {THINK_OPEN}")
  thought, closing, answer = text[len(THINK_OPEN) :].partition(THINK_CLOSE)
  if not closing:
    return _grade(f"no {THINK_CLOSE}")
  if THINK_OPEN in thought + answer or THINK_CLOSE in answer:
    return _grade("more than one thought")
  return _grade("" if thought.strip() and answer.strip() else "an empty thought or answer")


def pattern(completion: str, reference: Mapping[str, Any], *, regex: str) -> Grade:
  """A regular expression is found in the completion ("." matches newlines).

  Anchor it with \\A and \\Z to match the full completion. A pattern that backtracks indefinitely
  exceeds the item's time limit.
  """
  del reference
  found = re.search(regex, completion, re.DOTALL)
  return _grade("" if found else f"no match of {regex!r:.200}")


def pattern_self_test(*, regex: str) -> None:
  """Raises unless `regex` is a regular expression."""
  re.compile(regex)
