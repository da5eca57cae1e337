"""Graders of a completion's format: correct (score 1) if it matches the format, else wrong (0).

These graders do not check the answer; `by_name.weighted` combines them with a grader of answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlvr_jax.rewards.extraction import find_boxes
from rlvr_jax.rewards.graders import THINK_CLOSE, THINK_OPEN, strip_thought
from rlvr_jax.rewards.outcome import Grade, Outcome


def _grade_format(violation: str) -> Grade:
  """The grade: correct if `violation` is "", else wrong, with the violation as `detail`."""
  if violation:
    return Grade(Outcome.WRONG, detail=violation)
  return Grade(Outcome.CORRECT, 1.0)


def boxed(completion: str, reference: Mapping[str, Any]) -> Grade:
  r"""Requires exactly one \boxed{…} or \fbox{…}, closed and not empty, after any "</think>"."""
  del reference
  text = strip_thought(completion)
  if text is None:
    return _grade_format(f"no {THINK_CLOSE}")
  boxes, unclosed = find_boxes(text)
  if len(boxes) != 1 or unclosed:
    return _grade_format(
      f"{len(boxes)} boxes{' and one never closed' if unclosed else ''}, expected exactly one"
    )
  return _grade_format("" if boxes[0].content.strip() else "an empty box")


def think_answer(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Requires one "<think>…</think>" at the start, with a thought in it, and then an answer.

  If the prompt already ends with "<think>", graders get that tag at the beginning of the text, and
  the completion must not repeat the tag.
  """
  del reference
  text = completion.strip()
  if not text.startswith(THINK_OPEN):
    return _grade_format(f"does not start with {THINK_OPEN}")
  thought, closing, answer = text[len(THINK_OPEN) :].partition(THINK_CLOSE)
  if not closing:
    return _grade_format(f"no {THINK_CLOSE}")
  if THINK_OPEN in thought + answer or THINK_CLOSE in answer:
    return _grade_format("more than one thought")
  return _grade_format("" if thought.strip() and answer.strip() else "an empty thought or answer")


def pattern(completion: str, reference: Mapping[str, Any], *, regex: str) -> Grade:
  """Requires a match of a regular expression anywhere in the completion ("." matches newlines).

  Anchor the expression with \\A and \\Z to match the full completion. A pattern that backtracks
  indefinitely exceeds the item's time limit.
  """
  del reference
  match = re.search(regex, completion, re.DOTALL)
  return _grade_format("" if match else f"no match of {regex!r:.200}")


def pattern_self_test(*, regex: str) -> None:
  """Raises re.error if `regex` is not a regular expression."""
  re.compile(regex)
