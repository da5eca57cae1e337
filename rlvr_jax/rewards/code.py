"""Grades programs by running them against tests, in a sandbox."""

from __future__ import annotations

import ast
import builtins
import functools
import io
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlvr_jax.rewards import deadlines
from rlvr_jax.rewards import sandbox as sandboxes
from rlvr_jax.rewards.graders import THINK_CLOSE, THINK_OPEN
from rlvr_jax.rewards.harness.scripts import MAX_INPUT, MAX_OUTPUT
from rlvr_jax.rewards.outcome import Grade, Outcome

TIME_LIMIT_S = 6.0  # of processor time; of MBPP's solutions one takes nearly 3
MAX_TIME_LIMIT_S = 120.0  # no item shall hold a worker for longer than some minutes
MEMORY_MIB = 1024
LEAST_MEMORY_MIB = 64  # what an interpreter needs for itself
STYLES = ("asserts", "check", "function", "stdin")
REWARDS = ("all", "fraction")

_PYTHON = ("python", "python3", "py")
# Indentation, with a list's marker if the fence stands on its line; fence; info string.
_OPENING = re.compile(r"([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(`{3,}(?!.*`)|~{3,})[ \t]*(\S*)")


def program_text(completion: str) -> str:
  """The program in a completion, after its thoughts.

  Returns:
    the last block that is called Python; else, of those without a name, the last that is Python,
    or the last; else the whole text, also where fences are but in its strings. Nothing of a thought
    that never ends; programs may have the tags in their strings.
  """
  _, closed, answer = completion.rpartition(THINK_CLOSE)
  if not closed and answer.lstrip().startswith(THINK_OPEN):
    return ""
  answer = answer.replace("\r\n", "\n").replace("\ufeff", "")
  blocks = _blocks(answer)
  called = [text for info, text in blocks if info in _PYTHON]
  unnamed = [text for info, text in blocks if not info]
  if not called + unnamed or _is_python(answer):
    return answer
  if called or len(unnamed) == 1:
    return (called or unnamed)[-1]
  return next(filter(_is_python, reversed(unnamed)), unnamed[-1])


def _blocks(text: str) -> list[tuple[str, str]]:
  """Info string and text of each fenced block; one that is never closed runs to the end."""
  blocks: list[tuple[str, list[str]]] = []
  fence: re.Match[str] | None = None
  for line in io.StringIO(text):
    if fence is None:
      if fence := _OPENING.match(line):
        blocks.append((fence[3].lower(), []))
    elif _closes(line, fence):
      fence = None
    else:
      blocks[-1][1].append(line[min(len(fence[1]), _indentation(line)) :])
  return [(info, "".join(lines)) for info, lines in blocks]


def _closes(line: str, fence: re.Match[str]) -> bool:
  """As in CommonMark: as long at least, without a name, and not indented like code."""
  mark = line.strip()
  bare = len(mark) >= len(fence[2]) and set(mark) == {fence[2][0]}
  return bare and _indentation(line) <= len(fence[1]) + 3


def _indentation(line: str) -> int:
  return len(line) - len(line.lstrip(" \t"))


def _is_python(text: str) -> bool:
  try:
    with warnings.catch_warnings(action="ignore"):  # of odd escapes in texts
      ast.parse(text)
    return bool(text.strip())
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return False


def code(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Runs a program against its tests.

  Args:
    completion: the program is its last ```python block (or unnamed block), see `program_text`.
    reference: "style" with its fields:
      "asserts": "tests", texts to execute one by one; "setup", executed after the program. Names
        that it imports are the judge's own in tests; what else it defines is the program's.
      "check": "test", a text that defines check(candidate); "entry_point", the candidate's name;
        "prompt", what the completion goes on from where it does not define the entry point itself.
      "function": "entry_point", a function's name or "Class.method"; "cases", each with "input", a
        list of arguments, and "output"; "setup", executed before the program.
      "stdin": "cases", each with "input" and "output", texts; "setup", executed before the program.
      Tests, setups and prompts import from the standard library only.
      Optional: "reward", "all" (default) or "fraction"; "time_limit_s", processor time of all its
      processes together for all tests, `sandbox.WALL_CLOCK_FACTOR` times that being its deadline;
      "memory_mib", of all its processes together.
  Returns:
    correct (score 1) if all tests pass; wrong, with score 0 or the share of tests that passed
    ("fraction"); timeout; or unparseable where there is no program.
  Raises:
    SandboxError: the sandbox does not work; nothing is known of the program.
    ValueError, KeyError: the reference is not as above.
  """
  _check_reference(reference)
  source = program_text(completion)
  if not source.strip():
    return Grade(Outcome.UNPARSEABLE, detail="no code")
  program, task = _PREPARED[reference["style"]](source, reference)
  task["style"] = reference["style"]
  verdict = _run(
    program,
    task,
    time_limit_s=reference.get("time_limit_s", TIME_LIMIT_S),
    memory_mib=reference.get("memory_mib") or MEMORY_MIB,
  )
  return _grade(verdict, reference.get("reward", "all"))


def _grade(verdict: Mapping[str, Any], reward: str) -> Grade:
  if "timeout" in verdict:
    return Grade(Outcome.TIMEOUT, detail="time over")
  if "memory" in verdict:
    return Grade(Outcome.WRONG, detail="more memory than allowed")
  if "died" in verdict:
    return Grade(Outcome.WRONG, detail=f"the program broke its judge (status {verdict['died']})")
  if verdict["passed"] == verdict["total"]:
    return Grade(Outcome.CORRECT, 1.0)
  score = 0.0 if reward == "all" else verdict["passed"] / verdict["total"]
  return Grade(Outcome.WRONG, score, verdict["failure"])


def _check_reference(reference: Mapping[str, Any]) -> None:
  style, reward = reference["style"], reference.get("reward", "all")
  if style not in STYLES:
    raise ValueError(f"style is {style!r}, allowed: {list(STYLES)}")
  if reward not in REWARDS:
    raise ValueError(f"reward is {reward!r}, allowed: {list(REWARDS)}")
  tests = {"asserts": "tests", "check": "test"}.get(style, "cases")
  if not reference[tests]:
    raise ValueError(f"{tests!r} is empty: every program would pass")
  if style == "check":
    _check_test(reference["test"], reference.get("prompt", ""))
  if style == "asserts":
    for test in reference["tests"]:
      _statements("test", test)
  _statements("setup", reference.get("setup", ""))
  if style == "stdin":
    _check_sizes(reference["cases"])
  seconds, memory = reference.get("time_limit_s", TIME_LIMIT_S), reference.get("memory_mib")
  if not (isinstance(seconds, (int, float)) and 0 < seconds <= MAX_TIME_LIMIT_S):
    raise ValueError(
      f"time_limit_s is {seconds!r}, must be a positive number of seconds ≤ {MAX_TIME_LIMIT_S:g}"
    )
  if memory is not None and not (isinstance(memory, int) and memory >= LEAST_MEMORY_MIB):
    raise ValueError(f"memory_mib is {memory!r}, must be a whole number ≥ {LEAST_MEMORY_MIB}")


@functools.lru_cache(maxsize=1024)
def _check_test(test: str, prompt: str) -> None:
  """Raises for a test that no program can pass."""
  defined = [getattr(node, "name", "") for node in _statements("test", test)]
  if "check" not in defined and not re.search(r"^check\s*=", test, re.M):
    raise ValueError(f"the test does not define check(candidate): {test[:80]!r}")
  if prompt and not _is_python(_whole(prompt)):
    raise ValueError(f"the prompt is no beginning of a program: {prompt[:80]!r}")
  _statements("prompt", _whole(prompt))


@functools.lru_cache(maxsize=1024)
def _statements(kind: str, text: str) -> list[ast.stmt]:
  """Those of a text of the reference; raises where it is no Python, or imports what is not there.

  A program could put a module of its own in the place of one that is not there.
  """
  try:
    tree = ast.parse(text)
  except SyntaxError as error:
    raise ValueError(f"a {kind} is no Python ({error}): {text[:80]!r}") from error
  imported = {root for node in ast.walk(tree) for root in _imported(node)}
  if absent := sorted(imported - sys.stdlib_module_names):
    raise ValueError(
      f"a {kind} imports {absent[0]!r}, but the sandbox has the standard library only: "
      f"{text[:80]!r}"
    )
  return tree.body


def _imported(node: ast.AST) -> set[str]:
  """The packages that an import statement names; none of any other node."""
  if isinstance(node, ast.Import):
    return {alias.name.partition(".")[0] for alias in node.names}
  return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def _check_sizes(cases: Sequence[Mapping[str, Any]]) -> None:
  for case in cases:
    for field, limit in (("input", MAX_INPUT), ("output", MAX_OUTPUT)):
      if (size := len(case[field].encode())) > limit:
        raise ValueError(f"an {field} has {size} bytes, allowed are {limit}: leave that case out")


_Prepared = tuple[dict[str, Any], dict[str, Any]]  # the program, and the task apart from "style"


def _asserts(source: str, reference: Mapping[str, Any]) -> _Prepared:
  tests = list(reference["tests"])
  names, modules = names_used(tuple(tests))
  setup = reference.get("setup", "")
  sources = [source, setup]
  # The judge executes these itself: a program could put anything in the place of what they import.
  imports = [node for node in _statements("setup", setup) if _imported(node)]
  prelude = "\n".join(map(ast.unparse, imports))
  task = {
    "tests": tests, "names": names, "modules": modules, "prelude": prelude, "total": len(tests),
  }  # fmt: skip
  return {"mode": "calls", "sources": sources}, task


def _check(source: str, reference: Mapping[str, Any]) -> _Prepared:
  entry, prompt = reference["entry_point"], reference.get("prompt", "")
  alone = re.search(rf"^(async\s+def|def|class)\s+{entry}\b|^{entry}\s*=", source, re.M)
  # Imports and helpers of the prompt are there for a program that stands alone, too.
  whole = _whole(prompt)
  sources = [whole, source] if alone else [_lines(prompt) + source]
  task = {
    "entry_point": entry, "test": reference["test"], "names": [entry], "modules": [],
    "prelude": whole, "total": 1,
  }  # fmt: skip
  return {"mode": "calls", "sources": sources}, task


@functools.lru_cache(maxsize=1024)
def _whole(prompt: str) -> str:
  """A prompt as a program: where it ends with a header, that gets a body."""
  if not prompt.strip() or _is_python(prompt):
    return prompt
  header = prompt.rstrip().rpartition("\n")[2]
  return f"{prompt.rstrip()}\n{' ' * (_indentation(header) + 1)}pass\n"


def _lines(text: str) -> str:
  return text if text.endswith("\n") or not text else text + "\n"


def _function(source: str, reference: Mapping[str, Any]) -> _Prepared:
  cases = list(reference["cases"])
  entry, setup = reference["entry_point"], reference.get("setup", "")
  owner, _, name = entry.rpartition(".")
  if not (owner and re.search(rf"^class\s+{owner}\b", source, re.M)):
    setup = f"{_lines(setup)}globals().pop({name!r}, None)\n"  # the setup's own is no answer
  task = {"entry_point": entry, "cases": cases, "total": len(cases)}
  return {"mode": "calls", "sources": [setup, source]}, task


def _stdin(source: str, reference: Mapping[str, Any]) -> _Prepared:
  cases = list(reference["cases"])
  task = {"cases": cases, "total": len(cases)}
  return {"mode": "cases", "sources": [reference.get("setup", ""), source]}, task


_PREPARED: dict[str, Callable[[str, Mapping[str, Any]], _Prepared]] = {
  "asserts": _asserts, "check": _check, "function": _function, "stdin": _stdin,
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def names_used(tests: Sequence[str]) -> tuple[list[str], list[str]]:
  """Names that tests want from the program, and modules that they use without importing them.

  A builtin is never the program's, lest `set` or `abs` in a test be the program's own; only where
  tests name nothing else is what they call the program's (one of MBPP's functions is called `sum`).
  """
  nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
  names = [node for node in nodes if isinstance(node, ast.Name)]
  own = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
  own |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
  own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
  own |= {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
  free = {node.id for node in names} - own
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


_sandbox: sandboxes.Sandbox | None = None  # of this process; opened when first needed


def _run(
  program: Mapping[str, Any], task: Mapping[str, Any], *, time_limit_s: float, memory_mib: int
) -> dict[str, Any]:
  global _sandbox
  if _sandbox is None:
    _sandbox = sandboxes.open_sandbox()
  deadlines.announce(sandboxes.longest_s(time_limit_s))
  try:
    return _sandbox.run(program, task, time_limit_s=time_limit_s, memory_mib=memory_mib)
  except sandboxes.SandboxError:
    _sandbox.close()
    _sandbox = None  # the next item gets a new one
    raise


def code_self_test() -> None:
  """Opens this process's sandbox; raises unless its walls hold and it tells right from wrong."""
  cases = [{"input": [2], "output": 3}]
  reference = {"style": "function", "entry_point": "f", "cases": cases, "time_limit_s": 10.0}
  programs = ("def f(x):\n  return x + 1", "def f(x):\n  return x")
  got = [code(program, reference).outcome for program in programs]
  if got != [Outcome.CORRECT, Outcome.WRONG]:
    raise RuntimeError(f"a right and a wrong program were graded {got}")
