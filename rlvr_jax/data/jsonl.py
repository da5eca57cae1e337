"""Tasks from a user's own files of JSON lines, one problem per line."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.published.files import PublishedFiles
from rlvr_jax.data.published.rows import Row
from rlvr_jax.data.sources import Chosen, QuestionKeys, question_key
from rlvr_jax.data.task_utils import (
  as_text,
  check_available,
  fill_template,
  find_field,
  warn_of_common_answer,
)
from rlvr_jax.data.tokenizer import check_messages, join_messages
from rlvr_jax.ops.checks import check_integer

NAME = "jsonl"
_ONE_FIELD = re.compile(r"\{([^{}:!]+)\}")  # a template that is nothing else


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
  """Makes a task from a user's own files; a problem's reference has all fields of its line.

  Held-out problems come from a separate file, or are split off `train`. The problems whose
  questions have the smallest hashes are split off, so the order in the file does not matter. No
  line with a held-out question is trained on; differences in white space are ignored.

  Args:
    train: file or folder of .jsonl, .ndjson or .json, each also with .gz, or of .parquet; a local
      path, or a URL that fsspec supports: gs://BUCKET/FILE (extra gcs),
      hf://datasets/OWNER/NAME/FILE (extra hf).
    grader: spec of the grader, such as "mathematics" or "my_module:function(keyword=1)".
    held_out: file or folder of the held-out problems; "" to split them off `train`.
    held_out_size: number of held-out problems; 0 for all in `held_out`.
    split_seed: seed of the choice of held-out problems.
    warm_start_size: number of demonstrations, made of the first lines of `train` that are not held
      out; needs `solution`. The other lines that are not held out are trained on.
    prompt: template of the policy's prompt over the fields of a line, such as "Q: {question}\\nA:".
      If the template is a single field with a list of messages, {"role": …, "content": …}, the
      messages are the prompt.
    answer: field that becomes the reference's "answer"; "" if the grader needs none.
    solution: template of a demonstration over the fields of a line; "" for none. In `prompt`,
      `answer` and `solution`, a dot names a nested field: "reward_model.ground_truth".
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
  train_problems = [_make_problem(row, prompt, answer, solution) for row in _read_rows(train)]
  held_out_rows = _read_rows(held_out) if held_out else []
  separate_problems = [_make_problem(row, prompt, answer, "") for row in held_out_rows]
  held_out_problems = Chosen.of(
    _choose_held_out(train_problems, separate_problems, held_out_size, split_seed)
  )
  remaining = Chosen.of(train_problems).without(QuestionKeys(held_out_problems.keys()))
  check_available("jsonl", "warm_start_size", warm_start_size, max(len(remaining) - 1, 0))
  problems = [remaining[index] for index in range(len(remaining))]
  if not problems:
    raise ValueError(
      f"all {len(train_problems)} problems of {train} are held out; lower held_out_size"
    )
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


def _read_rows(path: str | os.PathLike[str]) -> Iterator[Row]:
  files = PublishedFiles(path, user_written=True)
  paths = files.paths()
  return files.rows(paths)


def _make_problem(row: Row, prompt: str, answer: str, solution: str) -> Problem:
  """Makes the problem of a line; its reference has every field of the line."""
  reference: dict[str, Any] = {**row.fields}
  text = ""
  if answer:
    remedy = "set answer to the field with the reference answer, or to '' if the grader needs none"
    try:
      reference["answer"] = find_field(row.fields, answer)
      text = row.check_text(answer, as_text(answer, reference["answer"]))
    except KeyError as error:
      raise row.error(f"has no field {error}, only {sorted(row.fields)}; {remedy}") from error
    except TypeError as error:
      raise row.error(f"does not fit: {error}; {remedy}") from error
  messages = _read_messages(row, prompt)
  question = join_messages(messages) if messages else _fill_from_row(row, "prompt", prompt)
  if not row.check_text("the prompt", question).strip():
    raise row.error(f"has an empty prompt; the template is prompt = {prompt!r}")
  return Problem(
    question=question,
    answer=text,
    solution=_fill_from_row(row, "solution", solution),
    reference=reference,
    where=row.where,
    messages=messages,
  )


def _read_messages(row: Row, prompt: str) -> tuple[Mapping[str, str], ...]:
  """The prompt's messages if the template `prompt` is one field whose value is a list, else ()."""
  name = _ONE_FIELD.fullmatch(prompt)
  try:
    value = find_field(row.fields, name.group(1)) if name else ""
  except KeyError:  # told with the template
    value = ""
  if not isinstance(value, list):
    return ()
  try:
    check_messages(value)
  except ValueError as error:
    raise row.error(f"does not fit prompt = {prompt!r}: {error}") from error
  return tuple({"role": m["role"], "content": m["content"]} for m in value)


def _fill_from_row(row: Row, what: str, template: str) -> str:
  try:
    text = fill_template(what, template, row.fields)
  except ValueError as error:
    raise row.error(f"does not fit: {error}") from error
  return row.check_text(f"the {what}", text)


def _drop_repeats(problems: Sequence[Problem]) -> list[Problem]:
  """Returns the first problem of every question."""
  first_by_key: dict[str, Problem] = {}
  for problem in problems:
    first_by_key.setdefault(question_key(problem.question), problem)
  return list(first_by_key.values())


def _choose_held_out(
  train: Sequence[Problem], separate: Sequence[Problem], size: int, seed: int
) -> list[Problem]:
  """Chooses the held-out problems: from `separate` if it has any, else by hash from `train`."""
  if separate:
    distinct = _drop_repeats(separate)
    check_available("jsonl", "held_out_size", size, len(distinct))
    return distinct[: size or len(distinct)]
  distinct = _drop_repeats(train)
  if len(distinct) == 1 < len(train):
    raise ValueError(
      f"jsonl: all {len(train)} lines have the same prompt, {distinct[0].question[:80]!r}, so none"
      " can be held out; put a field that differs between lines into the template `prompt`"
    )
  check_available("jsonl", "held_out_size", size, len(distinct) - 1)

  def digest(problem: Problem) -> str:
    return hashlib.sha256(f"{seed} {question_key(problem.question)}".encode()).hexdigest()

  return sorted(distinct, key=digest)[:size]
