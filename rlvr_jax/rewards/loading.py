"""From a grader's string, such as "code(reward='fraction')", to a function that returns grades."""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlvr_jax import specs
from rlvr_jax.rewards.outcome import Grade, Outcome

Grader = Callable[[str, Mapping[str, Any]], Grade]

_NOT_PLAIN = (
  inspect.iscoroutinefunction,
  inspect.isasyncgenfunction,
  inspect.isgeneratorfunction,
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_PATH_OF_OURS = re.compile(r"rlvr_jax\.rewards\.\w+:(\w+)")


def checked_grader(field: str, text: str) -> specs.Spec:
  """The parsed string of a grader; a user's module is not imported here, only by the workers.

  Args:
    field: begins the messages, such as "config.grading.grader".
    text: the string.
  Raises:
    ValueError: not a component's string, an unknown name, or hyper-parameters that the grader does
      not take.
  """
  spec = specs.parse(field, text)
  if ":" not in spec.name:
    _function(f"{field} = {text!r}", spec)
  elif (found := _PATH_OF_OURS.fullmatch(spec.name)) and found[1] in _by_name().__all__:
    new = str(spec._replace(name=found[1]))
    raise ValueError(f"{field} = {text!r} is an old spelling; write {new!r}")
  return spec


def load_tested(text: str) -> Grader:
  """The grader that a string names, after its self-test, whose exceptions pass through.

  Raises:
    ValueError: as `checked_grader`; or the module or function does not exist, or is not a plain
      function of (completion, reference) and the hyper-parameters given.
  """
  spec = checked_grader("grader", text)
  function = _function(f"grader = {text!r}", spec)
  _self_test(function, spec)
  return lambda completion, reference: as_grade(function(completion, reference, **spec.arguments))


def _by_name():
  from rlvr_jax.rewards import by_name  # here to avoid a cycle: it imports graders that load others

  return by_name


def _function(owner: str, spec: specs.Spec) -> Callable[..., Any]:
  function = specs.find(owner, _by_name(), spec.name)
  if any(is_kind(function) for is_kind in _NOT_PLAIN):
    raise ValueError(
      f"{owner}: {spec.name} is a coroutine or generator function; a grader returns its grade"
    )
  try:
    signature = inspect.signature(function)
  except ValueError:
    return function  # some functions written in C have no signature
  of_items = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL][:2]
  specs.check_keywords(owner, spec.name, function, spec.arguments, of_items)
  try:
    signature.bind("completion", {}, **spec.arguments)
  except TypeError as error:
    raise ValueError(
      f"{owner}: {spec.name} has the signature {signature}, but is called with (completion,"
      f" reference) and the keywords of the string: {error}"
    ) from error
  return function


def _self_test(function: Callable[..., Any], spec: specs.Spec) -> None:
  module, _, name = spec.name.rpartition(":")
  owner = importlib.import_module(module or function.__module__)
  test = getattr(owner, f"{name}_self_test", None)
  if test is not None:
    accepted = inspect.signature(test).parameters
    test(**{keyword: value for keyword, value in spec.arguments.items() if keyword in accepted})


def as_grade(value: Any) -> Grade:
  """Converts what a grader returned; a number is a score: correct at 1 or more, wrong below.

  Raises:
    TypeError: it is neither a Grade with an Outcome nor a number.
    ValueError: the score is not finite.
  """
  if isinstance(value, numbers.Real | np.bool_):
    outcome = Outcome.CORRECT if float(value) >= 1 else Outcome.WRONG
    value = Grade(outcome, float(value))
  if not isinstance(value, Grade) or not isinstance(value.outcome, Outcome):
    raise TypeError(f"the grader returned {value!r:.200}, expected a Grade or a number")
  try:
    score = float(value.score)
  except (TypeError, ValueError):
    score = math.nan
  if not math.isfinite(score):
    raise ValueError(f"the grader returned score {value.score!r:.200}, expected a finite number")
  return Grade(value.outcome, score, str(value.detail), str(value.answer))
