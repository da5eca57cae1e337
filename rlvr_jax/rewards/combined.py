"""Graders made of others, which the reference names by import path.

A part is loaded, and its self-test run, when a worker first meets it, within that item's time; name
it in the pool's `preload` and this happens at the worker's start.

With `weighted` set the reward policy of "wrong" and "unparseable" to "score": by default they are
worth 0, and the other parts would count for right answers only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rewards.worker import as_grade, load_tested


@functools.cache
def _part(path: str) -> Callable[..., Any]:
  return load_tested(path)


def by_reference(completion: str, reference: Mapping[str, Any]) -> Grade:
  """The grade of the grader that the reference names: for mixtures of tasks.

  Args:
    completion: text.
    reference: "grader" (import path) and "reference" (what that grader gets).
  """
  return as_grade(_part(reference["grader"])(completion, reference["reference"]))


def weighted(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Adds the scores of several graders, Σ w·score; the first says what is correct.

  Args:
    completion: text.
    reference: "parts", at least one {"grader": import path, "weight": w, "reference": {…}}.
  Returns:
    The first part's outcome and answer, with the sum as score whatever the outcome; crashed where
    any part is, as the sum would then miss a term.
  """
  parts = reference["parts"]
  if not parts:
    raise ValueError("'parts' is empty, expected at least one grader with weight and reference")
  grades = [by_reference(completion, part) for part in parts]
  score = sum(part["weight"] * grade.score for part, grade in zip(parts, grades, strict=True))
  crashed = any(grade.outcome is Outcome.CRASHED for grade in grades)
  detail = "; ".join(
    f"{part['grader'].partition(':')[2]}: {grade.outcome} {grade.score:g} {grade.detail}".rstrip()
    for part, grade in zip(parts, grades, strict=True)
  )
  if crashed:
    return Grade(Outcome.CRASHED, detail=detail)
  return Grade(grades[0].outcome, score, detail, grades[0].answer)


def weighted_reference(
  grader: str, reference: Mapping[str, Any], extra: Sequence[tuple[str, float]] = ()
) -> dict[str, Any]:
  """The reference with which `weighted` adds w·score of each (grader, w) to a grader's own score.

  Args:
    grader: import path of the main grader, of weight 1: it says what is correct.
    reference: of all of them.
    extra: (import path, weight) of the others.
  """
  pairs = [(grader, 1.0), *extra]
  return {
    "parts": [
      {"grader": path, "weight": weight, "reference": dict(reference)} for path, weight in pairs
    ]
  }
