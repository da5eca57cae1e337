"""Tests of a program as data: their forms, and their conversion to the input of the sandbox.

Tests are a JSON object with a "style" and the fields of that style:
  "asserts": "tests", texts to execute separately; "setup", executed after the program. Names that
    the setup imports are the judge's in tests; its other definitions belong to the program.
  "check": "test", a text that defines check(candidate); "entry_point", the candidate's name;
    "prompt", the beginning of the program if it does not define the entry point itself.
  "function": "entry_point", a function's name or "Class.method"; "cases", each with "input", a list
    of arguments, and "output"; "setup", executed before the program.
  "stdin": "cases", each with "input" and "output", texts; "setup", executed before the program.
Tests, setups and prompts import from the standard library only. Optional:
  "time_limit_s": total processor time of the program's processes for all tests, seconds; also the
    limit of the time in which they all sleep.
  "memory_mib": total memory of its processes, MiB.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from .harness.scripts import MAX_INPUT, MAX_OUTPUT
from .sandbox import Sandbox

TIME_LIMIT_S = 6.0  # of processor time; the slowest of MBPP's solutions takes nearly 3
MAX_TIME_LIMIT_S = 120.0  # so that no item occupies a worker for more than a few minutes
MEMORY_MIB = 1024
LEAST_MEMORY_MIB = 64  # what an interpreter needs for itself
STYLES = ("asserts", "check", "function", "stdin")


def check(tests: Mapping[str, Any]) -> None:
  """Raises ValueError or KeyError unless the tests have one of these forms and can be passed."""
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
      _statements("test", test)
  _statements("setup", tests.get("setup", ""))
  if style == "asserts":
    _check_modules(tuple(tests["tests"]), tests.get("setup", ""))
  if style == "stdin":
    _check_sizes(tests["cases"])
  seconds, memory = time_limit_s(tests), tests.get("memory_mib")
  if not (isinstance(seconds, (int, float)) and 0 < seconds <= MAX_TIME_LIMIT_S):
    raise ValueError(
      f"time_limit_s is {seconds!r}, must be a positive number of seconds ≤ {MAX_TIME_LIMIT_S:g}"
    )
  if memory is not None and not (isinstance(memory, int) and memory >= LEAST_MEMORY_MIB):
    raise ValueError(f"memory_mib is {memory!r}, must be an integer ≥ {LEAST_MEMORY_MIB}")


@functools.lru_cache(maxsize=1024)
def _check_test(test: str, prompt: str) -> None:
  """Raises for a test that no program can pass."""
  defined = [getattr(node, "name", "") for node in _statements("test", test)]
  if "check" not in defined and not re.search(r"^check\s*=", test, re.M):
    raise ValueError(f"the test does not define check(candidate): {test[:80]!r}")
  if prompt and not is_python(_completed(prompt)):
    raise ValueError(f"the prompt is not the beginning of a program: {prompt[:80]!r}")
  _statements("prompt", _completed(prompt))


@functools.lru_cache(maxsize=1024)
def _statements(kind: str, text: str) -> list[ast.stmt]:
  """Parses a text of the tests; raises if it is not Python, or imports a missing module.

  A program could provide its own module in place of a missing one.
  """
  try:
    tree = ast.parse(text)
  except SyntaxError as error:
    raise ValueError(f"a {kind} is not Python ({error}): {text[:80]!r}") from error
  imported = {root for node in ast.walk(tree) for root in _imported(node)}
  if absent := sorted(imported - sys.stdlib_module_names):
    raise ValueError(
      f"a {kind} imports {absent[0]!r}, but the sandbox has the standard library only: "
      f"{text[:80]!r}"
    )
  return tree.body


@functools.lru_cache(maxsize=1024)
def _check_modules(tests: Sequence[str], setup: str) -> None:
  """Raises for a test that uses a module, such as `np`, which nobody imports.

  A program could define one of that name, and so what the test compares by. A module is taken to be
  what has a name in lower case, of which tests use attributes only.
  """
  names, _ = names_used(tests)
  nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
  bases = {node.value for node in nodes if isinstance(node, ast.Attribute)}
  others = {node.id for node in nodes if isinstance(node, ast.Name) and node not in bases}
  absent = set(filter(str.islower, names)) - others - _defined(ast.walk(ast.parse(setup)))
  if absent:
    name = min(absent)
    raise ValueError(
      f"a test uses {name!r} as a module, which nothing imports, so that a program could define it:"
      f" import it in the setup (standard library only); if {name!r} is an object of the program,"
      " assign it there"
    )


def _imported(node: ast.AST) -> set[str]:
  """The packages that an import statement names; empty for any other node."""
  if isinstance(node, ast.Import):
    return {alias.name.partition(".")[0] for alias in node.names}
  return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def _check_sizes(cases: Sequence[Mapping[str, Any]]) -> None:
  for case in cases:
    for field, limit in (("input", MAX_INPUT), ("output", MAX_OUTPUT)):
      if (size := len(case[field].encode())) > limit:
        raise ValueError(f"an {field} has {size} bytes, allowed are {limit}: leave that case out")


# The program, and the task apart from "style".
_Prepared: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


def judge(
  sandbox: Sandbox, source: str, tests: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
  """Runs a program against tests that `check` has passed.

  Args:
    sandbox: opened, see `open_sandbox`.
    source: the program.
    tests: see above.
    options: further arguments of `Sandbox.run`, such as `on_asleep`.
  Returns:
    As `Sandbox.run`: "passed" and "total" tests, and "failure", a text about the first that failed;
    or {"timeout": true}; or {"memory": true}; or {"died": status} if the judge was killed.
  Raises:
    SandboxError: the sandbox does not work, which says nothing about the program.
  """
  program, task = _PREPARED[tests["style"]](source, tests)
  return sandbox.run(
    program,
    {**task, "style": tests["style"]},
    time_limit_s=time_limit_s(tests),
    memory_mib=tests.get("memory_mib") or MEMORY_MIB,
    **options,
  )


def time_limit_s(tests: Mapping[str, Any]) -> float:
  return tests.get("time_limit_s", TIME_LIMIT_S)


def _asserts(source: str, given: Mapping[str, Any]) -> _Prepared:
  tests = list(given["tests"])
  names, modules = names_used(tuple(tests))
  setup = given.get("setup", "")
  sources = [source, setup]
  # The judge executes these itself: a program could replace what they import by anything.
  imports = [node for node in _statements("setup", setup) if _imported(node)]
  prelude = "\n".join(map(ast.unparse, imports))
  task = {
    "tests": tests, "names": names, "modules": modules, "prelude": prelude, "total": len(tests),
  }  # fmt: skip
  return {"mode": "calls", "sources": sources}, task


def _check(source: str, given: Mapping[str, Any]) -> _Prepared:
  entry, prompt = given["entry_point"], given.get("prompt", "")
  alone = re.search(rf"^(async\s+def|def|class)\s+{entry}\b|^{entry}\s*=", source, re.M)
  # Imports and helpers of the prompt are available to a complete program, too.
  whole = _completed(prompt)
  sources = [whole, source] if alone else [_lines(prompt) + source]
  task = {
    "entry_point": entry, "test": given["test"], "names": [entry], "modules": [],
    "prelude": whole, "total": 1,
  }  # fmt: skip
  return {"mode": "calls", "sources": sources}, task


@functools.lru_cache(maxsize=1024)
def _completed(prompt: str) -> str:
  """A prompt as a program: if it ends with a function's header, a body is added."""
  if not prompt.strip() or is_python(prompt):
    return prompt
  header = prompt.rstrip().rpartition("\n")[2]
  return f"{prompt.rstrip()}\n{' ' * (indentation(header) + 1)}pass\n"


def _lines(text: str) -> str:
  return text if text.endswith("\n") or not text else text + "\n"


def _function(source: str, given: Mapping[str, Any]) -> _Prepared:
  cases = list(given["cases"])
  entry, setup = given["entry_point"], given.get("setup", "")
  owner, _, name = entry.rpartition(".")
  if not (owner and re.search(rf"^class\s+{owner}\b", source, re.M)):
    setup = f"{_lines(setup)}globals().pop({name!r}, None)\n"  # the setup's function is no answer
  task = {"entry_point": entry, "cases": cases, "total": len(cases)}
  return {"mode": "calls", "sources": [setup, source]}, task


def _stdin(source: str, given: Mapping[str, Any]) -> _Prepared:
  cases = list(given["cases"])
  task = {"cases": cases, "total": len(cases)}
  return {"mode": "cases", "sources": [given.get("setup", ""), source]}, task


_PREPARED: dict[str, Callable[[str, Mapping[str, Any]], _Prepared]] = {
  "asserts": _asserts, "check": _check, "function": _function, "stdin": _stdin,
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def names_used(tests: Sequence[str]) -> tuple[list[str], list[str]]:
  """Names that tests use from the program, and modules that they use without importing them.

  A builtin is not taken from the program, so that the program cannot replace `set` or `abs` in a
  test. The exception are tests that use no other name (one of MBPP's functions is called `sum`).
  """
  nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
  names = [node for node in nodes if isinstance(node, ast.Name)]
  free = {node.id for node in names} - _defined(nodes)
  bases = {
    node.value.id
    for node in nodes
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
  }
  modules = free & bases & sys.stdlib_module_names
  wanted = {name for name in free - modules if not hasattr(builtins, name)}
  if not wanted:
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    wanted = {function.id for function in called if isinstance(function, ast.Name)} & free
  return sorted(wanted), sorted(modules)


def _defined(nodes: Iterable[ast.AST]) -> set[str]:
  """Names that these nodes bind, in any scope."""
  found = set()
  for node in nodes:
    match node:
      case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name):
        found.add(name)
      case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
        found.add(name)
      case ast.alias(name, asname):
        found.add((asname or name).partition(".")[0])
  return found


def is_python(text: str) -> bool:
  try:
    with warnings.catch_warnings(action="ignore"):  # of odd escapes in texts
      ast.parse(text)
    return bool(text.strip())
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return False


def indentation(line: str) -> int:
  return len(line) - len(line.lstrip(" \t"))
