"""Evaluates the tests of one item; the tests send requests to the program."""

from __future__ import annotations

import ast
import decimal
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from .handles import Program, UnsupportedTestError
from .messages import MAX_TEXT, describe
from .processes import execute

# A test in two steps. The first makes all calls. The second raises an error if the test failed, if
# the first has not raised it.
_Check: TypeAlias = Iterator[None]

_FAILURES, _CANDIDATE = "__failures__", "__candidate__"  # names in the namespace of tests
# Stricter than Decimal, which also accepts underscores, digits of other scripts, and words.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,6})?", re.ASCII | re.IGNORECASE)


class Failures:
  """Records the first exception of its `with` blocks; execution continues after these blocks."""

  first: BaseException | None = None

  def __enter__(self) -> Failures:
    return self

  def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
    self.first = error if self.first is None else self.first
    return not isinstance(error, UnsupportedTestError)


def judge(program: Program, task: Mapping[str, Any]) -> dict[str, Any]:
  """Runs the tests of one item: first all calls, whatever their results, then the comparisons.

  If the calls ended at a wrong answer, a program could learn from the number of calls which answers
  are correct.

  Args:
    program: a program that has just been started.
    task: "style" and its fields, see `_make_checks`.
  Returns:
    "passed" and "total" (numbers of tests) and "failure" (a text about the first failed test). For
    the style "output", which has no tests: "output", "stderr" and "status", see `scripts.run_case`.
  """
  if task["style"] == "output":
    program.wait_started()
    result = program.run_case(task["input"])
    return {
      "output": str(result["output"]), "stderr": str(result["stderr"]),
      "status": int(result["status"]),
    }  # fmt: skip
  try:
    program.wait_started()
    checks = _make_checks(program, task)
  except UnsupportedTestError:
    raise
  except Exception as error:
    return {"passed": 0, "total": task["total"], "failure": f"program: {describe(error)}"}
  results = [Failures() for _ in checks]
  for _ in ("calls", "comparisons"):
    for (_, check), failures in zip(checks, results, strict=True):
      with failures:  # a test that exits fails, too
        next(check, None)
  failed_tests = [
    f"test {number} of {task['total']}, {label}: {describe(failures.first)}"
    for number, ((label, _), failures) in enumerate(zip(checks, results, strict=True), 1)
    if failures.first is not None
  ]
  return {
    "passed": len(checks) - len(failed_tests),
    "total": task["total"],
    "failure": "".join(failed_tests[:1]),
  }


def _make_checks(program: Program, task: Mapping[str, Any]) -> list[tuple[str, _Check]]:
  """Makes the label and the check of each test."""
  tolerance = Tolerance.of(task)
  if task["style"] == "stdin":
    return [(_label(case), _stdin_check(program, case, tolerance)) for case in task["cases"]]
  if task["style"] == "function":
    entry = _find_entry(program, task["entry_point"])
    return [(_label(case), _call_check(entry, case, tolerance)) for case in task["cases"]]
  namespace: dict[str, Any] = {"__name__": "tests"}
  for module in task["modules"]:
    namespace[module] = importlib.import_module(module)
  execute(task["prelude"], "<prelude>", namespace)
  namespace.pop(task.get("entry_point", ""), None)  # a prompt defines only its beginning
  program_names = [name for name in task["names"] if name not in namespace]
  if task["names"] and not program_names:
    raise UnsupportedTestError(
      f"the tests use only names that the setup imports, and none of the program: {task['names']}"
    )
  namespace |= program.look_up(program_names)
  if task["style"] == "asserts":
    return [(_shorten(text), _text_check(text, namespace)) for text in task["tests"]]
  # The candidate gets another name, since tests may define the entry point's name.
  namespace[_CANDIDATE] = _look_up(namespace, task["entry_point"])
  return [(task["entry_point"], _text_check(f"{task['test']}\ncheck({_CANDIDATE})", namespace))]


def _label(case: Mapping[str, Any]) -> str:
  return f"input {_shorten(case['input'])}"


def _shorten(value: Any) -> str:
  text = value if isinstance(value, str) else repr(value)
  return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _text_check(text: str, namespace: dict[str, Any]) -> _Check:
  """The check for a test that is a text to execute."""
  namespace[_FAILURES] = failures = Failures()
  with failures:
    test = ast.fix_missing_locations(_ContinueAfterAsserts().visit(ast.parse(text)))
    execute(test, "<test>", namespace)
  yield
  if failures.first is not None:
    raise failures.first


class _ContinueAfterAsserts(ast.NodeTransformer):
  """Makes a test continue after a failing assert, whose exception `Failures` records.

  A failing assert evaluates all expressions that it would evaluate if it passed, see `_conjuncts`.
  A message that is not a constant is removed, since it could call the program. An assert within
  `try` is not changed, since the handlers may expect its exception.
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


def _conjuncts(test: ast.expr, truth: bool = True) -> list[ast.expr]:
  """Expressions that are all true if and only if bool(`test`) is `truth`.

  Evaluating these expressions makes all the calls that are needed to show this, whatever the calls
  return. So each part of a conjunction is evaluated, and each operand in a chain of comparisons.
  Each element of all(…) is evaluated and, under a `not`, each element of any(…).
  """
  match test:
    case ast.BoolOp(operator, parts) if isinstance(operator, ast.And) == truth:
      return [conjunct for part in parts for conjunct in _conjuncts(part, truth)]
    case ast.UnaryOp(ast.Not(), operand):
      return _conjuncts(operand, not truth)
    case ast.Compare(
      ast.Call(ast.Name("all" | "any")) | ast.UnaryOp(ast.Not()) as part,
      [ast.Eq() | ast.Is()],
      [ast.Constant(bool() as value)],
    ):
      return _conjuncts(part, value == truth)
    case ast.Compare(left, [_, _, *_], others):
      return [_negate_unless(truth, _wrap_chain(test, [left, *others]))]
    case ast.Call(ast.Name("all" | "any" as name), [elements], []) if truth == (name == "all"):
      if isinstance(elements, ast.GeneratorExp | ast.ListComp):
        elements.elt = _call_with_list("all", _conjuncts(elements.elt, truth))
        return [_call_with_list("all", [ast.Starred(elements, ast.Load())])]
      test = _call_with_list(name, [ast.Starred(elements, ast.Load())])
  return [_negate_unless(truth, test)]


def _negate_unless(truth: bool, test: ast.expr) -> ast.expr:
  return test if truth else ast.UnaryOp(ast.Not(), test)


def _call_with_list(name: str, elements: list[ast.expr]) -> ast.expr:
  """The syntax tree of `name([…])`; the list makes Python evaluate all elements."""
  return ast.Call(ast.Name(name, ast.Load()), [ast.List(elements, ast.Load())], [])


def _wrap_chain(chain: ast.Compare, operands: list[ast.expr]) -> ast.expr:
  """The chain first < second < third as `(lambda a, b, c: a < b < c)(first, second, third)`."""
  names = [f"__operand_{number}__" for number in range(len(operands))]
  parameters = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
  values: list[ast.expr] = [ast.Name(name, ast.Load()) for name in names]
  function = ast.Lambda(parameters, ast.Compare(values[0], chain.ops, values[1:]))
  return ast.Call(function, operands, [])


def _look_up(values: Mapping[str, Any], name: str) -> Any:
  if name not in values:
    raise NameError(f"the program does not define {name!r}")
  return values[name]


def _find_entry(program: Program, entry_point: str) -> Callable[..., Any]:
  """Finds the function that cases call; "Class.method" is called on a new object each time.

  A program without the class may define the method's name as a function.
  """
  owner, _, method = entry_point.rpartition(".")
  values = program.look_up([owner, method])
  if owner in values:
    return lambda *args: getattr(values[owner](), method)(*args)
  return _look_up(values, method)


class Tolerance(NamedTuple):
  """The allowed difference of numbers in an output from the expected numbers."""

  absolute: float
  relative: float  # as a share of the expected number

  @classmethod
  def of(cls, task: Mapping[str, Any]) -> Tolerance | None:
    """The tolerance of a task; None if it has no tolerance."""
    absolute, relative = (task.get(f"{name}_tolerance") for name in cls._fields)
    has_one = absolute is not None or relative is not None
    return cls(absolute or 0.0, relative or 0.0) if has_one else None

  def includes(self, actual: float | decimal.Decimal, expected: float | decimal.Decimal) -> bool:
    """Whether a number is near the expected number; both are floats, or both are decimals."""
    if not (math.isfinite(actual) and math.isfinite(expected)):
      return False
    kind: Any = type(expected)
    largest = max(kind(self.absolute), kind(self.relative) * abs(expected))
    return bool(abs(actual - expected) <= largest)  # type: ignore[operator]


def _call_check(
  entry: Callable[..., Any], case: Mapping[str, Any], tolerance: Tolerance | None
) -> _Check:
  """The check for a case that calls a function."""
  output = entry(*json.loads(json.dumps(case["input"])))  # a copy: a program may change its input
  yield
  if not _is_equal(output, case["output"], tolerance):
    raise AssertionError(f"got {_shorten(output)}, expected {_shorten(case['output'])}")


def _is_equal(actual: Any, expected: Any, tolerance: Tolerance | None) -> bool:
  """Whether JSON values are equal; a tuple counts as a list, and floats may differ by rounding.

  Without a tolerance, a number may differ from an expected float by 1e-9 times this float, or by
  1e-9 if the float is 0.0; an expected int must match exactly. With a tolerance, two numbers may
  differ by the tolerance if at least one of them is a float; two ints must match exactly.
  """
  if isinstance(actual, (list, tuple)) and isinstance(expected, list):
    return len(actual) == len(expected) and all(
      _is_equal(*pair, tolerance) for pair in zip(actual, expected, strict=True)
    )
  if isinstance(actual, dict) and isinstance(expected, dict):
    # JSON has only text keys, and two keys of a dictionary may have the same text.
    plain_keys = [key for key in actual if key is None or isinstance(key, (str, int, float))]
    by_text = {key if isinstance(key, str) else json.dumps(key): actual[key] for key in plain_keys}
    if not len(actual) == len(plain_keys) == len(expected) or by_text.keys() != expected.keys():
      return False
    return all(_is_equal(by_text[key], expected[key], tolerance) for key in by_text)
  kinds = {type(actual), type(expected)}
  if tolerance and actual != expected and float in kinds and kinds <= {int, float}:
    return tolerance.includes(float(actual), float(expected))
  if isinstance(actual, float) and isinstance(expected, float):
    return math.isclose(actual, expected, rel_tol=1e-9, abs_tol=0.0 if expected else 1e-9)
  return actual == expected


def _stdin_check(program: Program, case: Mapping[str, Any], tolerance: Tolerance | None) -> _Check:
  """The check for a case that runs the program as a script."""
  result = program.run_case(case["input"])
  yield
  output = str(result["output"])
  status = result["status"]
  if status != 0:
    raise RuntimeError(f"exit status {status}: {str(result['stderr']).strip()}")
  if not is_same_output(output, case["output"], tolerance):
    raise AssertionError(f"got {_shorten(output)!r}, expected {_shorten(case['output'])!r}")


def is_same_output(actual: str, expected: str, tolerance: Tolerance | None) -> bool:
  """Whether outputs are equal by LiveCodeBench's rule.

  All lines must be equal when stripped, or be equal as exact decimal numbers. With a tolerance,
  lines are compared word by word. Two numbers of which at least one is not an integer may differ
  by the tolerance. Two integers must be equal as numbers, and other words must be the same text.
  """
  lines, expected_lines = (
    [line.strip() for line in text.strip().split("\n")] for text in (actual, expected)
  )
  return len(lines) == len(expected_lines) and all(
    _is_same_line(*pair, tolerance) for pair in zip(lines, expected_lines, strict=True)
  )


def _is_same_line(actual: str, expected: str, tolerance: Tolerance | None) -> bool:
  if actual == expected:
    return True
  if tolerance:
    words, expected_words = actual.split(), expected.split()
    return len(words) == len(expected_words) and all(
      _is_same_word(*pair, tolerance) for pair in zip(words, expected_words, strict=True)
    )
  numbers = _parse_decimals(actual)
  return numbers is not None and numbers == _parse_decimals(expected)


def _is_same_word(actual: str, expected: str, tolerance: Tolerance) -> bool:
  numbers = _parse_decimals(f"{actual} {expected}")
  if actual == expected or not numbers:
    return actual == expected
  if all(number == number.to_integral_value() for number in numbers):
    return numbers[0] == numbers[1]
  return tolerance.includes(*numbers)


def _parse_decimals(line: str) -> list[decimal.Decimal] | None:
  words = line.split()
  return [decimal.Decimal(word) for word in words] if all(map(_NUMBER.fullmatch, words)) else None
