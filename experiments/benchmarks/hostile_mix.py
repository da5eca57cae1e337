"""Runs innocent programs, alone and mixed with 5 % hostile programs.

  python experiments/benchmarks/hostile_mix.py
  python experiments/benchmarks/hostile_mix.py --items=300 --rounds=1 --time_limit_s=6
  python experiments/benchmarks/hostile_mix.py --by=python

One pool takes `--items` programs in each section, in turn: `innocent` has expected and wrong
solutions of small tasks in all styles of tests; in `mixed` every 20th program is hostile, cycling
through `HOSTILE`. The pool is of graders, or with --by=python of the environment of that name: a
program with its tests is then a policy's turn. A round is both sections; before the first, 100
programs of each warm up the workers. The benchmark ends with an error unless every program gets its
expected grade or reply. Rates are from submission to the last result; the ratio is that of a
round's two rates. The table is printed and written to results/hostile_mix.md, or
hostile_mix_python.md, its numbers to the .json file next to it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from absl import app, flags

from experiments.benchmarks.tables import Row, hardware, write_results
from rlvr_jax.codejudge import tasks
from rlvr_jax.environments import Turn
from rlvr_jax.environments.dialogues import EnvironmentPool, Started
from rlvr_jax.rewards import GraderPool, Outcome
from rlvr_jax.workers.pool import Failure, default_workers

_ITEMS = flags.DEFINE_integer("items", 400, "Programs of a section.", lower_bound=20)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds of both sections.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", None, "Processes; default a run's.", lower_bound=1)
_BY = flags.DEFINE_enum("by", "grader", ["grader", "python"], "What runs the programs.")
_LIMIT_S = flags.DEFINE_float("time_limit_s", tasks.TIME_LIMIT_S, "Limit of a program, seconds.")
_FOLDER = flags.DEFINE_string(
  "results_folder", str(pathlib.Path(__file__).parent / "results"), "Folder for the table."
)
_EVERY = 20  # one of this many programs is hostile

_SECRET = 928374651928374651  # a value that no program can guess
_MEMORY_MIB = 256
_ASSERT = {"style": "asserts", "tests": [f"assert f(2) == {_SECRET}"], "memory_mib": _MEMORY_MIB}
_SCRIPT = {"style": "stdin", "cases": [{"input": "3", "output": "6"}] * 3}
_WRONG, _TIMEOUT = (Outcome.WRONG,), (Outcome.TIMEOUT,)

# Program, tests, and the expected outcomes.
INNOCENT: Sequence[tuple[str, Mapping[str, Any], tuple[Outcome, ...]]] = (
  (
    "def f(n):\n  return sum(d for d in range(1, n) if n % d == 0)",
    {"style": "asserts", "tests": ["assert f(28) == 28", "assert f(9) == 4", "assert f(1) == 0"]},
    (Outcome.CORRECT,),
  ),
  (
    "def f(words):\n  return sorted(words, key=len)[-1]",
    {"style": "function", "entry_point": "f",
     "cases": [{"input": [["a", "abc"]], "output": "abc"}, {"input": [["x"]], "output": "x"}]},
    (Outcome.CORRECT,),
  ),
  ("print(2 * int(input()))", _SCRIPT, (Outcome.CORRECT,)),
  ("print(int(input()) + 2)", _SCRIPT, _WRONG),
  (
    "from collections import Counter\ndef f(text):\n  return Counter(text).most_common(1)[0][0]",
    {"style": "check", "entry_point": "f",
     "test": "def check(c):\n  assert c('abca') == 'a'\n  assert c('zz') == 'z'"},
    (Outcome.CORRECT,),
  ),
  (
    "def f(n):\n  return n * n",
    {"style": "asserts", "tests": ["assert f(3) == 9", "assert f(2) == 8"]},
    _WRONG,
  ),
)  # fmt: skip

# Programs that use all of their limit come first: the rate of a section includes the wait for its
# last program, which does not matter in a stream of programs.
HOSTILE: Mapping[str, tuple[str, Mapping[str, Any], tuple[Outcome, ...]]] = {
  "loop": ("def f(x):\n  while True: pass", _ASSERT, _TIMEOUT),
  "sleeps": ("import time\ntime.sleep(10**6)", _ASSERT, _TIMEOUT),
  "deadlock": (
    "import threading\ndef f(x):\n  lock = threading.Lock()\n  with lock: lock.acquire()",
    _ASSERT, _TIMEOUT,
  ),
  "waits for no one": ("import queue\ndef f(x): return queue.Queue().get()", _ASSERT, _TIMEOUT),
  "memory": ("def f(x): return [bytearray(2**28) for _ in range(100)]", _ASSERT, _WRONG),
  "recursion": ("def f(x): return f(x + 1)", _ASSERT, _WRONG),
  "recursion in C": (
    "import sys\nsys.setrecursionlimit(10**9)\n"
    "class A:\n  def __repr__(self): return repr(self)\ndef f(x): return repr(A())",
    _ASSERT, _WRONG,
  ),
  "output": ("while True: print('x' * 2**16)", _SCRIPT, _WRONG),
  "long answer": ("def f(x): return 'x' * 2**25", _ASSERT, _WRONG),
  "files": (
    "import itertools\ndef f(x):\n  for i in itertools.count():\n"
    "    open(f'/tmp/{i}', 'wb').write(bytes(2**23))",
    _ASSERT, _WRONG,
  ),
  "memory of many": (
    "import os, time\ndef f(x):\n  for _ in range(25):\n    if not os.fork():\n"
    "      b = b'x' * 2**28\n      time.sleep(60)\n  time.sleep(60)",
    _ASSERT, _WRONG,
  ),
  "kills everyone": ("import os\nos.kill(-1, 9)", _ASSERT, _WRONG),
  "equal to all": (
    "class L:\n  def __eq__(s, o): return True\n  __hash__ = None\ndef f(x): return L()",
    _ASSERT, _WRONG,
  ),
  "nested source": ("f = " + "(" * 10**5 + ")" * 10**5, _ASSERT, _WRONG),
  "compiled bomb": ("f = lambda x: (1 << 34,) * 2**30", _ASSERT, _WRONG),
  "shared memory": (
    "def f(x): open('/dev/shm/x', 'wb').write(bytes(2**26))", _ASSERT, _WRONG,
  ),
  "verdict on every descriptor": (
    "import json, os\nv = json.dumps({'passed': 1, 'total': 1, 'failure': ''}).encode()\n"
    "for n in range(1000):\n  try: os.write(n, len(v).to_bytes(8, 'big') + v)\n"
    "  except OSError: pass\ndef f(x): return x",
    _ASSERT, _WRONG,
  ),
  "limits of the judge": (
    "import resource\nfor k in range(16):\n  try: resource.prlimit(1, k, (0, 0))\n"
    "  except (OSError, ValueError): pass\ndef f(x): return x",
    _ASSERT, _WRONG,
  ),
  "exits early": ("import os\nos._exit(0)", _ASSERT, _WRONG),
  "threads": (
    "import threading, time\ndef f(x):\n  while True:\n"
    "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    _ASSERT, _WRONG,
  ),
}  # fmt: skip


class Item(NamedTuple):
  """A program of a section."""

  program: str
  tests: Mapping[str, Any]
  expected: tuple[Outcome, ...]
  is_hostile: bool


def items(section: str, size: int) -> list[Item]:
  """The programs of a section."""
  hostile = list(HOSTILE.values())
  section_items = []
  for i in range(size):
    # At changing places, since each process of environments has every n-th dialogue.
    place = -(i // _EVERY) % _EVERY
    is_hostile = section == "mixed" and i % _EVERY == place
    program, tests, expected = (
      hostile[i // _EVERY % len(hostile)] if is_hostile else INNOCENT[i % len(INNOCENT)]
    )
    tests = {**tests, "time_limit_s": _LIMIT_S.value}
    section_items.append(Item(f"{program}\n# {i}", tests, expected, is_hostile))
  return section_items


Run = Callable[[Sequence[Item]], list[str]]  # from programs to those with unexpected results


def grade(graders: GraderPool, programs: Sequence[Item]) -> list[str]:
  """Grades programs; returns those with unexpected grades."""
  grades = graders.grade([item.program for item in programs], [item.tests for item in programs])
  return [
    f"{item.program}: {grade.outcome} ({grade.detail})"
    for item, grade in zip(programs, grades, strict=True)
    if grade.outcome not in item.expected
  ]


def play(environments: EnvironmentPool, programs: Sequence[Item]) -> list[str]:
  """Has each program, with its tests, run as the turn of a dialogue; returns unexpected replies."""
  problem = {"question": "", "answer": "", "reference": {}}
  started = [reset.result() for reset in [environments.reset(problem, 0) for _ in programs]]
  steps = [
    environments.step(begun.dialogue, f"```python\n{item.program}\n{_call(item.tests)}\n```")
    for item, begun in zip(programs, started, strict=True)
    if isinstance(begun, Started)  # as all have, or `strict` raises below
  ]
  replies = [step.result() for step in steps]
  for begun in started:
    environments.close_dialogue(begun.dialogue)
  return [
    f"{item.program}: {reply}"
    for item, reply in zip(programs, replies, strict=True)
    if not _is_expected(item, reply)
  ]


def _call(tests: Mapping[str, Any]) -> str:
  """Code that tests a program; one that reads its input finds none."""
  match tests["style"]:
    case "asserts":
      return "\n".join(tests["tests"])
    case "function":
      name, cases = tests["entry_point"], tests["cases"]
      return "\n".join(f"assert {name}(*{case['input']}) == {case['output']!r}" for case in cases)
    case "check":
      return f"{tests['test']}\ncheck({tests['entry_point']})"
  return ""


def _is_expected(item: Item, reply: Turn | Failure) -> bool:
  """Whether an innocent program has its reply, and a hostile one is not the environment's fault."""
  if item.is_hostile:
    return not isinstance(reply, Failure) or reply.kind != "failed"
  fails = item.expected == _WRONG or item.tests["style"] == "stdin"
  return isinstance(reply, Turn) and ("Error" in reply.reply) == fails


def measure(run: Run, section: str, size: int) -> tuple[Row, list[str]]:
  """Runs a section; returns its rate, and the programs with unexpected results."""
  programs = items(section, size)
  start = time.perf_counter()
  unexpected = run(programs)
  seconds = time.perf_counter() - start
  row: Row = {"section": section, "items": len(programs), "seconds": seconds}
  return row | {"items/s": len(programs) / seconds}, unexpected


def open_pool(stack: contextlib.ExitStack, workers: int) -> Run:
  """Starts what runs the programs."""
  if _BY.value == "grader":
    return functools.partial(grade, stack.enter_context(GraderPool("code", num_workers=workers)))
  name = f"python(limit_s={_LIMIT_S.value}, memory_mib={_MEMORY_MIB})"
  deadline_s = 30.0 + _LIMIT_S.value
  environments = EnvironmentPool(name, processes=workers, deadline_s=deadline_s, memory_mib=2048)
  return functools.partial(play, stack.enter_context(environments))


def main(argv: list[str]) -> None:
  del argv
  workers = _WORKERS.value or default_workers()
  rows = []
  unexpected = []
  with contextlib.ExitStack() as stack:
    run = open_pool(stack, workers)
    for number in range(_ROUNDS.value + 1):
      size = _ITEMS.value if number else 100
      (alone, few), (mixed, more) = (
        measure(run, section, size) for section in ("innocent", "mixed")
      )
      unexpected += few + more
      if number:
        mixed["ratio of rates"] = mixed["items/s"] / alone["items/s"]
        rows += [{"round": number, **alone}, {"round": number, **mixed}]
  conditions = {"hardware": hardware(), "python": sys.version.split()[0], "workers": workers}
  conditions |= {"limit": f"{_LIMIT_S.value:g} s", "load": f"{os.getloadavg()[0]:.1f}"}
  ratios = [row["ratio of rates"] for row in rows if "ratio of rates" in row]
  conditions["median ratio"] = f"{statistics.median(ratios):.2f}"
  command = " ".join(["python experiments/benchmarks/hostile_mix.py", *sys.argv[1:]])
  conditions |= {"command": command}
  name = "hostile_mix" if _BY.value == "grader" else f"hostile_mix_{_BY.value}"
  path = pathlib.Path(_FOLDER.value) / name
  print(write_results(path, "Hostile programs among innocent ones", rows, conditions))
  if unexpected:
    sys.exit("without the expected result:\n" + "\n".join(unexpected))


if __name__ == "__main__":
  app.run(main)
