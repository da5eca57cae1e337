"""The tests of one item: each is evaluated here, and asks the program for what it names."""

from __future__ import annotations

import decimal
import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from .handles import Program, UnsupportedTestError
from .messages import MAX_TEXT, describe
from .processes import execute

# Decimal itself also takes underscores, other scripts' digits, and words.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,6})?", re.ASCII | re.IGNORECASE)


def judge(program: Program, task: Mapping[str, Any]) -> dict[str, Any]:
  """Runs the tests of one item.

  Args:
    program: freshly started.
    task: "style" and its fields, see `_checks`; "stop": whether the first failure ends it.
  Returns:
    "passed" and "total" tests, and "failure", a text on the first failure.
  """
  try:
    program.started()
    checks = _checks(program, task)
  except UnsupportedTestError:
    raise
  except Exception as error:
    return {"passed": 0, "total": task["total"], "failure": f"program: {describe(error)}"}
  passed, failure = 0, ""
  for number, (label, check) in enumerate(checks, 1):
    try:
      check()
      passed += 1
    except UnsupportedTestError:
      raise
    except BaseException as error:  # a test that exits has not passed
      failure = failure or f"test {number} of {task['total']}, {label}: {describe(error)}"
      if task["stop"]:
        break
  return {"passed": passed, "total": task["total"], "failure": failure}


def _checks(program: Program, task: Mapping[str, Any]) -> list[tuple[str, Callable[[], None]]]:
  """Label and function of each test; the function raises where the program fails."""
  if task["style"] == "stdin":
    return [(_label(case), _stdin_check(program, case)) for case in task["cases"]]
  if task["style"] == "function":
    entry = _entry(program, task["entry_point"])
    return [(_label(case), _call_check(entry, case)) for case in task["cases"]]
  namespace: dict[str, Any] = {"__name__": "tests"}
  for module in task["modules"]:
    namespace[module] = importlib.import_module(module)
  execute(task["prelude"], "<prelude>", namespace)
  namespace.pop(task.get("entry_point", ""), None)  # a prompt begins it
  namespace |= program.define([name for name in task["names"] if name not in namespace])
  if task["style"] == "asserts":
    return [(_short(text), _text_check(text, namespace)) for text in task["tests"]]
  return [(task["entry_point"], _candidate_check(task, namespace))]


def _label(case: Mapping[str, Any]) -> str:
  return f"input {_short(case['input'])}"


def _short(value: Any) -> str:
  text = value if isinstance(value, str) else repr(value)
  return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _text_check(text: str, namespace: dict[str, Any]) -> Callable[[], None]:
  return lambda: execute(text, "<test>", namespace)


def _candidate_check(task: Mapping[str, Any], namespace: dict[str, Any]) -> Callable[[], None]:
  def check() -> None:
    candidate = _defined(namespace, task["entry_point"])
    execute(task["test"], "<test>", namespace)
    namespace["check"](candidate)

  return check


def _defined(values: Mapping[str, Any], name: str) -> Any:
  if name not in values:
    raise NameError(f"the program does not define {name!r}")
  return values[name]


def _entry(program: Program, entry_point: str) -> Callable[..., Any]:
  """What a case calls: a function, or "Class.method" of a new object each time.

  A program without the class may define the method's name as a function.
  """
  owner, _, method = entry_point.rpartition(".")
  values = program.define([owner, method])
  if owner in values:
    return lambda *args: getattr(values[owner](), method)(*args)
  return _defined(values, method)


def _call_check(entry: Callable[..., Any], case: Mapping[str, Any]) -> Callable[[], None]:
  def check() -> None:
    got = entry(*json.loads(json.dumps(case["input"])))  # a copy: a program may change its input
    if not _same(got, case["output"]):
      raise AssertionError(f"got {_short(got)}, expected {_short(case['output'])}")

  return check


def _same(got: Any, expected: Any) -> bool:
  """Equality of JSON values; a tuple counts as a list, floats may differ by rounding.

  That is by 1e-9 of an expected float, or by 1e-9 from 0.0; an expected int is met exactly.
  """
  if isinstance(got, (list, tuple)) and isinstance(expected, list):
    return len(got) == len(expected) and all(map(_same, got, expected))
  if isinstance(got, dict) and isinstance(expected, dict):
    # JSON has text keys only, and two keys of a dictionary may have one text
    named = {key if isinstance(key, str) else json.dumps(key): value for key, value in got.items()}
    if len(got) != len(expected) or named.keys() != expected.keys():
      return False
    return all(_same(named[key], expected[key]) for key in named)
  if isinstance(got, float) and isinstance(expected, float):
    return math.isclose(got, expected, rel_tol=1e-9, abs_tol=0.0 if expected else 1e-9)
  return got == expected


def _stdin_check(program: Program, case: Mapping[str, Any]) -> Callable[[], None]:
  def check() -> None:
    result = program.case(case["input"])
    got, status = str(result["output"]), result["status"]
    if status != 0:
      raise RuntimeError(f"exit status {status}: {str(result['stderr']).strip()}")
    if not same_output(got, case["output"]):
      raise AssertionError(f"got {_short(got)!r}, expected {_short(case['output'])!r}")

  return check


def same_output(got: str, expected: str) -> bool:
  """LiveCodeBench's rule: equal line by line, each stripped, or else as exact decimal numbers."""
  lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (got, expected))
  return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(got: str, expected: str) -> bool:
  if got == expected:
    return True
  numbers = _decimals(got)
  return numbers is not None and numbers == _decimals(expected)


def _decimals(line: str) -> list[decimal.Decimal] | None:
  words = line.split()
  return [decimal.Decimal(word) for word in words] if all(map(_NUMBER.fullmatch, words)) else None
