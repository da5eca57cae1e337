"""Tasks from a user's own files: lines of JSON, one problem each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.published.files import PublishedFiles
from rlvr_jax.data.published.rows import Row
from rlvr_jax.data.sources import Chosen, QuestionKeys, question_key
from rlvr_jax.data.task_utils import check_available, fill_template, warn_of_common_answer
from rlvr_jax.ops.checks import check_integer

NAME = "jsonl"


def jsonl(
  *,
  train: str | os.PathLike[str],
  grader: str,
  held_out: str | os.PathLike[str] = "",
  held_out_size: int = 0,
  split_seed: int = 0,
  warm_start_size: int = 0,
  prompt: str = "{prompt}",
  answer: str = "answer",
  solution: str = "",
) -> Task:
  """Makes a task of a user's own files. A grader finds all fields of a line in its reference.

  Held-out problems come from a file of their own, or are split off `train`: those whose questions
  have the smallest hashes, so that their order in the file does not matter. No line with a held-out
  question is trained on, whatever its white space.

  Args:
    train: file or folder of .jsonl, .json or .parquet, .gz included; local, or a URL that fsspec
      supports: gs://BUCKET/FILE (extra gcs), hf://datasets/OWNER/NAME/FILE (extra hf).
    grader: its string, such as "mathematics" or "my_module:function(keyword=1)".
    held_out: likewise, of the held-out problems; "" to split them off `train`.
    held_out_size: problems; 0 takes all of the file `held_out`.
    split_seed: seed of the choice of held-out problems.
    warm_start_size: problems with demonstrations, the first of `train`; needs `solution`. They are
      taken away from those to train on.
    prompt: template of the policy's prompt over the fields of a line, "Q: {question}\\nA:".
    answer: the field that becomes the reference's "answer"; "" where the grader needs none.
    solution: template of a demonstration over the fields of a line; "" for none.
  Raises:
    OSError: a file is missing or cannot be read.
    ValueError: a line is not a JSON object or lacks a field (the message names file and line), a
      size is out of range, or nothing is left to train on.
  """
  check_integer("jsonl", "warm_start_size", warm_start_size, low=0)
  check_integer("jsonl", "held_out_size", held_out_size, low=0 if held_out else 1)
  if warm_start_size and not solution:
    raise ValueError(
      f"warm_start_size is {warm_start_size}, but there are no demonstrations: set solution to a"
      " template over the fields of a line, such as '{solution}', or warm_start_size to 0"
    )
  given = [_problem(row, prompt, answer, solution) for row in _rows(train)]
  rows = _rows(held_out) if held_out else []
  own = [_problem(row, prompt, answer, "") for row in rows]
  chosen = _held_out(given, own, held_out_size, split_seed)
  held_out_problems = Chosen.of(chosen)
  left = Chosen.of(given).without(QuestionKeys(held_out_problems.keys()))
  check_available("jsonl", "warm_start_size", warm_start_size, max(len(left) - 1, 0))
  problems = [left[index] for index in range(len(left))]
  if not problems:
    raise ValueError(f"all {len(given)} problems of {train} are held out; lower held_out_size")
  task = Task(
    name=NAME,
    train=Chosen.of(problems[warm_start_size:]),
    warm_start=Chosen.of(problems[:warm_start_size]),
    held_out=held_out_problems,
    grader=grader,
  )
  logging.info(
    "%s: %d training problems, %d warm-start problems, %d held-out problems",
    *(train, len(task.train), len(task.warm_start), len(task.held_out)),
  )
  return warn_of_common_answer(task)


def _rows(path: str | os.PathLike[str]) -> Iterator[Row]:
  files = PublishedFiles(path, own=True)
  paths = files.paths()
  return files.rows(paths)


def _problem(row: Row, prompt: str, answer: str, solution: str) -> Problem:
  """The problem of a line; its reference has every field of the line."""
  reference: dict[str, Any] = {"dataset": NAME, **row.fields}
  if answer:
    if answer not in row.fields:
      raise row.error(
        f"has no field {answer!r}, only {sorted(row.fields)}; set answer to the field with the"
        " reference answer, or to '' if the grader needs none"
      )
    reference["answer"] = row.fields[answer]
  question = _filled(row, "prompt", prompt)
  if not question.strip():
    raise row.error(f"has an empty prompt ({prompt!r})")
  text = reference.get("answer", "") if answer else ""
  return Problem(
    question=question,
    answer=text if isinstance(text, str) else str(text),
    solution=_filled(row, "solution", solution),
    reference=reference,
    where=row.where,
  )


def _filled(row: Row, what: str, template: str) -> str:
  try:
    return fill_template(what, template, row.fields)
  except ValueError as error:
    raise row.error(f"does not fit: {error}") from error


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
  """The first problem of every question."""
  first: dict[str, Problem] = {}
  for problem in problems:
    first.setdefault(question_key(problem.question), problem)
  return list(first.values())


def _held_out(
  train: Sequence[Problem], own: Sequence[Problem], size: int, seed: int
) -> list[Problem]:
  """The held-out problems: of their own file if it has any, or else split off `train`."""
  if own:
    distinct = _distinct(own)
    check_available("jsonl", "held_out_size", size, len(distinct))
    return distinct[: size or len(distinct)]
  distinct = _distinct(train)
  check_available("jsonl", "held_out_size", size, len(distinct) - 1)

  def digest(problem: Problem) -> str:
    return hashlib.sha256(f"{seed} {question_key(problem.question)}".encode()).hexdigest()

  return sorted(distinct, key=digest)[:size]
