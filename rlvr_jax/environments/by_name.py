"""Environments by name: "guess(high=32)" or "my_module:factory(keyword=1)" in a configuration."""

from __future__ import annotations

import inspect
from typing import Any

from rlvr_jax import environments, specs
from rlvr_jax.environments.base import Environment, Grade, declared_roles

_OF_RUN = ("grade", "deadline_s")  # parameters of factories that the run sets


def parse_environment(field: str, text: str) -> specs.Spec:
  """Parses and checks a string such as "guess(high=32)"; only the workers import a user's module.

  Args:
    field: start of error messages, such as "config.environment.name".
    text: the string.
  Raises:
    ValueError: the string cannot be parsed, its name is unknown, or the factory does not take its
      hyper-parameters.
  """
  spec = specs.parse(field, text)
  if ":" not in spec.name:
    specs.find_called(f"{field} = {text!r}", environments, spec, _OF_RUN)
  return spec


def tries_of(spec: specs.Spec) -> Any:
  """The value of `tries` of one of the package's environments; None if it has no such parameter."""
  if ":" in spec.name:
    return None
  parameter = inspect.signature(getattr(environments, spec.name)).parameters.get("tries")
  return None if parameter is None else spec.arguments.get("tries", parameter.default)


def make_environment(
  field: str, text: str, grade: Grade | None = None, *, deadline_s: float = 30.0
) -> Environment:
  """Makes the environment of one rollout.

  Args:
    field: as in `parse_environment`.
    text: the string.
    grade: the task's grader for the rollout's problem, for a factory with a keyword `grade`.
    deadline_s: limit of a turn, for a factory with a keyword `deadline_s`.
  Raises:
    ValueError: `parse_environment` raises it; the module or factory does not exist; the factory
      raises it; the factory does not return an environment; or `grade` is None, although the
      factory needs it.
  """
  owner = f"{field} = {text!r}"
  spec = specs.parse(field, text)
  parameter = inspect.signature(specs.find_factory(owner, environments, spec.name)).parameters.get(
    "grade"
  )
  if grade is None and parameter is not None and parameter.default is parameter.empty:
    raise ValueError(
      f"{owner}: {spec.name} needs the argument `grade`, but there is no grader; pass `grade` to"
      " EnvironmentPool"
    )
  of_run: dict[str, Any] = {"deadline_s": deadline_s}
  if grade is not None:
    of_run["grade"] = grade
  environment = specs.make_from_spec(owner, environments, spec, object, **of_run)
  for method, parameters in (("reset", "problem, seed"), ("step", "text")):
    if not callable(getattr(environment, method, None)):
      raise ValueError(
        f"{owner}: {spec.name} returned {type(environment).__name__}, which has no"
        f" {method}({parameters}); an environment has reset(problem, seed) and step(text)"
      )
  try:
    declared_roles(environment)
  except ValueError as error:
    raise ValueError(f"{owner}: {error}") from error
  return environment
