"""Graders by name: "mathematics" or "code(reward='fraction')" in a configuration.

A grader is a plain function, run in worker processes:

    def grade(completion: str, reference: Mapping[str, Any], *, keyword=1) -> Grade | float: ...

It is called with the completion's text and the problem's JSON-serializable reference, by position,
and with the hyper-parameters from its string as keywords. If the prompt ends with "<think>", as in
some chat templates, the text begins with that tag. Instead of a Grade, the grader may return the
score as a number (or bool): the completion is correct at a score of 1 or more, else wrong. The
score of a wrong completion counts only if `config.grading.outcomes.wrong` is "score". An exception,
a number beyond ±1e30, or any other return value makes the outcome `crashed`; the outcome is `wrong`
if the grader exceeds its memory or recursion limit. Coroutines, generators and functions that
cannot take two arguments are refused at start-up.

If the grader's module also has `<function>_self_test()`, each worker calls this self-test once at
start-up, with the hyper-parameters that the self-test's signature names. The self-test should raise
an exception if the grader cannot work on this machine. The time limit of an item does not include
this call, so put slow imports into the self-test.

Write your own grader as "my_module:function(keyword=1)"; only the workers import it.

`by_reference` and `weighted` call other graders, which the reference names by their strings. A
worker loads such a grader and runs its self-test when an item first needs it, within that item's
time limit. A grader in the pool's `preload` is loaded at the worker's start instead. With
`weighted`, set the reward policy of "wrong" and "unparseable" to "score": by default these outcomes
are worth 0, and the other graders would count only for correct answers.
"""

from __future__ import annotations

import decimal
import functools
import importlib
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr_jax import specs
from rlvr_jax.ops.checks import MAX_SCORE, is_score
from rlvr_jax.rewards.code import code
from rlvr_jax.rewards.extraction import find_stated_answer
from rlvr_jax.rewards.formats import boxed, pattern, think_answer
from rlvr_jax.rewards.graders import format_decimal, gsm8k, reasoning_gym
from rlvr_jax.rewards.mathematics import mathematics
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rewards.tour import tour
from rlvr_jax.workers.worker import on_main_thread

__all__ = [  # the graders that a string can name without a module
  "boxed",
  "by_reference",
  "code",
  "gsm8k",
  "mathematics",
  "pattern",
  "reasoning_gym",
  "think_answer",
  "tour",
  "weighted",
]

Grader = Callable[[str, Mapping[str, Any]], Grade]

_NOT_PLAIN = (
  inspect.iscoroutinefunction,
  inspect.isasyncgenfunction,
  inspect.isgeneratorfunction,
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


# --- from a string to a grader --------------------------------------------------------------------


def parse_grader(field: str, text: str) -> specs.Spec:
  """Parses and checks the string of a grader; only the workers import a user's module.

  Args:
    field: start of the error messages, such as "config.grading.grader".
    text: the string.
  Raises:
    ValueError: the text does not have the form "name(keyword=value)", see `specs.parse`; or it has
      an unknown name, or hyper-parameters that the grader does not take.
  """
  spec = specs.parse(field, text)
  if ":" not in spec.name:
    _find_function(f"{field} = {text!r}", spec)
  return spec


def load_grader(text: str) -> Grader:
  """Loads the grader that a string names and runs its self-test; exceptions of the test propagate.

  Raises:
    ValueError: `parse_grader` refuses the string; the module or function does not exist; or the
      function is not a plain function of (completion, reference) and the given hyper-parameters.
  """
  spec = parse_grader("grader", text)
  function = _find_function(f"grader = {text!r}", spec)
  _run_self_test(function, spec)

  def grade(completion: str, reference: Mapping[str, Any]) -> Grade:
    return convert_to_grade(function(completion, reference, **spec.arguments))

  def grade_on_main_thread(completion: str, reference: Mapping[str, Any]) -> Grade:
    return on_main_thread(functools.partial(grade, completion, reference))

  # A user's grader may set handlers of signals, such as for a limit of time of its own.
  return grade_on_main_thread if ":" in spec.name else grade


def _find_function(owner: str, spec: specs.Spec) -> Callable[..., Any]:
  """Finds the function that a spec names.

  Raises:
    ValueError: the function cannot grade; the message begins with `owner`.
  """
  function = specs.find_factory(owner, sys.modules[__name__], spec.name)
  if any(is_kind(function) for is_kind in _NOT_PLAIN):
    raise ValueError(
      f"{owner}: {spec.name} is a coroutine or generator function; a grader must be a plain"
      " function that returns its grade"
    )
  try:
    signature = inspect.signature(function)
  except ValueError:
    return function  # some functions written in C have no signature
  item_parameters = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL][:2]
  specs.check_keywords(owner, spec.name, function, spec.arguments, item_parameters)
  try:
    signature.bind("completion", {}, **spec.arguments)
  except TypeError as error:
    raise ValueError(
      f"{owner}: {spec.name} has the signature {signature}, which does not accept a grader's"
      f" arguments (completion, reference) and the keywords of its string: {error}"
    ) from error
  return function


def _run_self_test(function: Callable[..., Any], spec: specs.Spec) -> None:
  module, _, name = spec.name.rpartition(":")
  owner = importlib.import_module(module or function.__module__)
  self_test = getattr(owner, f"{name}_self_test", None)
  if self_test is not None:
    accepted = inspect.signature(self_test).parameters
    self_test(
      **{keyword: value for keyword, value in spec.arguments.items() if keyword in accepted}
    )


def convert_to_grade(value: Any) -> Grade:
  """Converts a grader's return value; a number is the score, and 1 or more is correct.

  Raises:
    TypeError: the value is neither a Grade with an Outcome nor a number.
    ValueError: the score is not a number within ±1e30.
  """
  if isinstance(value, numbers.Real | np.bool_):
    value = Grade(Outcome.CORRECT if value >= 1 else Outcome.WRONG, value)  # type: ignore
  if not isinstance(value, Grade) or not isinstance(value.outcome, Outcome):
    raise TypeError(f"the grader returned {value!r:.200}, expected a Grade or a number")
  score = _check_score(value.score)
  texts = str(value.detail), str(value.answer), str(value.feedback)
  return Grade(value.outcome, score, *texts, tuple(map(_check_score, value.parts)))


def _check_score(value: Any) -> float:
  """Converts a score to a float; raises ValueError if the score is not a number within ±1e30."""
  try:
    score = float(value)
  except (TypeError, ValueError, OverflowError):
    score = math.nan
  if not is_score(score):
    raise ValueError(
      f"the grader returned score {value!r:.200}, expected a number within ±{MAX_SCORE:g}"
    )
  return score


# --- completions that are right -------------------------------------------------------------------

# Grader → how a completion has to write the reference's answer.
_RIGHT = {"gsm8k": "#### {}", "mathematics": "\\boxed{{{}}}", "reasoning_gym": "#### {}"}


def right_completion(grader: str, reference: Mapping[str, Any]) -> str | None:
  """A completion with the reference's answer, which the grader must grade as correct.

  None if the reference has no answer, if the grader does not read one, or if the grader is a user's
  own.
  """
  name = specs.parse("grader", grader).name
  if name in ("by_reference", "weighted"):
    part = reference if name == "by_reference" else reference["parts"][0]
    return right_completion(part["grader"], part["reference"])
  answer = reference.get("answer")
  if name not in _RIGHT or answer in (None, ""):
    return None
  if name == "mathematics":  # the answer may be a whole solution
    stated = find_stated_answer(str(answer))
    answer = answer if stated is None else stated
  if name == "gsm8k" and isinstance(answer, float):  # 1e+22 is no number of a solution
    answer = format_decimal(decimal.Decimal(str(answer)))
  return _RIGHT[name].format(answer)


# --- graders that call others --------------------------------------------------------------------


@functools.cache
def _load_part(text: str) -> tuple[str, Grader]:
  """The name of a grader's function, for `Grade.detail`, and the grader, which is loaded once."""
  return specs.parse("grader", text).name.rpartition(":")[2], load_grader(text)


def by_reference(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Calls the grader that the reference names; for mixtures of tasks.

  Args:
    completion: text.
    reference: "grader" (its string) and "reference" (passed on to that grader).
  """
  _, grader = _load_part(reference["grader"])
  return grader(completion, reference["reference"])


def weighted(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Adds the weighted scores of several graders, Σ w·score; the first grader decides correctness.

  Args:
    completion: text.
    reference: "parts", at least one {"grader": its string, "weight": w, "reference": {…}}.
  Returns:
    A grade with the outcome and answer of the first grader, and with the feedback and scores of all
    graders. Its score is the sum, whatever the outcome is. But if a grader crashed, the sum would
    lack a term: then the outcome is crashed, the score is 0, and the answer, the feedback and the
    graders' scores are empty.
  Raises:
    ValueError: "parts" is empty.
  """
  parts = reference["parts"]
  if not parts:
    raise ValueError("'parts' is empty, expected at least one grader with weight and reference")
  grades = [by_reference(completion, part) for part in parts]
  score = sum(part["weight"] * grade.score for part, grade in zip(parts, grades, strict=True))
  crashed = any(grade.outcome is Outcome.CRASHED for grade in grades)
  detail = "; ".join(
    f"{_load_part(part['grader'])[0]}: {grade.outcome} {grade.score:g} {grade.detail}".rstrip()
    for part, grade in zip(parts, grades, strict=True)
  )
  if crashed:
    return Grade(Outcome.CRASHED, detail=detail)
  feedback = "\n".join(grade.feedback for grade in grades if grade.feedback)
  scores = tuple(grade.score for grade in grades)
  return Grade(grades[0].outcome, score, detail, grades[0].answer, feedback, scores)


def weighted_reference(
  grader: str, reference: Mapping[str, Any], extra: Sequence[tuple[str, float]] = ()
) -> dict[str, Any]:
  """The reference with which `weighted` adds w·score of extra graders to the main grader's score.

  Args:
    grader: string of the main grader, with weight 1; it decides what is correct.
    reference: the reference for all graders.
    extra: (string, weight w) of each extra grader.
  """
  pairs = [(grader, 1.0), *extra]
  return {
    "parts": [
      {"grader": text, "weight": weight, "reference": dict(reference)} for text, weight in pairs
    ]
  }
