"""Environments by name: "guess(high=100)" or "my_module:factory" in a configuration."""

from __future__ import annotations

import inspect

from rlvr_jax import environments, specs
from rlvr_jax.environments.base import Environment, Grade

_OF_RUN = ("grade",)  # parameters of a factory that a string cannot set


def parse_environment(field: str, text: str) -> specs.Spec:
  """Parses and checks an environment's string; only workers import a user's module.

  Args:
    field: start of the error messages, such as "config.environment.name".
    text: the string.
  Raises:
    ValueError: it is not a component's string, or has an unknown name or hyper-parameters.
  """
  spec = specs.parse(field, text)
  if ":" not in spec.name:
    owner = f"{field} = {text!r}"
    factory = specs.find_factory(owner, environments, spec.name)
    specs.check_keywords(owner, spec.name, factory, spec.arguments, _OF_RUN)
  return spec


def make_environment(text: str, grade: Grade) -> Environment:
  """Makes the environment of a rollout.

  Args:
    text: its string.
    grade: for a factory that asks for it.
  Raises:
    ValueError: as `parse_environment`, or the factory raised it, or what it returned has no `step`.
  """
  spec = parse_environment("environment", text)
  owner = f"environment = {text!r}"
  factory = specs.find_factory(owner, environments, spec.name)
  specs.check_keywords(owner, spec.name, factory, spec.arguments, _OF_RUN)
  of_run = {"grade": grade} if "grade" in inspect.signature(factory).parameters else {}
  environment = factory(**spec.arguments, **of_run)
  missing = [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]
  if missing:
    raise ValueError(
      f"{owner}: {spec.name} returned {type(environment).__name__}, which has no {missing[0]};"
      " return an object with reset(problem, seed) and step(text)"
    )
  return environment
