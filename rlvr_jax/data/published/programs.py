"""Published programming problems, graded by their tests."""

from __future__ import annotations

import ast
import base64
import binascii
import json
import math
import pickletools
import re
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

from rlvr_jax.data.published.dataset import Dataset, hub_file, split_files
from rlvr_jax.data.published.rows import Record, Row

_GRADER = "code"
_ANSWER = "Answer with the whole program in one Python code block (```python ... ```)."
_PROMPT = f"{{question}}\n\n{{interface}}\n\n{_ANSWER}"
_MBPP_SPLITS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}
# Modules that contest sites, and LiveCodeBench, import for every program.
_LIBRARIES = (
  "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
  "statistics", "itertools", "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
_PRELUDE = (
  "".join(f"from {name} import *\n" for name in _LIBRARIES)
  + f"from builtins import *\nimport {', '.join(_LIBRARIES)}\nsys.setrecursionlimit(50_000)\n"
)
_LEVELS = {"easy": 1.0, "medium": 2.0, "hard": 3.0}
_MAX_TEST_BYTES = 2**31  # of one problem, decoded
# The opcodes of a pickle of one text; nothing is ever unpickled.
_TEXT_PICKLE = re.compile(
  r"(PROTO )?(FRAME )?(SHORT_BINUNICODE|BINUNICODE8|BINUNICODE|UNICODE) "
  r"((MEMOIZE|BINPUT|LONG_BINPUT|PUT) )?STOP "
)


def describe_interface(reference: Mapping[str, Any]) -> str:
  """A text for the prompt that says how the program is called; "" if the question already says so.

  Args:
    reference: reference of a problem; only programming problems have an interface.
  """
  style = reference.get("style")
  if style == "asserts":
    setup = [reference["setup"]] if reference["setup"] else []
    return "Your code should pass these tests:\n\n" + "\n".join([*setup, *reference["tests"]])
  if style == "function" and reference.get("starter"):
    return f"Complete this starter code:\n\n```python\n{reference['starter'].rstrip()}\n```"
  if style == "function":
    return f"Write the function `{reference['entry_point']}`."
  if style == "stdin":
    return "The program reads standard input and writes its answer to standard output."
  return ""


def _code_block(code: str) -> str:
  return "```python\n" + code.strip("\n").rstrip() + "\n```"


def _check_python(row: Row, field: str, code: str) -> None:
  try:
    with warnings.catch_warnings(action="ignore"):  # about invalid escapes in strings
      ast.parse(code)
  except (SyntaxError, ValueError) as error:
    raise row.error(f"has a {field} that is not Python ({error}): {code[:80]!r}") from error


# --- MBPP -----------------------------------------------------------------------------------------


def _read_mbpp(row: Row) -> Record:
  tests = row.texts("test_list")
  imports = "\n".join(row.texts("test_imports", default=[]))
  setup = row.text("test_setup_code", default=imports)
  if not tests:
    raise row.error("has an empty test_list")
  for test in tests:
    _check_python(row, "test", test)
  return Record(
    id=row.text("task_id"),
    question=row.text("text", "prompt"),
    answer="",
    solution=_code_block(row.text("code").replace("\r\n", "\n")),
    reference={
      "style": "asserts",
      "tests": [test.replace("\r\n", "\n") for test in tests],
      "setup": setup.replace("\r\n", "\n"),
    },
  )


def _mbpp_split(row: Row) -> str:
  number = row.get("task_id")
  for split, (first, last) in _MBPP_SPLITS.items():
    if isinstance(number, int) and first <= number <= last:
      return split
  raise row.error(f"has task_id = {number!r}, expected an integer from 1 to 974")


MBPP = Dataset(
  name="mbpp",
  description=(
    "Mostly Basic Python Problems, full or sanitized, split by task_id. Austin et al. 2021, arXiv "
    "2108.07732."
  ),
  files={
    "": (
      ("mbpp",),
      ("sanitized-mbpp",),
      *(
        tuple(hub_file(split, folder) for split in _MBPP_SPLITS)
        for folder in ("full", "sanitized", "")
      ),
    )
  },
  read=_read_mbpp,
  split_of=_mbpp_split,
  grader=_GRADER,
  prompt=f"You are an expert Python programmer, and here is your task: {_PROMPT}",
)

# --- HumanEval ------------------------------------------------------------------------------------


def _read_humaneval(row: Row) -> Record:
  prompt = row.text("prompt")
  entry_point = row.text("entry_point")
  test = row.text("test")
  if "def check(" not in test:
    raise row.error("has a test without a function check(candidate)")
  _check_python(row, "test", test)
  if f"def {entry_point}(" not in prompt:
    raise row.error(f"has a prompt that does not define the function {entry_point!r}")
  return Record(
    id=row.text("task_id"),
    question=prompt,
    answer="",
    solution=_code_block(prompt + row.text("canonical_solution")),
    reference={"style": "check", "entry_point": entry_point, "test": test, "prompt": prompt},
  )


HUMANEVAL = Dataset(
  name="humaneval",
  description="Functions to complete from signature and docstring. Chen et al. 2021, 2107.03374.",
  files={"test": (("HumanEval",), *split_files("test", "openai_humaneval"))},
  read=_read_humaneval,
  grader=_GRADER,
  prompt=f"Complete this Python program.\n\n```python\n{{question}}\n```\n\n{_ANSWER}",
)

# --- LiveCodeBench --------------------------------------------------------------------------------


def _read_livecodebench(row: Row) -> Record:
  cases = [
    *_read_cases(row, "public_test_cases"),
    *_read_cases(row, "private_test_cases", "hidden_test_cases"),
  ]  # fmt: skip
  if not cases:
    raise row.error("has no test cases")
  styles = {case.get("testtype") for case in cases}
  if styles == {"stdin"}:
    reference = _stdin_reference(row, cases)
  elif styles == {"functional"}:
    reference = _function_reference(row, cases)
  else:
    raise row.error(f"has tests of types {styles}, expected all 'stdin' or all 'functional'")
  difficulty = row.text("difficulty", default="")
  if difficulty.lower() not in ("", *_LEVELS):
    raise row.error(f"has difficulty = {difficulty!r}, expected one of {list(_LEVELS)}")
  return Record(
    id=row.text("question_id", "id", default=row.name),
    question=row.text("question_content", "question"),
    answer="",
    solution="",
    reference=reference | {"contest_date": str(row.get("contest_date", default=""))},
    difficulty=_LEVELS.get(difficulty.lower(), math.nan),
    subject=row.text("platform", default=""),
  )


def _stdin_reference(row: Row, cases: list[Mapping[str, Any]]) -> dict[str, Any]:
  for case in cases:
    if not isinstance(case.get("input"), str) or not isinstance(case.get("output"), str):
      raise row.error(
        f"has a test case whose input or output is missing or not a text: {str(case)[:80]}"
      )
  return {
    "style": "stdin",
    "cases": [{"input": case["input"], "output": case["output"]} for case in cases],
    "setup": _PRELUDE,
  }


def _function_reference(row: Row, cases: list[Mapping[str, Any]]) -> dict[str, Any]:
  """The reference for a function; a test has JSON arguments, one per line, and a JSON output."""
  metadata = row.get("metadata", default={})
  try:
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    name = metadata["func_name"]
    json_cases = [
      {
        "input": [json.loads(line) for line in case["input"].splitlines() if line.strip()],
        "output": json.loads(case["output"]),
      }
      for case in cases
    ]
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise row.error(
      "has tests of type 'functional', but its metadata lacks func_name, or its metadata or a test "
      f"case is not JSON: {type(error).__name__} {error}"
    ) from error
  starter = row.text("starter_code", default="")
  return {
    "style": "function",
    "entry_point": f"Solution.{name}" if "class Solution" in starter else name,
    "cases": json_cases,
    "setup": _PRELUDE,
    "starter": starter,
  }


def _read_cases(row: Row, *names: str) -> list[Mapping[str, Any]]:
  """Reads test cases, given as a list, or as the list's JSON text, plain or encoded.

  An encoded text is pickled or not, then compressed by zlib, then written in base64.
  """
  value = row.get(*names, default=[])
  try:
    if isinstance(value, str) and value.strip():
      value = json.loads(value if value.lstrip()[0] in "[{" else _decode_cases(value))
  except (ValueError, zlib.error) as error:
    raise row.error(f"has {names[0]} that cannot be decoded: {error}") from error
  if not isinstance(value or [], list) or not all(isinstance(case, dict) for case in value or []):
    raise row.error(f"has {names[0]} that is not a list of objects: {str(value)[:80]!r}")
  return value or []


def _decode_cases(text: str) -> str:
  try:
    compressed = base64.b64decode(text, validate=True)
  except binascii.Error as error:
    raise ValueError(f"neither JSON nor base64 ({error}): {text[:40]!r}") from error
  stream = zlib.decompressobj()
  data = stream.decompress(compressed, _MAX_TEST_BYTES)
  if stream.unconsumed_tail or not stream.eof:
    raise ValueError(f"cut off, or larger than {_MAX_TEST_BYTES} bytes")
  return read_pickled_text(data) if data[:1] == b"\x80" else data.decode()


def read_pickled_text(data: bytes) -> str:
  """Reads a text from its pickle `data` without unpickling.

  Raises:
    ValueError: `data` is not the pickle of one text; other pickles could run code.
  """
  opcodes = ""
  texts: list[str] = []
  for opcode, argument, _ in pickletools.genops(data):
    opcodes += f"{opcode.name} "
    if "UNICODE" in opcode.name:
      texts.append(str(argument))
    if len(opcodes) > 100:
      break
  if not _TEXT_PICKLE.fullmatch(opcodes):
    raise ValueError(
      f"a pickle of something other than one text ({opcodes[:60].strip()}...), which is never "
      "loaded; if you trust it, convert it to JSON"
    )
  return texts[0]


LIVECODEBENCH = Dataset(
  name="livecodebench",
  description=(
    "Contest problems with hidden tests; functions and programs. Jain et al. 2024, arXiv "
    "2403.07974. Any rows of the same form can be used."
  ),
  files={"test": (("/",),)},  # a file for each release: test, test2, ...
  read=_read_livecodebench,
  grader=_GRADER,
  prompt=_PROMPT,
)
