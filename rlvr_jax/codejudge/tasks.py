"""Tests of a program as data: checks their form, and converts them to input of the sandbox.

Tests are a JSON object with a "style" and the fields of that style:
  "asserts": "tests" (texts to execute separately); "setup", executed after the program. The judge
    itself executes the setup's imports for the tests, so the program cannot replace the imported
    names. The setup's other definitions are part of the program.
  "check": "test" (a text that defines check(candidate)); "entry_point" (the candidate's name);
    "prompt" (a program's beginning, for programs that do not define the entry point themselves).
  "function": "entry_point" (a function's name or "Class.method"); "cases", each with "input" (a
    list of arguments) and "output"; "setup", executed before the program.
  "stdin": "cases", each with the texts "input" and "output"; "setup", executed before the program.
Tests, setups and prompts import from the standard library only. The styles "function" and "stdin"
have optional fields:
  "absolute_tolerance", "relative_tolerance": a number of an output may differ from the expected
    number by the larger of two bounds: the absolute tolerance, and the relative tolerance times
    the expected number. Two integers must be equal. Without these fields, see README.md.
All styles have optional fields:
  "time_limit_s": seconds of processor time that the program's processes may use for all tests
    together. A separate limit of the same length applies to the time in which all of them sleep.
  "memory_mib": total memory of the program's processes, MiB.
"""

from __future__ import annotations

import ast
import builtins
import functools
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from .harness.scripts import MAX_INPUT, MAX_OUTPUT
from .sandbox import Sandbox

TIME_LIMIT_S = 6.0  # processor time; the slowest of MBPP's solutions takes nearly 3
MAX_TIME_LIMIT_S = 120.0  # so that no item occupies a worker for more than a few minutes
MEMORY_MIB = 1024
LEAST_MEMORY_MIB = 64  # needed by the interpreter itself
STYLES = ("asserts", "check", "function", "stdin")
TOLERANCES = ("absolute_tolerance", "relative_tolerance")


def check(tests: Mapping[str, Any]) -> None:
  """Checks that tests have a form of the module's docstring, and that a program could pass them.

  Raises ValueError or KeyError if one of these checks fails.
  """
  style = tests["style"]
  if style not in STYLES:
    raise ValueError(f"style is {style!r}, allowed: {list(STYLES)}")
  field = {"asserts": "tests", "check": "test"}.get(style, "cases")
  if not tests[field]:
    raise ValueError(f"{field!r} is empty: every program would pass")
  if style == "check":
    _check_test(tests["test"], tests.get("prompt", ""))
  if style == "asserts":
    for test in tests["tests"]:
      _parse_statements("test", test)
  _parse_statements("setup", tests.get("setup", ""))
  if style == "asserts":
    _check_modules(tuple(tests["tests"]), tests.get("setup", ""))
  if style == "stdin":
    _check_sizes(tests["cases"])
  for name in TOLERANCES:
    _check_tolerance(name, tests)
  seconds = time_limit_s(tests)
  memory = tests.get("memory_mib")
  if not (isinstance(seconds, (int, float)) and 0 < seconds <= MAX_TIME_LIMIT_S):
    raise ValueError(
      f"time_limit_s is {seconds!r}, must be a positive number of seconds ≤ {MAX_TIME_LIMIT_S:g}"
    )
  if memory is not None and not (isinstance(memory, int) and memory >= LEAST_MEMORY_MIB):
    raise ValueError(f"memory_mib is {memory!r}, must be an integer ≥ {LEAST_MEMORY_MIB}")


def _check_tolerance(name: str, tests: Mapping[str, Any]) -> None:
  """Raises ValueError unless a tolerance is absent, or a number that its style can use."""
  if name not in tests:
    return
  value = tests[name]
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not is_number or not 0 <= value < math.inf:
    raise ValueError(f"{name} is {value!r}, must be a finite number ≥ 0")
  if tests["style"] not in ("function", "stdin"):
    raise ValueError(
      f"{name} works only in tests of the styles 'function' and 'stdin'; in a test of style"
      f" {tests['style']!r}, compare with math.isclose"
    )


@functools.lru_cache(maxsize=1024)
def _check_test(test: str, prompt: str) -> None:
  """Raises ValueError for a test that no program can pass."""
  defined_names = [getattr(node, "name", "") for node in _parse_statements("test", test)]
  if "check" not in defined_names and not re.search(r"^check\s*=", test, re.M):
    raise ValueError(f"the test does not define check(candidate): {test[:80]!r}")
  if prompt and not is_python(_complete_prompt(prompt)):
    raise ValueError(f"the prompt is not the beginning of a program: {prompt[:80]!r}")
  _parse_statements("prompt", _complete_prompt(prompt))


@functools.lru_cache(maxsize=1024)
def _parse_statements(kind: str, text: str) -> list[ast.stmt]:
  """Parses a text of the tests.

  Raises:
    ValueError: the text is not Python, or imports a module outside the standard library. A program
      could provide its own module of that name.
  """
  try:
    tree = ast.parse(text)
  except SyntaxError as error:
    raise ValueError(f"a {kind} is not Python ({error}): {text[:80]!r}") from error
  packages = {package for node in ast.walk(tree) for package in _imported_packages(node)}
  if missing := sorted(packages - sys.stdlib_module_names):
    raise ValueError(
      f"a {kind} imports {missing[0]!r}, but the sandbox has the standard library only: "
      f"{text[:80]!r}"
    )
  return tree.body


@functools.lru_cache(maxsize=1024)
def _check_modules(tests: Sequence[str], setup: str) -> None:
  """Raises ValueError for a test that uses a module, such as `np`, which nothing imports.

  A program could define a module with this name, and so decide how the test compares. A lower-case
  name counts as a module if tests use only its attributes.
  """
  names, _ = names_used(tests)
  nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
  bases = {node.value for node in nodes if isinstance(node, ast.Attribute)}
  plain_names = {node.id for node in nodes if isinstance(node, ast.Name) and node not in bases}
  setup_names = _bound_names(ast.walk(ast.parse(setup)))
  modules = set(filter(str.islower, names)) - plain_names - setup_names
  if modules:
    name = min(modules)
    raise ValueError(
      f"a test uses {name!r} as a module, but neither the tests nor the setup import it, so a"
      f" program could define it. If {name!r} is a module, import it in the setup (standard library"
      f" only). If {name!r} is an object of the program, assign it in the setup"
    )


def _imported_packages(node: ast.AST) -> set[str]:
  """The packages that an import statement imports from; an empty set for any other syntax node."""
  if isinstance(node, ast.Import):
    return {alias.name.partition(".")[0] for alias in node.names}
  return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def _check_sizes(cases: Sequence[Mapping[str, Any]]) -> None:
  """Raises ValueError for an input or output that is too large for the sandbox."""
  for case in cases:
    for field, limit in (("input", MAX_INPUT), ("output", MAX_OUTPUT)):
      if (size := len(case[field].encode())) > limit:
        raise ValueError(
          f"an {field} has {size} bytes, but at most {limit} are allowed: leave that case out"
        )


# The two arguments of `Sandbox.run`: the program, and the task without "style".
_Prepared: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


def judge(
  sandbox: Sandbox, source: str, tests: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
  """Runs a program against tests that `check` accepts.

  Args:
    sandbox: the result of `open_sandbox`.
    source: the program.
    tests: tests in one of the forms above.
    options: further arguments of `Sandbox.run`, such as `on_asleep`.
  Returns:
    The result of `Sandbox.run`: "passed" and "total" (numbers of tests) and "failure" (a text about
    the first failed test); or {"timeout": true}; or {"memory": true}; or {"died": status} if the
    judge was killed.
  Raises:
    SandboxError: the sandbox does not work; nothing is known about the program.
  """
  program, task = _PREPARE[tests["style"]](source, tests)
  return sandbox.run(
    program,
    {**task, "style": tests["style"]},
    time_limit_s=time_limit_s(tests),
    memory_mib=tests.get("memory_mib") or MEMORY_MIB,
    **options,
  )


def run(
  sandbox: Sandbox,
  source: str,
  *,
  earlier: Sequence[str] = (),
  time_limit_s: float = TIME_LIMIT_S,
  memory_mib: int = MEMORY_MIB,
  **options: Any,
) -> dict[str, Any]:
  """Runs a program for its output, without tests and with an empty standard input.

  Args:
    sandbox: the result of `open_sandbox`.
    source: the program.
    earlier: programs that run first in the same namespace, each up to its exit, with their output
      dropped; if one of them raises an exception, this exception is the result.
    time_limit_s: total processor time of all programs, seconds, as for tests.
    memory_mib: total memory, MiB, as for tests.
    options: further arguments of `Sandbox.run`, such as `on_asleep`.
  Returns:
    "output" (at most 2 MiB), "status" (0 if the program succeeded) and "stderr" (the end of its
    standard error); or {"timeout": true}, {"memory": true} or {"died": status}, as `judge`.
  Raises:
    SandboxError: the sandbox does not work; nothing is known about the program.
  """
  return sandbox.run(
    {"mode": "last", "sources": [*earlier, source]},
    {"style": "output", "input": ""},
    time_limit_s=time_limit_s,
    memory_mib=memory_mib,
    **options,
  )


def time_limit_s(tests: Mapping[str, Any]) -> float:
  """The tests' limit of processor time in seconds; the default if they have none."""
  return tests.get("time_limit_s", TIME_LIMIT_S)


def _prepare_asserts(source: str, task_data: Mapping[str, Any]) -> _Prepared:
  tests = list(task_data["tests"])
  names, modules = names_used(tuple(tests))
  setup = task_data.get("setup", "")
  sources = [source, setup]
  # The judge executes the imports itself: a program could replace the imported objects.
  imports = [node for node in _parse_statements("setup", setup) if _imported_packages(node)]
  prelude = "\n".join(map(ast.unparse, imports))
  task = {
    "tests": tests, "names": names, "modules": modules, "prelude": prelude, "total": len(tests),
  }  # fmt: skip
  return {"mode": "calls", "sources": sources}, task


def _prepare_check(source: str, task_data: Mapping[str, Any]) -> _Prepared:
  entry = task_data["entry_point"]
  prompt = task_data.get("prompt", "")
  is_complete = re.search(rf"^(async\s+def|def|class)\s+{entry}\b|^{entry}\s*=", source, re.M)
  # A complete program can also use the imports and helpers of the prompt.
  completed_prompt = _complete_prompt(prompt)
  sources = [completed_prompt, source] if is_complete else [_end_with_newline(prompt) + source]
  task = {
    "entry_point": entry, "test": task_data["test"], "names": [entry], "modules": [],
    "prelude": completed_prompt, "total": 1,
  }  # fmt: skip
  return {"mode": "calls", "sources": sources}, task


@functools.lru_cache(maxsize=1024)
def _complete_prompt(prompt: str) -> str:
  """Completes a prompt to a program: if it ends with a function's header, adds a body."""
  if not prompt.strip() or is_python(prompt):
    return prompt
  header = prompt.rstrip().rpartition("\n")[2]
  return f"{prompt.rstrip()}\n{' ' * (indentation(header) + 1)}pass\n"


def _end_with_newline(text: str) -> str:
  return text if text.endswith("\n") or not text else text + "\n"


def _prepare_function(source: str, task_data: Mapping[str, Any]) -> _Prepared:
  cases = list(task_data["cases"])
  entry = task_data["entry_point"]
  setup = task_data.get("setup", "")
  owner, _, name = entry.rpartition(".")
  if not (owner and re.search(rf"^class\s+{owner}\b", source, re.M)):
    # A function that the setup defines does not count as the program's function.
    setup = f"{_end_with_newline(setup)}globals().pop({name!r}, None)\n"
  task = {"entry_point": entry, "cases": cases, "total": len(cases), **_tolerances(task_data)}
  return {"mode": "calls", "sources": [setup, source]}, task


def _prepare_stdin(source: str, task_data: Mapping[str, Any]) -> _Prepared:
  cases = list(task_data["cases"])
  task = {"cases": cases, "total": len(cases), **_tolerances(task_data)}
  return {"mode": "cases", "sources": [task_data.get("setup", ""), source]}, task


def _tolerances(task_data: Mapping[str, Any]) -> dict[str, Any]:
  return {name: task_data[name] for name in TOLERANCES if name in task_data}


_PREPARE: dict[str, Callable[[str, Mapping[str, Any]], _Prepared]] = {
  "asserts": _prepare_asserts,
  "check": _prepare_check,
  "function": _prepare_function,
  "stdin": _prepare_stdin,
}


@functools.lru_cache(maxsize=1024)
def names_used(tests: Sequence[str]) -> tuple[list[str], list[str]]:
  """Names that tests take from the program, and modules that they use without importing them.

  Builtins are not taken from the program, so the program cannot replace `set` or `abs` in a test.
  There is an exception: if tests use no other name, the builtins that they call are taken from the
  program. MBPP needs this for a function called `sum`.
  """
  nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
  name_nodes = [node for node in nodes if isinstance(node, ast.Name)]
  free_names = {node.id for node in name_nodes} - _bound_names(nodes)
  bases = {
    node.value.id
    for node in nodes
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
  }
  modules = free_names & bases & sys.stdlib_module_names
  names = {name for name in free_names - modules if not hasattr(builtins, name)}
  if not names:
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    names = {function.id for function in functions if isinstance(function, ast.Name)} & free_names
  return sorted(names), sorted(modules)


def _bound_names(nodes: Iterable[ast.AST]) -> set[str]:
  """Names that these nodes bind, in any scope."""
  names = set()
  for node in nodes:
    match node:
      case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name):
        names.add(name)
      case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
        names.add(name)
      case ast.alias(name, asname):
        names.add((asname or name).partition(".")[0])
  return names


def is_python(text: str) -> bool:
  """Whether a text is a Python program that is not empty."""
  try:
    with warnings.catch_warnings(action="ignore"):  # about invalid escapes in strings
      ast.parse(text)
    return bool(text.strip())
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return False


def indentation(line: str) -> int:
  """The number of spaces and tabs that begin a line."""
  return len(line) - len(line.lstrip(" \t"))
