"""Grading of programs: styles of tests, what crosses over to the program, published solutions."""

import json
import os
import pathlib
import time

import pytest

from experiments.benchmarks import code_grading
from rlvr_jax.data.jsonl import jsonl
from rlvr_jax.rewards import GraderPool, Outcome
from rlvr_jax.rewards.code import code, extract_program

ADD = "def add(a, b):\n  return a + b\n"


def _asserts(*tests, **more):
  return {"style": "asserts", "tests": list(tests)} | more


def _stdin(*cases, **more):
  return {"style": "stdin", "cases": [{"input": i, "output": o} for i, o in cases]} | more


def _function(entry_point, *cases, **more):
  cases = [{"input": i, "output": o} for i, o in cases]
  return {"style": "function", "entry_point": entry_point, "cases": cases} | more


def _passes(program, *tests, **more):
  grade = code(program, _asserts(*tests, **more))
  assert grade.outcome in (Outcome.CORRECT, Outcome.WRONG), grade
  return grade.outcome is Outcome.CORRECT


@pytest.mark.parametrize(
  ("completion", "program"),
  [
    ("x = 1", "x = 1"),
    ("so:\n```python\nx = 1\n```\nand", "x = 1\n"),
    ("```python\nx = 1\n```\n```\nx = 2\n```", "x = 1\n"),
    ("```\nx = 1\n```\nprints\n```\n1 2 3\n```", "x = 1\n"),
    ("```\n1 2\n```\n```\n3 4\n```", "3 4\n"),
    ("```text\nx\n```\n```python\nx = 1\n```", "x = 1\n"),
    ("```python\nx = 1\n```\n```bash\npython x.py\n```\n", "x = 1\n"),
    ("Run `x`:\n```bash\nls\n```\nthen\n``` Python\nx = 1\n```", "x = 1\n"),
    ("1. So:\n   ```python\n   if x:\n     y = 1\n   ```\n2. Done", "if x:\n  y = 1\n"),
    ("1. ```python\n   x = 1\n   ```\n", "x = 1\n"),
    ("~~~~py\nx = 1\n~~~\n~~~~~\nand", "x = 1\n~~~\n"),
    ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
    ("```python\ndef f():\n    '''\n    ```\n    f()\n    ```\n    '''\n```",
     "def f():\n    '''\n    ```\n    f()\n    ```\n    '''\n"),
    ("def f():\n  '''\n  ```\n  f()\n  ```\n  '''", "def f():\n  '''\n  ```\n  f()\n  ```\n  '''"),
    ("```x``` is\n```python\nx = 1", "x = 1"),
    ("```python\nx = 1\n```\n```text\nx = 2\n```", "x = 1\n"),
    ("```py\r\nx = 1\r\n```\r\n", "x = 1\n"),
    ("<think>```python\nx = 1\n```</think> x = 2", " x = 2"),
    ("<think>maybe\n```python\nx = 1\n```\nno, wait", ""),
    ("x = '<think>'", "x = '<think>'"),
    ("```python\n  return 1\n", "  return 1\n"),
    ("```python\ns = '''\n a ``` b\n'''\n```", "s = '''\n a ``` b\n'''\n"),
    ("Answer: ```python\nx = 1\n```\nand", "x = 1\n"),
    ("**Answer**:  ```\nx = 1\n```", "x = 1\n"),
    ("Write it behind ``` marks or ```\n```python\nx = 1\n```", "x = 1\n"),
    ("```python:main.py\nx = 1\n```", "x = 1\n"),
    ("```py3\nx = 1\n```\n```\n1\n```", "x = 1\n"),
    ("```python3.11\nx = 1\n```", "x = 1\n"),
    ("```{.python .numberLines}\nx = 1\n```", "x = 1\n"),
    ("```python,linenos\nx = 1\n```", "x = 1\n"),
    ("```python-console\n>>> 1\n```\n```pycon\n>>> 1\n```\n```\nx = 1\n```", "x = 1\n"),
    ("<answer>```python\nx = 1\n```</answer>", "x = 1\n"),
    ("So:\n<answer>\n```\nx = 1\n```\n</answer>", "x = 1\n"),
    ("It adds.\n<answer>\nx = 1\n</answer>\n", "x = 1\n"),
    ("It adds.\n<answer>x = 1", "x = 1"),
    ("print('<answer>5</answer>')", "print('<answer>5</answer>')"),
  ],
)  # fmt: skip
def test_program_text(completion, program):
  assert extract_program(completion) == program


@pytest.mark.parametrize("line", ["`" * 200_000 + "x`", "1" * 200_000, "- " * 100_000])
def test_the_time_to_find_a_program_grows_with_its_text(line):
  began = time.process_time()
  assert extract_program(f"{line}\n```python\nx = 1\n```") == "x = 1\n"
  assert time.process_time() - began < 2


def test_asserts():
  tests = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
  assert code(ADD, _asserts(*tests)).score == 1.0
  grade = code(ADD, _asserts(*tests, "assert add(1, 1) == 3", "assert add(2, 2) == 4"))
  assert (grade.outcome, grade.score) == (Outcome.WRONG, 0.0)
  assert "test 3 of 4" in grade.detail and "add(1, 1) == 3" in grade.detail
  failing = _asserts(*tests, "assert add(1, 1) == 3", "assert add(2, 2) == 4")
  share = code(ADD, failing, reward="fraction")
  assert (share.outcome, share.score) == (Outcome.WRONG, 0.75)


def test_setup_runs_after_the_program_if_it_makes_arguments_and_else_before():
  program = "class Node:\n  def __init__(self, v): self.v = v\ndef f(n): return n.v"
  assert _passes(program, "assert f(root) == 7", setup="root = Node(7)")
  reference = _function("f", ([4.0], 2.0), setup="from math import *\nfrom typing import *")
  assert code("def f(x: List) -> float: return sqrt(x)", reference).outcome is Outcome.CORRECT
  reference = _stdin(("4", "2.0"), setup="from math import *")
  assert code("print(sqrt(int(input())))", reference).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
  ("program", "detail"),
  [
    ("def add(a, b: return", "program: SyntaxError"),
    ("raise ValueError('at once')", "program: ValueError: at once"),
    ("def sub(a, b): return a - b", "NameError: name 'add' is not defined"),
    ("def add(a, b): return a / 0", "ZeroDivisionError"),
    ("class Odd(Exception): pass\ndef add(a, b): raise Odd('so')", "Odd: so"),
    ("def add(a, b): exit(0)", "SystemExit"),
    ("import os\ndef add(a, b): os._exit(0)", "the program has ended"),
    ("def add(a, b): return 'x' * 2**25", "unusable"),
    ("add = 5", "not callable"),
  ],
)
def test_what_went_wrong(program, detail):
  grade = code(program, _asserts("assert add(1, 2) == 3"))
  assert (grade.outcome, grade.score) == (Outcome.WRONG, 0.0)
  assert detail in grade.detail


def test_no_code():
  assert code(" \n", _asserts("assert True")).outcome is Outcome.UNPARSEABLE
  assert code("```python\n```", _asserts("assert True")).outcome is Outcome.UNPARSEABLE


@pytest.mark.parametrize(
  "reference",
  [
    _asserts("assert f(1) == 5", "assert f(2) == 6"),
    _asserts("assert f(1) == 5\nassert f(2) == 6"),
    _asserts("assert f(1) == 5 and (f(1) == 7 and f(2) == 6)"),
    _asserts("for x in (1, 2): assert f(x) == x + 4"),
    _asserts("def g(x): assert f(x) == x + 4\ng(1)\ng(2)"),
    _asserts("assert f(1).upper() == 'A'\nassert f(2) == 6"),
    _asserts("try: f(1)\nexcept ValueError: pass\nelse: assert f(1) == 5\nassert f(2) == 6"),
    {"style": "check", "entry_point": "f",
     "test": "def check(c):\n  assert c(1) == 5, 'one'\n  assert c(2) == 6"},
    _function("f", ([1], 5), ([2], 6)),
    _stdin(("1", "5"), ("2", "6")),
  ],
)  # fmt: skip
def test_all_calls_are_made_whatever_comes_back(reference):
  """A program that is not asked again would know that it has failed."""
  program = "def f(x):\n  while x == 2: pass\n  return 0"
  if reference["style"] == "stdin":
    program += "\nprint(f(int(input())))"
  grade = code(program, reference | {"time_limit_s": 0.15})
  assert grade.outcome is Outcome.TIMEOUT, grade  # in its second call


@pytest.mark.parametrize("message", ["f(2)", "f'got {f(2)}'", "'got %s' % f(2)"])
def test_a_failure_asks_nothing_of_the_program(message):
  program = "def f(x):\n  while x == 2: pass\n  return 0"
  grade = code(program, _asserts(f"assert f(1) == 5, {message}", time_limit_s=5.0))
  assert grade.outcome is Outcome.WRONG, grade


@pytest.mark.parametrize(
  ("test", "passed"),
  [
    ("assert f(1) == 5, 'odd'\nassert f(2) == 2", "AssertionError: odd"),
    ("assert f(1) == 1\nassert [][f(1)]\nassert f(1) == 5, 'odd'", "IndexError: list index"),
    ("assert f(1) == 5, 'odd'\n[][0]", "AssertionError: odd"),
    ("assert f(1) == 1 and (n := f(2)) == 2 and n", ""),
    ("assert isinstance(f([]), list) and f([]) == []", ""),
    ("assert isinstance(f(1), list) and f(1)[0] == 1", "AssertionError"),
    ("try:\n  assert f(1) == 5\nexcept AssertionError: pass\nelse: assert False", ""),
    ("try:\n  assert f(1) == 5\nexcept* AssertionError: pass\nelse: assert False", ""),
    ("try:\n  assert f(1) == 5\nfinally: pass", "AssertionError"),
    ("exit()", "SystemExit"),
  ],
)
def test_a_test_fails_with_its_first_failure(test, passed):
  grade = code("def f(x): return x", _asserts(test, "assert f(3) == 3"), reward="fraction")
  assert grade.score == (0.5 if passed else 1.0), grade
  assert passed in grade.detail, grade


def test_the_time_limit_is_of_processor_time():
  """And, apart from that, of the time in which a program sleeps."""
  naps = "import time\ndef add(a, b):\n  time.sleep(0.4)\n  return a + b"
  reference = _asserts("assert add(1, 2) == 3", time_limit_s=0.7)
  both = naps.replace("  return", "  while time.process_time() < 0.4: pass\n  return")
  assert code(both, reference).outcome is Outcome.CORRECT
  with GraderPool("code", timeout_s=1.5) as pool:  # for the rest of the item
    before = pool.worker_pids()
    (right, slept) = pool.grade([naps, naps.replace("0.4", "60")], [reference] * 2)
    assert (right.outcome, slept.outcome) == (Outcome.CORRECT, Outcome.TIMEOUT), (right, slept)
    assert set(before) <= set(pool.worker_pids())


PROMPT = '''import math
from typing import List

def helper(x):
  return x + 1

def area(r: float) -> float:
    """Area of a circle."""
'''
CHECK = """
def check(candidate):
  assert abs(candidate(1) - 3.14159) < 1e-4
  assert helper(1) == 2
"""


@pytest.mark.parametrize(
  ("completion", "right"),
  [
    ("    return math.pi * r * r\n", True),
    ("```python\n    return math.pi * r * r\n```", True),
    ("def area(r: float) -> float:\n    return math.pi * r ** 2", True),
    ("from math import pi\narea = lambda r: pi * r * r", True),
    ("    return 3 * r * r\n", False),
    ("def other(r):\n    return math.pi * r * r\n", False),
    # The helper that the test uses is the prompt's own, not what a program makes of it.
    ("def helper(x):\n  return 7\ndef area(r):\n  return math.pi * r * r", True),
  ],
)
def test_check(completion, right):
  reference = {"style": "check", "entry_point": "area", "test": CHECK, "prompt": PROMPT}
  assert code(completion, reference).outcome is (Outcome.CORRECT if right else Outcome.WRONG)


@pytest.mark.parametrize(
  ("program", "entry_point", "case", "right"),
  [
    (ADD, "add", ([1, 2], 3), True),
    (ADD, "add", ([1, 2], 4), False),
    (ADD, "add", ([0.1, 0.2], 0.3), True),
    (ADD, "add", ([0.1, -0.1 + 1e-12], 0.0), True),
    (ADD, "add", ([0.1, -0.1 + 1e-12], 0), False),
    (ADD, "add", ([1.0, 2.0], 3), True),
    (ADD, "add", ([1000000005.0, 1.0], 1000000005), False),
    (ADD, "add", ([0.0, 1e18], 10**18 + 123456789), False),
    (ADD, "add", ([[1e9], [2]], [10**9 + 1, 2]), False),
    (ADD, "add", ([1e-12, 1e-12], 1e-12), False),
    (ADD, "add", ([2.0, 1e300], float("inf")), False),
    ("def f(): return (1, [2, (3,)])", "f", ([], [1, [2, [3]]]), True),
    ("def f(): return {1: (2,)}", "f", ([], {"1": [2]}), True),
    ("def f(): return {1: 'bad', '1': 'ok'}", "f", ([], {"1": "ok"}), False),
    ("def f(): return {(1, 2): 3}", "f", ([], {"[1, 2]": 3}), False),
    ("def f(): return {b'a': 1}", "f", ([], {"a": 1}), False),
    ("def f(): return 10**16", "f", ([], 10**16 + 1), False),
    ("def f(): return None", "f", ([], 0), False),
    ("class S:\n  n = 0\n  def g(self, x): self.n += x; return self.n", "S.g", ([2], 2), True),
    ("def g(x): return x", "S.g", ([2], 2), True),
    ("x = 1", "g", ([2], 2), False),
  ],
)
def test_function(program, entry_point, case, right):
  grade = code(program, _function(entry_point, case, case))
  assert grade.outcome is (Outcome.CORRECT if right else Outcome.WRONG), grade


LONG = "7" * 50_000  # digits that LiveCodeBench allows; Python's own limit is 4300


def test_integers_of_50_000_digits(tmp_path):
  check = "def check(f): assert f() == len(str(10**49_999))"
  cases = [
    ("def f(x): return int(str(x))", _function("f", ([int(LONG)], int(LONG)))),
    ("print(int(input()))", _stdin((LONG, LONG))),
    (
      "from fractions import Fraction\ndef f(): return Fraction(int('7' * 50_000), 2)",
      _asserts("assert f() * 2 == int('7' * 50_000)"),
    ),
    (
      "def f(): return len(str(10**49_999))",
      {"style": "check", "entry_point": "f", "test": check},
    ),
  ]
  lines = [json.dumps({"q": n, **reference}) + "\n" for n, (_, reference) in enumerate(cases)]
  (tmp_path / "lines.jsonl").write_text("".join([*lines, lines[0].replace('"q": 0', '"q": 9')]))
  task = jsonl(
    train=tmp_path / "lines.jsonl", held_out_size=1, grader="code", answer="", prompt="{q}"
  )
  references = {p.question: p.reference for p in [*task.train, *task.held_out]}
  with GraderPool("code") as pool:
    programs = [program for program, _ in cases]
    grades = pool.grade(programs, [references[str(n)] for n in range(len(cases))])
  assert [grade.outcome for grade in grades] == [Outcome.CORRECT] * len(cases), grades


_ABSOLUTE, _RELATIVE = dict(absolute_tolerance=1e-4), dict(relative_tolerance=1e-4)


@pytest.mark.parametrize(
  ("result", "expected", "tolerance", "right"),
  [
    (8 / 3, 2.66667, {}, False),
    (8 / 3, 2.66667, _ABSOLUTE, True),
    (8 / 3, 2.66667, _RELATIVE, True),
    (2.668, 2.66667, _ABSOLUTE, False),
    (1e9 + 1, 1e9, _ABSOLUTE, False),
    (1e9 + 1, 1e9, _RELATIVE, True),
    (1e-5, 0.0, _RELATIVE, False),
    (1e-5, 0, _ABSOLUTE, True),
    (10**9 + 1, 10**9, _RELATIVE, False),
    ([1, [2.00001]], [1, [2]], _ABSOLUTE, True),
    ([1, [2.00001]], [2, [2]], _ABSOLUTE, False),
    ({"a": 0.99999}, {"a": 1.0}, _ABSOLUTE, True),
    (float("inf"), 1.0, dict(relative_tolerance=1.0), False),
    (1.0, float("inf"), dict(relative_tolerance=1.0), False),
    (float("nan"), 1.0, _ABSOLUTE, False),
    (True, 1.0, _ABSOLUTE, True),
    ("1.00001", "1", _ABSOLUTE, False),
  ],
)
def test_a_tolerance_of_function_s_results(result, expected, tolerance, right):
  source = f"inf, nan = float('inf'), float('nan')\ndef f(): return {result!r}"
  grade = code(source, _function("f", ([], expected), **tolerance))
  assert grade.outcome is (Outcome.CORRECT if right else Outcome.WRONG), grade


@pytest.mark.parametrize(
  ("printed", "expected", "tolerance", "right"),
  [
    ("0.333333", "0.333333333333", {}, False),
    ("0.333333", "0.333333333333", _ABSOLUTE, True),
    ("0.3333 2\n5", "0.33333 2.0\n5", _ABSOLUTE, True),
    ("0.3333 3", "0.33333 2", dict(absolute_tolerance=2.0), False),
    ("0.3333", "0.33333 2", _ABSOLUTE, False),
    ("Case 1: 0.3333", "Case 1: 0.33333", _ABSOLUTE, True),
    ("Case 2: 0.3333", "Case 1: 0.33333", _ABSOLUTE, False),
    ("Case 1: 0.3333", "Case 1: 0.3333000", {}, False),
    ("1e999999", "1e-999999", _RELATIVE, False),
    ("nan", "0.5", _ABSOLUTE, False),
  ],
)
def test_a_tolerance_of_output(printed, expected, tolerance, right):
  grade = code(f"print({printed!r})", _stdin(("", expected), **tolerance))
  assert grade.outcome is (Outcome.CORRECT if right else Outcome.WRONG), grade


def test_what_the_setup_defines_is_no_answer():
  for entry in ("gcd", "Solution.gcd"):
    reference = _function(entry, ([4, 6], 2), setup="from math import *")
    assert "NameError" in code("x = 1", reference).detail
  program = "class Solution:\n  def gcd(self, a, b): return gcd(a, b)"
  assert code(program, reference).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
  ("program", "case", "right"),
  [
    ("print(int(input()) + int(input()))", ("1\n2\n", "3\n"), True),
    ("print('a  ')\nprint('b')", ("", "a\nb"), True),
    ("print(1.50, 2)", ("", "1.5 2.0"), True),
    ("print(1.5001, 2)", ("", "1.5 2.0"), False),
    ("print(10**17)", ("", str(10**17 + 1)), False),
    ("print('+.5e1 1E-2 7.')", ("", "5 0.01 7"), True),
    ("print('1_0')", ("", "10"), False),
    ("print('\u0661\u0660 \uff11')", ("", "10 1"), False),
    ("print('Infinity')", ("", "inf"), False),
    ("print('a'); print()", ("", "a"), True),
    ("print('a'); print('b')", ("", "a"), False),
    ("print('a b')", ("", "a  b"), False),
    ("import sys\nfor line in sys.stdin: sys.stdout.write(line)", ("x\ny\n", "x\ny"), True),
    ("print(open(0).read())", ("é", "é"), True),
    ("print(open('/dev/stdin').read())", ("x", "x"), True),
    ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", ("é", "é"), True),
    ("if __name__ == '__main__': print(1)", ("", "1"), True),
    ("print(1)\nexit()", ("", "1"), True),
    ("print(1)\nexit(3)", ("", "1"), False),
    ("print(1)\nraise ValueError('odd')", ("", "1"), False),
    ("import os\nos.write(1, b'1'); os._exit(0)", ("", "1"), True),
    ("import atexit\natexit.register(print, 2)\nprint(1)", ("", "1\n2"), True),
    (
      "import threading, time\n"
      "threading.Thread(target=lambda: (time.sleep(0.05), print(2))).start()\nprint(1)",
      ("", "1\n2"),
      True,
    ),
    ("import subprocess\nsubprocess.run(['echo', '1'])", ("", "1"), True),
    ("import sys\nprint(1)\nsys.stdout.close()", ("", "1"), True),
    ("import os\nprint(1)\nout = os.fdopen(1, 'w')\nout.write('2')", ("", "1\n2"), True),
    (
      "import io, sys\nprint(1)\nsys.stdout = io.StringIO()\nprint(2)",
      ("", "1"),
      True,
    ),
    (
      "import resource as r\nr.setrlimit(r.RLIMIT_STACK, (2**28, r.getrlimit(r.RLIMIT_STACK)[1]))\n"
      "print(1)",
      ("", "1"),
      True,
    ),
  ],
)
def test_stdin(program, case, right):
  grade = code(program, _stdin(case))
  assert grade.outcome is (Outcome.CORRECT if right else Outcome.WRONG), grade


@pytest.mark.parametrize("program", ["def f(): return 1 / 0\nf()", "x = (", "import absent"])
def test_failures_of_scripts_name_no_file_of_ours(program):
  detail = code(program, _stdin(("", "1"))).detail
  assert "Error" in detail and '"<solution>", line' in detail
  assert "harness" not in detail and "_run_script" not in detail


def test_stdin_cases_are_processes_of_their_own():
  program = "import os, sys\nprint(len(getattr(sys, 'seen', [])) + int(input()))\nsys.seen = [1]"
  reference = _stdin(("1", "1"), ("2", "2"), ("3", "4"), ("4", "4"))
  grade = code(program, reference, reward="fraction")
  assert grade.score == 0.75 and "got '3\\n', expected '4'" in grade.detail


@pytest.mark.parametrize(
  "value",
  [
    "None", "True", "1", "-2**70", "10**5000", "1.5", "float('inf')", "1j", "'é\\ud800'",
    "b'\\xff'", "bytearray(b'a')", "[1, [2]]", "(1, (2,))", "{1, 2}", "frozenset({1})",
    "{(1, 2): [3], None: {}}", "range(2, 9, 3)", "collections.deque([1])", "int", "type(None)",
    "fractions.Fraction(1, 3)", "decimal.Decimal('0.1')", "[True, 1, 1.0]", "slice(1, None)",
    "datetime.date(2024, 2, 29)", "datetime.datetime(2024, 2, 29, 1, 2, 3, 4)",
    "datetime.datetime(1, 1, 1, tzinfo=datetime.timezone.utc)", "datetime.time(1, 2)",
    "datetime.timezone(datetime.timedelta(hours=2), 'here')", "datetime.timedelta(-1, 2, 3)",
  ],
)  # fmt: skip
def test_values_cross_over_both_ways(value):
  """Asked of the program: is what came the very value, and of the very type, that was sent."""
  program = (
    "import collections, datetime, decimal, fractions\n"
    f"def same(x): return repr(x) == repr({value}) and type(x) == type({value})\n"
    "def echo(x): return x"
  )
  setup = "import collections, datetime, decimal, fractions, sys; sys.set_int_max_str_digits(0)\n"
  test = f"{setup}v = echo({value})\nassert repr(v) == repr({value}) and type(v) == type({value})"
  program = "import sys; sys.set_int_max_str_digits(0)\n" + program
  assert _passes(program, f"{setup}assert same({value})", test)


@pytest.mark.parametrize(
  ("returned", "test"),
  [
    ("collections.namedtuple('P', 'x y')(1, 2)", "assert f() == (1, 2) and type(f()) is tuple"),
    ("collections.Counter('aab')", "assert f() == {'a': 2, 'b': 1}"),
    ("collections.defaultdict(list, a=[1])", "assert f() == {'a': [1]}"),
    ("collections.OrderedDict(a=1)", "assert f() == {'a': 1}"),
    ("enum.IntEnum('E', 'a b').b", "assert f() == 2 and type(f()) is int"),
    ("enum.StrEnum('E', {'a': 'x'}).a", "assert f() == 'x' and type(f()) is str"),
    ("type('L', (list,), {})([1])", "assert f() == [1] and type(f()) is list"),
  ],
)
def test_subclasses_come_as_their_base(returned, test):
  assert _passes(f"import collections, enum\ndef f(): return {returned}", test)


def test_a_missing_key_is_the_one_that_was_missing():
  test = "try:\n  f()\nexcept KeyError as error:\n  assert str(error) == repr('k')"
  assert _passes("def f(): return {}['k']", test)


@pytest.mark.parametrize(
  ("program", "tests"),
  [
    ("Tree = object\ndef depth(t): return 1", ["t = Tree()\nassert depth(t) == 0"]),
    ("Cart = dict\ndef total(x): return 1", ["c = Cart()\nassert total(c.items) == 0"]),
    ("Cart = dict\ndef total(x): return 1", ["c = Cart()\nassert total(c.keys()) == 0"]),
    ("def make(): return object\ndef use(x): return 1", ["assert use(make()()) == 0"]),
  ],
)
def test_a_program_cannot_make_a_test_impossible(program, tests):
  """A rollout that cannot be graded is masked, which a program must not choose."""
  assert not _passes(program, *tests)


@pytest.mark.parametrize(
  ("program", "test", "setup"),
  [
    ("import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0",
     "assert isclose(f(1), 2.5)", "from math import isclose"),
    ("import collections\ncollections.Counter = lambda x: {}\ndef f(x): return 0",
     "assert Counter(f('ab')) == Counter('ab')", "from collections import Counter"),
    ("import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0",
     "assert m.isclose(f(1), 2.5)", "class Node: pass\nimport math as m"),
    ("import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0",
     "assert isclose(f(1), 2.5)", "from math import *"),
  ],
)  # fmt: skip
def test_what_a_setup_imports_is_the_judge_s_own(program, test, setup):
  assert not _passes(program, test, setup=setup)
  good = {"assert Counter": "def f(x): return x"}.get(test[:14], "def f(x): return 2.5")
  assert _passes(good, test, setup=setup)


@pytest.mark.parametrize("setup", ["from math import *", "from math import gcd"])
def test_a_setup_that_imports_what_is_tested_is_refused(setup):
  with pytest.raises(RuntimeError, match=r"only names that the setup imports.*: \['gcd'\]"):
    code("def gcd(a, b): return 0", _asserts("assert gcd(4, 6) == 2", setup=setup))


def test_a_prompt_may_end_with_a_header():
  reference = dict(style="check", test="def check(c): assert c(2) == 3", entry_point="f")
  prompt = "import math\nclass A:\n  b = 1\n\ndef f(x):\n"
  for program in ("  return x + A.b", "def f(x): return x + A.b"):
    assert code(program, reference | dict(prompt=prompt)).outcome is Outcome.CORRECT


def test_standard_streams_are_as_an_interpreter_has_them():
  program = (
    "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n"
    "  print(s.mode, s.name, s.errors == 'backslashreplace', s.isatty(), s.buffer.mode)\n"
    "print(__builtins__.max(1, 2), sys.stdin.read())"
  )
  lines = ["r <stdin> False False rb", "w <stdout> False False wb", "w <stderr> True False wb"]
  grade = code(program, _stdin(("a", "\n".join([*lines, "2 a"]))))
  assert grade.outcome is Outcome.CORRECT, grade
  assert code("\ufeffprint(1)", _stdin(("", "1"))).outcome is Outcome.CORRECT


OBJECTS = """
class Stack:
  def __init__(self, items=()): self.items = list(items)
  def push(self, x): self.items.append(x); return self
  def __len__(self): return len(self.items)
  def __getitem__(self, i): return self.items[i]
  def __setitem__(self, i, x): self.items[i] = x
  def __str__(self): return "Stack" + str(self.items)
  def __eq__(self, other): return True
  __hash__ = None
def total(stack): return sum(stack.items)
def countdown(n):
  while n:
    yield n
    n -= 1
def adder(n): return lambda x: x + n
"""


@pytest.mark.parametrize(
  "test",
  [
    "s = Stack([1, 2])\nassert s.push(5).push(6).items == [1, 2, 5, 6]\nassert len(s) == 4",
    "s = Stack()\nassert not s\ns.push(3)\nassert s and s[0] == 3 and list(s) == [3]",
    "s = Stack([1])\ns[0] = 9\ns.name = 'n'\nassert (s.items, s.name) == ([9], 'n')",
    "assert str(Stack([9])) == f'{Stack([9])}' == 'Stack[9]'",
    "assert total(Stack([1, 2])) == 3 and total(stack=Stack([4])) == 4",
    "s = Stack()\nassert s.push(1) is s and s != Stack([1])",
    "assert list(countdown(3)) == [3, 2, 1] and 2 in countdown(3) and sum(countdown(2)) == 3",
    "assert adder(2)(3) == 5",
    "g = countdown(2)\nassert (next(g), next(g), next(g, None)) == (2, 1, None)",
    "s = Stack([1, 2, 3])\nassert s[:2] == [1, 2] and s[::-2] == [3, 1]",
    "try:\n  Stack()[0]\nexcept IndexError:\n  pass\nelse:\n  assert False",
  ],
)
def test_objects_of_the_program(test):
  assert _passes(OBJECTS, test)


def test_arguments_changed_in_place():
  program = (
    "def turn(m):\n  m[:] = [list(r) for r in zip(*m[::-1])]\n"
    "def put(d, s, q): d['k'] = 1; s.add(2); q.appendleft(3)\n"
  )
  first = "m = [[1, 2], [3, 4]]\nassert turn(m) is None\nassert m == [[3, 1], [4, 2]]"
  second = (
    "import collections\nd, s, q = {}, set(), collections.deque()\nput(d, s, q)\n"
    "assert (d, s, list(q)) == ({'k': 1}, {2}, [3])"
  )
  assert _passes(program, first, second)


def test_functions_of_tests_as_arguments():
  program = (
    "def twice(f, x): return f(f(x))\ndef best(xs, key): return max(xs, key=key)\n"
    "def inc(x): return x + 1\n"
  )
  handed = "operator.add str.upper math.hypot functools.partial(max,0) [].append print".split()
  setup = "import functools, math, operator\n"
  assert all(
    _passes("def f(g): return callable(g)", f"{setup}assert f({function})") for function in handed
  )
  assert _passes(
    program,
    "import operator\nassert twice(operator.neg, 3) == 3",
    "d = {2: 1, 1: 1}\nassert best(d.keys(), abs) == 2",
    "assert twice(lambda x: 2 * x, 3) == 12",
    "assert twice(lambda x: inc(x) * 2, 3) == 18",
    "assert best(['a', 'bcd', 'ef'], len) == 'bcd'",
    "assert best(iter([1, -5]), abs) == -5",
    "try:\n  twice(lambda x: 1 // x, 0)\nexcept ZeroDivisionError:\n  pass\nelse:\n  assert False",
  )
  with pytest.raises(RuntimeError, match="passes a module to the program"):
    code(program, _asserts("import math\nassert twice(math, 1)"))


@pytest.mark.parametrize(
  "test",
  ["f(2)[:2]", "f(2)[math]", "f(2)(math)", "f(2).g(math)", "setattr(f(2), 'x', math)",
   "f(2).__setitem__(0, math)", "[x for x in f(2)]"],
)  # fmt: skip
def test_an_object_where_data_were_expected_is_a_failure_of_the_program(test):
  """Though the test asks of it what cannot cross over: for data it would not have had to."""
  program = (
    "class A:\n  def __call__(self, x): return self\n  def g(self, x): return x\n"
    "def f(x): return A()"
  )
  grade = code(program, _asserts(f"import math\nassert {test} == [1, 2]"))
  assert grade.outcome is Outcome.WRONG and "Error" in grade.detail, grade
  if "math" in test:
    expected = "TypeError: the program returned a value that is not plain data, and a test passes a"
    assert f"{expected} module" in grade.detail


def _checks(test, **more):
  return {"style": "check", "entry_point": "f", "test": test} | more


@pytest.mark.parametrize(
  ("reference", "word"),
  [
    (_asserts(), "'tests' is empty"),
    (_stdin(), "'cases' is empty: every program would pass"),
    (_checks(""), "'test' is empty"),
    ({"style": "pytest"}, "'pytest'"),
    (_asserts("assert f()", reward="all"), r"code\(reward='all'\)"),
    (_asserts("assert f()", time_limit_s=0), "time_limit_s is 0"),
    (_asserts("assert f()", time_limit_s=float("inf")), "time_limit_s is inf"),
    (_asserts("assert f()", memory_mib=16), "memory_mib is 16, must be an integer ≥ 64"),
    (_stdin(("", "1"), absolute_tolerance=-1), "absolute_tolerance is -1"),
    (_stdin(("", "1"), relative_tolerance="1e-6"), "relative_tolerance is '1e-6'"),
    (_stdin(("", "1"), relative_tolerance=True), "relative_tolerance is True"),
    (_asserts("assert f()", absolute_tolerance=0.1), "'function' and 'stdin'"),
    # Tests that no program can pass.
    (_asserts("import numpy as np\nassert f(1)"), "a test imports 'numpy'|imports 'numpy'"),
    (_asserts("assert f(1"), "not Python"),
    (
      _asserts("assert f(1)", setup="try: import numpy\nexcept ImportError: pass"),
      "a setup imports",
    ),
    (_asserts("assert f(1)", setup="from . import x"), "a setup imports ''"),
    (_asserts("assert f(1)", setup="x = ("), "a setup is not Python"),
    (_function("f", ([], 1), setup="import numpy"), "a setup imports"),
    (_stdin(("", ""), setup="import numpy"), "a setup imports"),
    (_checks("def check(c): import numpy.linalg"), "a test imports 'numpy'"),
    (_checks("def check(c): pass", prompt="import numpy\ndef f(x):"), "a prompt imports"),
    (_checks("def check(c): assert ("), "not Python"),
    (_checks("def test(c): pass"), r"define check\(candidate"),
    (_checks("def check(c): pass", prompt="def ("), "the prompt"),
    (_stdin(("x" * (2**24 + 1), "")), "an input has 16777217 bytes"),
    (_stdin(("", "x" * (2**21 + 1))), "an output has 2097153 bytes"),
  ],
)
def test_bad_references(reference, word):
  with pytest.raises(ValueError, match=word):
    code("x = 1", reference)


def _published():
  folder = os.environ.get("RLVR_SHARED")
  if folder is None:
    pytest.skip("RLVR_SHARED, the folder of published data, is not set")
  return code_grading.load(pathlib.Path(folder) / "data")


def _grade_published(size):
  with GraderPool("code", num_workers=2) as pool:
    for problems in _published().values():
      problems = code_grading.choose_spread(problems, size)
      assert len(problems) >= (size or 100)
      references = [problem.reference for problem in problems]
      right = pool.grade([problem.solution for problem in problems], references)
      wrong = pool.grade([code_grading.corrupt(problem) for problem in problems], references)
      for problem, good, bad in zip(problems, right, wrong, strict=True):
        assert good.outcome is Outcome.CORRECT, (problem.name, good)
        assert bad.outcome is Outcome.WRONG, (problem.name, bad)
        assert "program:" not in bad.detail and "NameError" not in bad.detail, (problem.name, bad)


def test_published_solutions_pass_and_corrupted_copies_fail():
  _grade_published(15)


@pytest.mark.slow
def test_all_published_solutions_pass_and_all_corrupted_copies_fail():
  _grade_published(None)
