"""Grades mathematics, with and without hostile completions.

  python experiments/benchmarks/math_grading.py
  python experiments/benchmarks/math_grading.py --workers=1 --sections=innocent,bombs

Each section grades --items completions in a separate pool, after a few for warm-up: `innocent` has
numbers, formulas, lists and words; in `bombs` one of 20 is a formula that takes hours to expand;
in `endless` one of 20 keeps its grader busy indefinitely, so that its worker is replaced. Innocent
completions must be graded correct, bombs wrong or timeout, and endless ones timeout, or the program
ends with an error. Rates are from submission to the last grade. The table is printed and written to
results/math_grading.md, its numbers to the .json file next to it.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from absl import app, flags

from experiments.benchmarks import slow_grader
from experiments.benchmarks.tables import Row, hardware, write_results
from rlvr_jax.rewards import Grade, GraderPool, Outcome
from rlvr_jax.workers.pool import default_workers

_SECTIONS = flags.DEFINE_list("sections", ["innocent", "bombs", "endless"], "Sections to run.")
_ITEMS = flags.DEFINE_integer("items", 1000, "Completions of a section.", lower_bound=100)
_WORKERS = flags.DEFINE_integer("workers", None, "Processes; default a run's.", lower_bound=1)
_LIMIT_S = flags.DEFINE_float("timeout_s", 5.0, "Limit of a completion, seconds.", lower_bound=0.1)
_FOLDER = flags.DEFINE_string(
  "results_folder", str(pathlib.Path(__file__).parent / "results"), "Folder for the table."
)
_EVERY = 20  # one of this many items is hostile

# A gold answer and another way to write it; the number makes every item different.
_INNOCENT = (
  ("{n}", "{n}.0"),
  (r"\frac{{{n}}}{{7}}", "{n}/7"),
  (r"{n}\sqrt{{2}}", r"\sqrt{{2}}\cdot {n}"),
  ("x^2+{n}x", "x(x+{n})"),
  ("(-\\infty,{n})", "x<{n}"),
  ("{n},-1", "-1, {n}"),
  (r"\text{{Monday}}", "monday"),
  (r"\frac{{\pi}}{{{n}}}", r"\pi/{n}"),
)
_BOMBS = (
  "(9^{9999})^{9999}=5",
  r"2^{\binom{9999}{5000}}",
  "(x+y+z+w)^{99}",
  r"\sqrt{1+" * 40 + "x" + "}" * 40,
  r"\sin(" * 20 + "x" + ")" * 20,
  r"\cup".join(f"({i},{i + 1}]" for i in range(0, 180, 3)),
)


def items(section: str, size: int) -> list[tuple[str, str, tuple[Outcome, ...]]]:
  """Completions, gold answers and expected outcomes."""
  section_items = []
  for i in range(size):
    gold, answer = (text.format(n=i + 8) for text in _INNOCENT[i % len(_INNOCENT)])
    item = (rf"So it is $\boxed{{{answer}}}$.", gold, (Outcome.CORRECT,))
    if i % _EVERY == _EVERY - 1 and section == "bombs":
      bomb = _BOMBS[i // _EVERY % len(_BOMBS)]
      item = (rf"\boxed{{{bomb}}}", "x^2+5", (Outcome.WRONG, Outcome.TIMEOUT))
    elif i % _EVERY == _EVERY - 1 and section == "endless":
      item = (slow_grader.ENDLESS, gold, (Outcome.TIMEOUT,))
    section_items.append(item)
  return section_items


def measure(section: str, workers: int) -> tuple[Row, list[str]]:
  """Grades a section; returns counts, the rate, and the items with unexpected grades."""
  warm_up_items = items("innocent", 8 * workers)
  section_items = items(section, _ITEMS.value)
  settings = dict(num_workers=workers, timeout_s=_LIMIT_S.value, memory_mib=2048)
  with GraderPool(f"{slow_grader.__name__}:mathematics", **settings) as graders:
    _grade(graders, warm_up_items)
    start = time.perf_counter()
    grades = _grade(graders, section_items)
    seconds = time.perf_counter() - start
  row: Row = {"section": section, "items": len(section_items)}
  row |= {"timeouts": sum(g.outcome is Outcome.TIMEOUT for g in grades)}
  row |= {"seconds": seconds, "items/s": len(section_items) / seconds}
  unexpected = [
    f"{text}: {grade.outcome} ({grade.detail})"
    for (text, _, expected), grade in zip(section_items, grades, strict=True)
    if grade.outcome not in expected
  ]
  return row, unexpected


def _grade(graders: GraderPool, section_items: Sequence[tuple[str, str, Any]]) -> list[Grade]:
  texts = [text for text, *_ in section_items]
  return graders.grade(texts, [{"answer": gold} for _, gold, _ in section_items])


def main(argv: list[str]) -> None:
  del argv
  workers = _WORKERS.value or default_workers()
  rows = []
  unexpected = []
  for section in _SECTIONS.value:
    row, unexpected_items = measure(section, workers)
    rows.append(row)
    unexpected += unexpected_items
  conditions = {"hardware": hardware(), "python": sys.version.split()[0], "workers": workers}
  conditions |= {"limit": f"{_LIMIT_S.value:g} s", "load": f"{os.getloadavg()[0]:.1f}"}
  command = " ".join(["python experiments/benchmarks/math_grading.py", *sys.argv[1:]])
  conditions |= {"command": command}
  path = pathlib.Path(_FOLDER.value) / "math_grading"
  print(write_results(path, "Grading mathematics", rows, conditions))
  if unexpected:
    sys.exit("not graded as they should be:\n" + "\n".join(unexpected))


if __name__ == "__main__":
  app.run(main)
