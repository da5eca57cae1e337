"""Evaluates the tests of one item; each sends requests to the program."""

from __future__ import annotations

import ast
import decimal
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from .handles import Program, UnsupportedTestError
from .messages import MAX_TEXT, describe
from .processes import execute

# Makes its calls, yields, and then raises where the program has failed; or raises at once.
_Check: TypeAlias = Iterator[None]

_FAILURES, _CANDIDATE = "__failures__", "__candidate__"  # what tests know them by
# Decimal itself also takes underscores, other scripts' digits, and words.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,6})?", re.ASCII | re.IGNORECASE)


class Failures:
  """Keeps the first exception of the blocks that it guards; execution continues after them."""

  first: BaseException | None = None

  def __enter__(self) -> Failures:
    return self

  def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
    self.first = error if self.first is None else self.first
    return not isinstance(error, UnsupportedTestError)


def judge(program: Program, task: Mapping[str, Any]) -> dict[str, Any]:
  """Runs the tests of one item: first all calls, whatever their results, then the comparisons.

  If a wrong answer ended the calls, a program could learn from their number which guess is right.

  Args:
    program: freshly started.
    task: "style" and its fields, see `_checks`.
  Returns:
    "passed" and "total" tests, and "failure", a text about the first failure.
  """
  try:
    program.started()
    checks = _checks(program, task)
  except UnsupportedTestError:
    raise
  except Exception as error:
    return {"passed": 0, "total": task["total"], "failure": f"program: {describe(error)}"}
  results = [Failures() for _ in checks]
  for _ in ("calls", "comparisons"):
    for (_, check), failures in zip(checks, results, strict=True):
      with failures:  # a test that exits has not passed either
        next(check, None)
  failed = [
    f"test {number} of {task['total']}, {label}: {describe(failures.first)}"
    for number, ((label, _), failures) in enumerate(zip(checks, results, strict=True), 1)
    if failures.first is not None
  ]
  return {
    "passed": len(checks) - len(failed), "total": task["total"], "failure": "".join(failed[:1])
  }  # fmt: skip


def _checks(program: Program, task: Mapping[str, Any]) -> list[tuple[str, _Check]]:
  """Label and check of each test."""
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
  asked = [name for name in task["names"] if name not in namespace]
  if task["names"] and not asked:
    raise UnsupportedTestError(f"the setup imports all that tests use: {task['names']}")
  namespace |= program.define(asked)
  if task["style"] == "asserts":
    return [(_short(text), _text_check(text, namespace)) for text in task["tests"]]
  namespace[_CANDIDATE] = _defined(namespace, task["entry_point"])  # of which tests may have one
  return [(task["entry_point"], _text_check(f"{task['test']}\ncheck({_CANDIDATE})", namespace))]


def _label(case: Mapping[str, Any]) -> str:
  return f"input {_short(case['input'])}"


def _short(value: Any) -> str:
  text = value if isinstance(value, str) else repr(value)
  return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _text_check(text: str, namespace: dict[str, Any]) -> _Check:
  namespace[_FAILURES] = failures = Failures()
  with failures:
    test = ast.fix_missing_locations(_GoingOn().visit(ast.parse(text)))
    execute(test, "<test>", namespace)
  yield
  if failures.first is not None:
    raise failures.first


class _GoingOn(ast.NodeTransformer):
  """Makes a test continue after a failing assert, which `Failures` keeps.

  What a passing assert evaluates is evaluated by every one, see `_conjuncts`. A message that is not
  a constant is removed, since it could call the program. An assert within `try` is not changed,
  since the handlers may expect its exception.
  """

  def visit_Assert(self, node: ast.Assert) -> list[ast.With]:
    guard = ast.withitem(ast.Name(_FAILURES, ast.Load()))
    message = node.msg if isinstance(node.msg, ast.Constant) else None
    return [ast.With([guard], [ast.Assert(part, message)]) for part in _conjuncts(node.test)]

  def visit_Try(self, node: ast.Try | ast.TryStar) -> ast.AST:
    body, node.body = node.body, []
    self.generic_visit(node)
    node.body = body
    return node

  visit_TryStar = visit_Try


def _conjuncts(test: ast.expr, wanted: bool = True) -> list[ast.expr]:
  """Expressions that are all true where the truth of `test` is `wanted`.

  Their evaluation makes all the calls that are needed to show it, whatever comes back: those of
  each part of a conjunction, of all elements of `all`, or of `any` under a `not`, and of each
  operand in a chain of comparisons.
  """
  match test:
    case ast.BoolOp(operator, parts) if isinstance(operator, ast.And) == wanted:
      return [conjunct for part in parts for conjunct in _conjuncts(part, wanted)]
    case ast.UnaryOp(ast.Not(), operand):
      return _conjuncts(operand, not wanted)
    case ast.Compare(
      ast.Call(ast.Name("all" | "any")) | ast.UnaryOp(ast.Not()) as part,
      [ast.Eq() | ast.Is()],
      [ast.Constant(bool() as value)],
    ):
      return _conjuncts(part, value == wanted)
    case ast.Compare(left, [_, _, *_], others):
      return [_signed(_all_operands_first(test, [left, *others]), wanted)]
    case ast.Call(ast.Name("all" | "any" as name), [elements], []) if wanted == (name == "all"):
      if isinstance(elements, ast.GeneratorExp | ast.ListComp):
        elements.elt = _called("all", _conjuncts(elements.elt, wanted))
        return [_called("all", [ast.Starred(elements, ast.Load())])]
      test = _called(name, [ast.Starred(elements, ast.Load())])
  return [_signed(test, wanted)]


def _signed(test: ast.expr, wanted: bool) -> ast.expr:
  return test if wanted else ast.UnaryOp(ast.Not(), test)


def _called(name: str, elements: list[ast.expr]) -> ast.expr:
  """A call with one list, whose elements are thereby all evaluated."""
  return ast.Call(ast.Name(name, ast.Load()), [ast.List(elements, ast.Load())], [])


def _all_operands_first(chain: ast.Compare, operands: list[ast.expr]) -> ast.expr:
  """`(lambda a, b, c: a < b < c)(first, second, third)`."""
  names = [f"__operand_{number}__" for number in range(len(operands))]
  taken = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
  values: list[ast.expr] = [ast.Name(name, ast.Load()) for name in names]
  return ast.Call(ast.Lambda(taken, ast.Compare(values[0], chain.ops, values[1:])), operands, [])


def _defined(values: Mapping[str, Any], name: str) -> Any:
  if name not in values:
    raise NameError(f"the program does not define {name!r}")
  return values[name]


def _entry(program: Program, entry_point: str) -> Callable[..., Any]:
  """The function that a case calls: a function, or "Class.method" of a new object each time.

  A program without the class may define the method's name as a function.
  """
  owner, _, method = entry_point.rpartition(".")
  values = program.define([owner, method])
  if owner in values:
    return lambda *args: getattr(values[owner](), method)(*args)
  return _defined(values, method)


def _call_check(entry: Callable[..., Any], case: Mapping[str, Any]) -> _Check:
  got = entry(*json.loads(json.dumps(case["input"])))  # a copy: a program may change its input
  yield
  if not _same(got, case["output"]):
    raise AssertionError(f"got {_short(got)}, expected {_short(case['output'])}")


def _same(got: Any, expected: Any) -> bool:
  """Equality of JSON values; a tuple counts as a list, floats may differ by rounding.

  The tolerance is 1e-9 relative to an expected float, or 1e-9 from 0.0; an expected int is exact.
  """
  if isinstance(got, (list, tuple)) and isinstance(expected, list):
    return len(got) == len(expected) and all(map(_same, got, expected))
  if isinstance(got, dict) and isinstance(expected, dict):
    # JSON has text keys only, and two keys of a dictionary may have one text
    plain = [key for key in got if key is None or isinstance(key, (str, int, float))]
    named = {key if isinstance(key, str) else json.dumps(key): got[key] for key in plain}
    if not len(got) == len(plain) == len(expected) or named.keys() != expected.keys():
      return False
    return all(_same(named[key], expected[key]) for key in named)
  if isinstance(got, float) and isinstance(expected, float):
    return math.isclose(got, expected, rel_tol=1e-9, abs_tol=0.0 if expected else 1e-9)
  return got == expected


def _stdin_check(program: Program, case: Mapping[str, Any]) -> _Check:
  result = program.case(case["input"])
  yield
  got, status = str(result["output"]), result["status"]
  if status != 0:
    raise RuntimeError(f"exit status {status}: {str(result['stderr']).strip()}")
  if not same_output(got, case["output"]):
    raise AssertionError(f"got {_short(got)!r}, expected {_short(case['output'])!r}")


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
