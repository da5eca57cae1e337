"""Graders that call other graders, which the reference names by their strings.

A worker loads a part and runs its self-test when an item first needs it, within that item's time
limit. With the part in the pool's `preload`, this happens at the worker's start instead.

With `weighted`, set the reward policy of "wrong" and "unparseable" to "score": by default they are
worth 0, and the other parts would count for right answers only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr_jax import specs
from rlvr_jax.rewards.loading import Grader, load_tested
from rlvr_jax.rewards.outcome import Grade, Outcome


@functools.cache
def _part(text: str) -> tuple[str, Grader]:
  """(name of the grader's function, for `Grade.detail`; the grader)."""
  return specs.parse("grader", text).name.rpartition(":")[2], load_tested(text)


def by_reference(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Calls the grader that the reference names; for mixtures of tasks.

  Args:
    completion: text.
    reference: "grader" (its string) and "reference" (passed on to that grader).
  """
  _, grader = _part(reference["grader"])
  return grader(completion, reference["reference"])


def weighted(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Adds the weighted scores of several graders, Σ w·score; the first decides what is correct.

  Args:
    completion: text.
    reference: "parts", at least one {"grader": its string, "weight": w, "reference": {…}}.
  Returns:
    The first part's outcome and answer, with the sum as the score whatever the outcome; crashed if
    any part crashed, since the sum would then miss a term.
  Raises:
    ValueError: there are no parts.
  """
  parts = reference["parts"]
  if not parts:
    raise ValueError("'parts' is empty, expected at least one grader with weight and reference")
  grades = [by_reference(completion, part) for part in parts]
  score = sum(part["weight"] * grade.score for part, grade in zip(parts, grades, strict=True))
  crashed = any(grade.outcome is Outcome.CRASHED for grade in grades)
  detail = "; ".join(
    f"{_part(part['grader'])[0]}: {grade.outcome} {grade.score:g} {grade.detail}".rstrip()
    for part, grade in zip(parts, grades, strict=True)
  )
  if crashed:
    return Grade(Outcome.CRASHED, detail=detail)
  return Grade(grades[0].outcome, score, detail, grades[0].answer)


def weighted_reference(
  grader: str, reference: Mapping[str, Any], extra: Sequence[tuple[str, float]] = ()
) -> dict[str, Any]:
  """A reference for `weighted`: the main grader's score plus w·score of each extra grader.

  Args:
    grader: string of the main grader, with weight 1; it decides what is correct.
    reference: passed to all graders.
    extra: (string, weight w) of each other grader.
  """
  pairs = [(grader, 1.0), *extra]
  return {
    "parts": [
      {"grader": text, "weight": weight, "reference": dict(reference)} for text, weight in pairs
    ]
  }
