"""Helpers for the factories of tasks: checks, templates, and one grader for several tasks."""

from __future__ import annotations

import difflib
import functools
import math
import numbers
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.sources import Change

BY_REFERENCE = "by_reference"  # uses the grader that a reference names
_COMMON_ANSWER_SHARE = 0.1
_MAX_WIDTH = 100_000  # characters of a field; a larger width is a mistake and would fill the memory


def find_field(fields: Mapping[str, Any], name: str) -> Any:
  """The value of a field or of a nested field: "reward_model.ground_truth", "choices.0".

  Raises:
    KeyError: there is no such field.
  """
  if name in fields:
    return fields[name]
  value: Any = fields
  for key in name.replace("[", ".").replace("]", "").split("."):
    try:
      value = value[int(key)] if isinstance(value, list | tuple) else value[key]
    except (IndexError, KeyError, TypeError, ValueError):
      raise KeyError(name) from None
  return value


def as_text(name: str, value: Any) -> str:
  """A field's value as text; raises TypeError for null, NaN, lists and objects."""
  is_number = isinstance(value, numbers.Number) and not (
    isinstance(value, float) and not math.isfinite(value)
  )
  if not (is_number or isinstance(value, str)):
    raise TypeError(f"{name} is {value!r:.80}, expected a text or a number")
  return str(value)


class _Template(string.Formatter):
  """Templates whose fields are found by `find_field`."""

  def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
    value = find_field(kwargs, field_name)
    as_text(field_name, value)  # only checks: a number may have a format
    return value, field_name


def fill_template(what: str, template: str, fields: Mapping[str, Any]) -> str:
  """The template, filled in with the values that `find_field` finds; errors list all fields."""
  try:
    specs = " ".join(spec or "" for _, _, spec, _ in string.Formatter().parse(template))
    width = max(map(int, re.findall(r"\d+", specs)), default=0)
    if width > _MAX_WIDTH:
      raise ValueError(f"a field has a width of {width}; at most {_MAX_WIDTH} is allowed")
    return _Template().vformat(template, (), fields)
  except KeyError as error:
    similar_names = difflib.get_close_matches(str(error.args[0]), fields, n=1)
    raise ValueError(
      f"{what} is {template!r}, but there is no field {error}, only {sorted(fields)}"
      + (f"; did you mean {similar_names[0]!r}?" if similar_names else "")
    ) from error
  except (ValueError, IndexError, AttributeError, TypeError) as error:
    raise ValueError(
      f"{what} is {template!r}, a template that cannot be filled in ({type(error).__name__}:"
      f" {error}); allowed fields are {sorted(fields)}"
    ) from error


def check_available(owner: str, name: str, size: int, available: int) -> None:
  """Raises ValueError unless `size` problems can be taken from `available` problems."""
  if size > available:
    raise ValueError(
      f"{owner}: {name} = {size}, but only {available} problems are available; lower {name}"
    )


def unify_graders(graders: Sequence[str]) -> tuple[str, list[Change]]:
  """One grader for several tasks, and for each task a function that adapts its problems."""
  if len(set(graders)) == 1:
    return graders[0], [lambda problem: problem] * len(graders)
  return BY_REFERENCE, [functools.partial(_add_grader_name, grader=grader) for grader in graders]


def _add_grader_name(problem: Problem, grader: str) -> Problem:
  """The problem with a reference that names its grader, and contains its own reference."""
  if grader == BY_REFERENCE:
    return problem
  return problem.wrap({"grader": grader, "reference": problem.reference})


def warn_of_common_answer(task: Task) -> Task:
  """Returns the task; logs a warning if a constant answer solves many held-out problems."""
  share = task.most_common_answer_share()
  is_shared = share * len(task.held_out) > 1.5  # among few problems, a single one is a large share
  if is_shared and share > _COMMON_ANSWER_SHARE:
    logging.warning(
      "task %s: one answer is right for %.0f %% of the held-out problems; a policy that always "
      "gives this answer scores that much", task.name, 100 * share,
    )  # fmt: skip
  return task
