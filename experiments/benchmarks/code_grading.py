"""Grades the published reference solutions of MBPP and HumanEval, and corrupted copies of them.

  python experiments/benchmarks/code_grading.py --data=FOLDER
  python experiments/benchmarks/code_grading.py --data=FOLDER --workers=1 --sample=100

FOLDER contains mbpp/mbpp.jsonl and humaneval/HumanEval.jsonl.gz as published. With the default
limits every reference must be graded correct and every corrupted copy wrong, or the program ends
with an error. Rates are those of the pool with the given number of workers, from submission to the
last grade, divided by the available cores. The table is printed and written to
results/code_grading.md, its numbers to a .json file next to it. The load is the mean number of
processes that ran or waited in the minute before the start; unless it is near 0, other processes
used some of the cores, and rates are too low.
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from absl import app, flags

from experiments.benchmarks.tables import Row, hardware, write_results
from rlvr_jax.codejudge import tasks
from rlvr_jax.rewards import GraderPool, Outcome

_DATA = flags.DEFINE_string("data", None, "Folder of the data sets.", required=True)
_WORKERS = flags.DEFINE_integer("workers", os.cpu_count(), "Grading processes.", lower_bound=1)
_SAMPLE = flags.DEFINE_integer("sample", None, "Problems of each set; default all.", lower_bound=1)
_FOLDER = flags.DEFINE_string(
  "results_folder", str(pathlib.Path(__file__).parent / "results"), "Folder for the table."
)
GRADER = "code"

_WRONG = """

def _wrong_value(value):
  if value is None:
    return 0
  if isinstance(value, bool):
    return not value
  if isinstance(value, (int, float, complex)):
    return value + 1 if value + 1 != value else 0
  if isinstance(value, (str, list, tuple, bytes)):
    return value + type(value)("x" if isinstance(value, str) else [120])
  if isinstance(value, (dict, set, frozenset)):
    return type(value)() if value else type(value)([("x", "x")])
  return "wrong"

def _wrongly(function):
  return lambda *args, **kwargs: _wrong_value(function(*args, **kwargs))

{name} = _wrongly({name})
"""


class Problem(NamedTuple):
  """A published problem: its solution, the name of its function, and the grader's reference."""

  name: str
  solution: str
  function: str
  reference: Mapping[str, Any]


def read_mbpp(path: pathlib.Path) -> list[Problem]:
  """Reads the problems of MBPP's JSON lines."""
  return [_make_mbpp_problem(json.loads(line)) for line in path.read_text().splitlines()]


def _make_mbpp_problem(row: Mapping[str, Any]) -> Problem:
  tests = [*row["test_list"], *row["challenge_test_list"]]
  functions = re.findall(r"^def\s+(\w+)", row["code"], re.M)
  (function,) = set(functions) & set(tasks.names_used(tuple(tests))[0])
  reference = {"style": "asserts", "tests": tests, "setup": row["test_setup_code"]}
  return Problem(f"MBPP/{row['task_id']}", row["code"], function, reference)


def read_humaneval(path: pathlib.Path) -> list[Problem]:
  """Reads the problems of HumanEval's compressed JSON lines."""
  with gzip.open(path, "rt") as lines:
    return [_make_humaneval_problem(json.loads(line)) for line in lines]


def _make_humaneval_problem(row: Mapping[str, Any]) -> Problem:
  entry = row["entry_point"]
  prompt = row["prompt"]
  reference = {"style": "check", "entry_point": entry, "test": row["test"], "prompt": prompt}
  return Problem(row["task_id"], row["canonical_solution"], entry, reference)


def corrupt(problem: Problem) -> str:
  """Returns the solution with every returned value of its function replaced by another value."""
  start = problem.reference.get("prompt", "")
  return start + problem.solution + _WRONG.format(name=problem.function)


def choose_spread(problems: Sequence[Problem], size: int | None) -> list[Problem]:
  """Chooses `size` evenly spread problems; None for all."""
  size = len(problems) if size is None else min(size, len(problems))
  return [problems[index * len(problems) // size] for index in range(size)]


def load(folder: pathlib.Path) -> dict[str, list[Problem]]:
  """Loads the data sets that a folder contains."""
  return {
    "MBPP": read_mbpp(folder / "mbpp" / "mbpp.jsonl"),
    "HumanEval": read_humaneval(folder / "humaneval" / "HumanEval.jsonl.gz"),
  }


def measure(
  pool: GraderPool, texts: Sequence[str], problems: Sequence[Problem], cores: int
) -> tuple[Row, list[str]]:
  """Grades the texts; returns counts, the rate, and the grades by problem."""
  start = time.perf_counter()
  grades = pool.grade(texts, [problem.reference for problem in problems])
  seconds = time.perf_counter() - start
  outcomes = [grade.outcome for grade in grades]
  row = {"items": len(texts)}
  row |= {"correct": outcomes.count(Outcome.CORRECT), "wrong": outcomes.count(Outcome.WRONG)}
  row |= {"seconds": seconds, "items/s": len(texts) / seconds}
  row |= {"items/s per core": len(texts) / seconds / cores}
  pairs = zip(problems, grades, strict=True)
  return row, [f"{problem.name}: {grade.outcome} ({grade.detail})" for problem, grade in pairs]


def main(argv: list[str]) -> None:
  del argv
  cores = min(_WORKERS.value, len(os.sched_getaffinity(0)))
  load_average = os.getloadavg()[0]
  rows = []
  unexpected = []
  with GraderPool(GRADER, num_workers=_WORKERS.value) as pool:
    for name, problems in load(pathlib.Path(_DATA.value)).items():
      problems = choose_spread(problems, _SAMPLE.value)
      solutions = [problem.solution for problem in problems]
      for kind, texts in (("reference", solutions), ("corrupted", list(map(corrupt, problems)))):
        row, grades = measure(pool, texts, problems, cores)
        rows.append({"set": name, "solutions": kind} | row)
        expected = Outcome.CORRECT if kind == "reference" else Outcome.WRONG
        unexpected += [f"{kind} {text}" for text in grades if f": {expected} (" not in text]
  conditions = {"hardware": hardware(), "python": sys.version.split()[0], "workers": _WORKERS.value}
  conditions |= {
    "load": round(load_average, 1),
    "limit": f"{tasks.TIME_LIMIT_S:g} s of processor time",
  }
  arguments = " ".join(sys.argv[1:]).replace(_DATA.value, "FOLDER")
  conditions["command"] = f"python experiments/benchmarks/code_grading.py {arguments}"
  path = pathlib.Path(_FOLDER.value) / "code_grading"
  print(write_results(path, "Grading programs in the sandbox", rows, conditions))
  if unexpected:
    sys.exit("not graded as they should be:\n" + "\n".join(unexpected))


if __name__ == "__main__":
  app.run(main)
