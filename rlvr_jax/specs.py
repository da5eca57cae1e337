"""Components named by strings: "fade(alpha_max=3.0)", "my_package.module:factory(x=1)".

Hyper-parameters are literals, read by `ast.literal_eval`: no code in a string is evaluated. But the
function that a string names is called, and it may be in any module: `outside_package` finds strings
that name a module. This module imports the standard library only.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import glob
import importlib
import inspect
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_NAME = re.compile(r"[A-Za-z_][\w.]*(?::[A-Za-z_]\w*)?")
_FORM = re.compile(rf"\s*({_NAME.pattern})\s*(\(.*\))?\s*", re.DOTALL)
_RULE = (
  "write name, name(keyword=value, …) or my_module:function(keyword=value, …), where the values are"
  " literals: numbers, quoted text, True, None, tuples of them"
)


class Spec(NamedTuple):
  """The name and the arguments of a component; `str` returns its string."""

  name: str  # the name of a factory of the package, or "my_package.module:factory"
  arguments: Mapping[str, Any]  # the factory's hyper-parameters, literals

  def __str__(self) -> str:
    inner = ", ".join(f"{keyword}={value!r}" for keyword, value in self.arguments.items())
    return f"{self.name}({inner})" if inner else self.name


def parse(field: str, text: str) -> Spec:
  """Parses a component's string; "name" and "name()" are the same.

  Args:
    field: field of the configuration, such as "config.advantage", for messages.
    text: the string.
  Raises:
    ValueError: the string does not have the form of a component.
  """
  match = _FORM.fullmatch(text) if isinstance(text, str) else None
  if match is None:
    raise ValueError(f"{field} = {text!r} is not a component: {_RULE}")
  name, inner = match.groups()
  try:
    call = ast.parse(f"f{inner or '()'}", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
      raise ValueError("the text in parentheses is not a list of keyword=value")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
      if keyword.arg is None:
        raise ValueError("** is not a keyword")
      if keyword.arg in arguments:
        raise ValueError(f"{keyword.arg} is given twice")
      arguments[keyword.arg] = _parse_literal(keyword)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    reason = error.msg if isinstance(error, SyntaxError) else error
    raise ValueError(f"{field} = {text!r}: {reason or type(error).__name__}; {_RULE}") from error
  return Spec(name, arguments)


def _parse_literal(keyword: ast.keyword) -> Any:
  try:
    return ast.literal_eval(keyword.value)
  except (ValueError, TypeError) as error:
    value = keyword.value
    hint = f" (is it {keyword.arg}={value.id!r}?)" if isinstance(value, ast.Name) else ""
    raise ValueError(f"the value of {keyword.arg} is not a literal{hint}") from error


def components(value: Any, field: str = "config") -> Iterator[tuple[str, str, str]]:
  """Yields (field, name, string) for each string of a configuration that may be a component.

  Args:
    value: the configuration, or a part of it: JSON values and tuples.
    field: dotted name of the field.
  """
  if isinstance(value, Mapping):
    for name, part in value.items():
      yield from components(part, f"{field}.{name}")
  elif isinstance(value, list | tuple):
    for index, part in enumerate(value):
      yield from components(part, f"{field}[{index}]")
  elif isinstance(value, str) and (match := _FORM.fullmatch(value)):
    yield field, match[1], value
    if ":" not in match[1]:  # arguments of a component may be components
      with contextlib.suppress(ValueError):
        yield from components([*parse(field, value).arguments.values()], field)


def outside_package(value: Any, field: str = "config") -> Iterator[tuple[str, str]]:
  """Yields (field, string) for each of the `components` that names a function by its module."""
  return ((where, text) for where, name, text in components(value, field) if ":" in name)


def make(field: str, package: types.ModuleType, text: str, kind: Any, **of_run: Any) -> Any:
  """Makes the component that a string names.

  Args:
    field: as in `parse`.
    package: the package whose `__all__` lists the factories that can be named.
    text: the string.
    kind: required class of the result.
    of_run: values of the run, by parameter name; a factory that has such a parameter gets the run's
      value, and the string must not set the parameter.
  Raises:
    ValueError: the string or the name is invalid, hyper-parameters are unknown or missing, or the
      factory raises an error. ImportError and OSError of the factory pass through instead.
  """
  owner = f"{field} = {text!r}"
  try:
    return make_from_spec(owner, package, parse(field, text), kind, **of_run)
  except ValueError as error:
    if str(error).startswith(owner):
      raise
    raise ValueError(f"{owner}: {error}") from error


def make_from_spec(
  owner: str, package: types.ModuleType, spec: Spec, kind: Any, **of_run: Any
) -> Any:
  """Makes the component of a parsed string, as `make` does; messages begin with `owner`."""
  factory = find_called(owner, package, spec, of_run, kind)
  parameters = inspect.signature(factory).parameters
  arguments = {**spec.arguments, **{k: v for k, v in of_run.items() if k in parameters}}
  try:
    component = factory(**arguments)
  except (ValueError, ImportError, OSError):
    raise
  except Exception as error:
    raise ValueError(f"{owner}: {spec.name} raised {_describe_error(error)}") from error
  if not isinstance(component, kind):
    raise ValueError(
      f"{owner}: {spec.name} returned {type(component).__name__}, expected {kind.__name__}"
    )
  return component


def find_called(
  owner: str,
  package: types.ModuleType,
  spec: Spec,
  of_run: Collection[str] = (),
  kind: Any = object,
) -> Callable[..., Any]:
  """Finds the factory that a parsed string names, and checks the string's arguments.

  Args:
    owner: start of messages.
    package: as in `make`.
    spec: the result of `parse`.
    of_run: names of the parameters that the run sets.
    kind: class that the factory should return, for messages.
  Raises:
    ValueError: no factory has this name, or hyper-parameters are unknown or missing.
  """
  factory = find_factory(owner, package, spec.name)
  check_keywords(owner, spec.name, factory, spec.arguments, of_run)
  parameters = inspect.signature(factory).parameters
  variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  missing = [
    name
    for name, parameter in parameters.items()
    if name not in spec.arguments and name not in of_run
    and parameter.default is parameter.empty and parameter.kind not in variable
  ]  # fmt: skip
  if missing:
    rule = ""
    if any(parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY for name in missing):
      # The name may be that of the component, such as a loss function, instead of its factory.
      rule = (
        "; the name must be of a factory, whose parameters are hyper-parameters and which returns"
        f" {kind.__name__}"
      )
    raise ValueError(f"{owner}: {spec.name} needs a value of {', '.join(missing)}{rule}")
  return factory


def find_factory(owner: str, package: types.ModuleType, name: str) -> Callable[..., Any]:
  """Finds the factory of a name, among a package's exports or in the user's module.

  Raises:
    ValueError: no factory has this name.
  """
  module_name, colon, function = name.partition(":")
  if not colon:
    if name not in package.__all__:
      raise ValueError(
        f"{owner}: {name!r} is unknown;"
        f" {_suggest_export(package, name) or _did_you_mean(similar_names(name, package.__all__))}"
        " To use your own, write my_module:function"
      )
    return getattr(package, name)
  if not _NAME.fullmatch(name):  # `outside_package` does not find such a name
    raise ValueError(f"{owner}: {name!r} is not of the form my_module:function")
  if os.getcwd() not in sys.path:  # `python -m` adds it, an installed command does not
    sys.path.append(os.getcwd())
  try:
    module = importlib.import_module(module_name)
  except Exception as error:
    if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
      raise ValueError(
        f"{owner}: {error}; start the program in the folder of {module_name.partition('.')[0]!r},"
        " set PYTHONPATH=FOLDER, or install it"
      ) from error
    raise ValueError(f"{owner}: importing {module_name} raised {_describe_error(error)}") from error
  factory = getattr(module, function, None)
  if not callable(factory):
    functions = [n for n in dir(module) if callable(getattr(module, n))]
    raise ValueError(
      f"{owner}: {module_name} has no function {function!r};"
      f" {_did_you_mean(similar_names(function, functions))}"
    )
  return factory


def _suggest_export(package: types.ModuleType, name: str) -> str:
  """How to export a factory of this name that exists but is not exported; "" if there is none."""
  factory = getattr(package, name, None)
  is_module = isinstance(package, types.ModuleType) and not hasattr(package, "__path__")
  if is_module and inspect.isfunction(factory) and factory.__module__ == package.__name__:
    file = f"{package.__name__.rpartition('.')[2]}.py"
    return f"{file} has it but does not export it: name {name} in __all__ there."
  for folder in getattr(package, "__path__", ()):
    for file in sorted(glob.glob(os.path.join(glob.escape(folder), "*.py"))):
      with open(file, encoding="utf-8") as lines:
        if re.search(
          rf"^def {re.escape(name)}\(\s*(?:[*)]|\w+[^,=()]*=)", lines.read(), re.MULTILINE
        ):
          room, module = os.path.basename(folder), os.path.basename(file)
          return (
            f"{room}/{module} exists but is not exported: import {name} in {room}/__init__.py and"
            " name it in __all__."
          )
  return ""


def has_parameter(field: str, package: types.ModuleType, text: str, parameter: str) -> bool:
  """Whether the factory that a string names has the parameter."""
  factory = find_factory(f"{field} = {text!r}", package, parse(field, text).name)
  return parameter in inspect.signature(factory).parameters


def check_keywords(
  owner: str,
  name: str,
  factory: Callable[..., Any],
  given: Collection[str],
  of_run: Collection[str] = (),
) -> None:
  """Raises ValueError for a keyword that the factory does not take or that the run sets."""
  parameters = inspect.signature(factory).parameters
  if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
    return
  by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  settable = [n for n, p in parameters.items() if p.kind in by_keyword and n not in of_run]
  for keyword in given:
    if keyword in of_run and keyword in parameters:
      raise ValueError(f"{owner}: {keyword} of {name} comes from the run; leave it out")
    if keyword not in settable:
      similar = similar_names(keyword, settable)
      hint = f" {_did_you_mean(similar)}" if len(similar) < len(settable) else ""
      raise ValueError(f"{owner}: {name} takes no {keyword!r};{hint} {name} takes {settable}")


def _describe_error(error: Exception) -> str:
  """The error in one line, with the line of the program that raised it."""
  frames = traceback.extract_tb(error.__traceback__)
  text = " ".join(str(error).split())
  position = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
  return f"{type(error).__name__}: {text[:300]}{position}"


def _did_you_mean(names: Sequence[str]) -> str:
  """The question "did you mean …?", or the list of allowed names."""
  if len(names) == 1:
    return f"did you mean {names[0]!r}?"
  if len(names) > 10:
    return f"known names: {', '.join(names)}."
  return f"did you mean one of {list(names)}?"


def similar_names(name: str, allowed: Collection[str]) -> list[str]:
  """The allowed names that are most similar to `name`; all allowed names if none is similar."""
  containing = [full for full in allowed if name and name in full]
  return containing or difflib.get_close_matches(name, allowed) or sorted(allowed)
