"""Tasks by name: `getattr(tasks, name)(**kwargs)` gives a `Task`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from absl import logging

from rlvr_jax.data import worked_solutions
from rlvr_jax.data.problems import Problem, Task

__all__ = ["gsm8k", "reasoning_gym"]

STEPS = "steps"  # the `solution` that stands for the dataset's step-by-step writer
_MAX_DRAWS = 1000  # tries to find a question that is not taken; enough unless there is none
_COMMON_ANSWER_SHARE = 0.1
# reasoning-gym 0.1.25 draws these by iterating over sets of strings.
_HASH_SEED_DEPENDENT = (
  "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder",
)  # fmt: skip
_CALCULATOR_MARK = re.compile(r"<<[^>]*>>")


def reasoning_gym(
  *,
  dataset: str,
  settings: Mapping[str, Any] | None = None,
  train_size: int,
  warm_start_size: int,
  held_out_size: int,
  train_seed: int,
  warm_start_seed: int,
  held_out_seed: int,
  prompt: str = "{question}",
  solution: str = "{answer}",
) -> Task:
  """Problems of one reasoning-gym dataset, generated when they are asked for.

  The dataset draws problem i of seed s from a generator seeded with s + i. A draw whose prompt is a
  held-out one is replaced by draw i + size, i + 2·size, ... of the same seed; the held-out prompts
  and the warm-start prompts are all different among themselves.

  Args:
    dataset: its name, such as "chain_sum".
    settings: fields of its configuration, except seed and size.
    train_size: problems in an epoch of training; they cost nothing until drawn.
    warm_start_size: problems with worked solutions; may be 0.
    held_out_size: problems for evaluation.
    train_seed: generator seed; the held-out one must differ from both others.
    warm_start_seed: likewise.
    held_out_seed: likewise.
    prompt: template over {question} and the fields of the entry's metadata, e.g. "{expression}=".
    solution: template over the same and {answer}, or "steps" for the step-by-step text of
      `worked_solutions`. The grader reads what follows the last "####", or else everything.
  Raises:
    ValueError: an unknown dataset, setting or template field, equal seeds, sizes out of range, or
      too few distinct questions for the sizes.
  """
  settings = dict(settings or {})
  _check_seeds(train_seed, warm_start_seed, held_out_seed)
  _check_size("train_size", train_size, minimum=1)
  _check_size("warm_start_size", warm_start_size, minimum=0)
  _check_size("held_out_size", held_out_size, minimum=1)
  _check_dataset(dataset, settings)
  write_solution = _solution_writer(dataset, solution)

  def draws(seed: int, size: int) -> _Draws:
    entries = _create_dataset(dataset, settings, seed=seed, size=size)
    what = f"reasoning_gym dataset {dataset!r} with settings {settings} and seed {seed}"
    return _Draws(lambda i: to_problem(entries[i]), size, what)

  def to_problem(entry: dict[str, Any]) -> Problem:
    answer = entry["answer"]
    return Problem(
      question=_fill("prompt", prompt, {**entry["metadata"], "question": entry["question"]}),
      answer=answer or "",
      solution="" if answer is None else write_solution(entry),
      reference={
        "dataset": dataset,
        "settings": settings,
        "answer": answer,
        "metadata": entry["metadata"],
      },
    )

  held_out = draws(held_out_seed, held_out_size).distinct()
  _check_reference(_create_dataset(dataset, settings, seed=0, size=1), held_out[0])
  held_out_questions = frozenset(problem.question for problem in held_out)
  warm_start: tuple[Problem, ...] = ()
  if warm_start_size:
    warm_start = draws(warm_start_seed, warm_start_size).distinct(held_out_questions)
  if any(not problem.solution for problem in warm_start):
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} gives no answers, so there are no worked solutions to "
      "train on: set warm_start_size to 0"
    )
  task = Task(
    name=dataset,
    train=_Excluding(draws(train_seed, train_size), held_out_questions),
    warm_start=warm_start,
    held_out=held_out,
    grader="rlvr_jax.rewards.graders:reasoning_gym",
  )
  return _warn_of_common_answer(task)


def gsm8k(
  *,
  data_dir: str | os.PathLike,
  prepared_dir: str | os.PathLike = "~/.cache/rlvr_jax/gsm8k",
  warm_start_size: int,
  held_out_size: int,
  prompt: str = "{question}\n",
) -> Task:
  """GSM8K (arXiv 2110.14168) from its published JSONL files.

  Warm start is the first `warm_start_size` problems of the training split with their published
  solutions (calculator marks <<...>> removed), train the rest of it, held-out the first
  `held_out_size` of the test split.

  Args:
    data_dir: holds train.jsonl and test.jsonl as published.
    prepared_dir: for the records prepared from them; made where it is missing.
    warm_start_size: problems; may be 0.
    held_out_size: problems.
    prompt: template over {question}.
  Raises:
    OSError: a file cannot be read or the prepared records cannot be written.
    ValueError: a file is not as published (names the file and the line), or sizes out of range.
  """
  _check_size("warm_start_size", warm_start_size, minimum=0)
  _check_size("held_out_size", held_out_size, minimum=1)
  # Imported here: tensorflow-datasets takes a while to import and other tasks do without.
  from rlvr_jax.data.gsm8k_jsonl import load_records

  records = load_records(data_dir, os.path.expanduser(prepared_dir))
  _check_size("held_out_size", held_out_size, maximum=len(records["test"]))
  held_out = _gsm8k_problems(records["test"][:held_out_size], prompt)
  held_out_questions = {problem.question for problem in held_out}
  problems = _gsm8k_problems(records["train"], prompt, excluded=held_out_questions)
  _check_size("warm_start_size", warm_start_size, maximum=len(problems) - 1)
  task = Task(
    name="gsm8k",
    train=problems[warm_start_size:],
    warm_start=problems[:warm_start_size],
    held_out=held_out,
    grader="rlvr_jax.rewards.graders:gsm8k",
  )
  return _warn_of_common_answer(task)


def _gsm8k_problems(
  records: Iterable[Mapping[str, str]], prompt: str, excluded: Collection[str] = ()
) -> tuple[Problem, ...]:
  problems = (_gsm8k_problem(record, prompt) for record in records)
  return tuple(problem for problem in problems if problem.question not in excluded)


def _gsm8k_problem(record: Mapping[str, str], prompt: str) -> Problem:
  answer = record["answer"].rpartition("####")[2].strip()
  return Problem(
    question=_fill("prompt", prompt, {"question": record["question"]}),
    answer=answer,
    solution=_CALCULATOR_MARK.sub("", record["answer"]).strip(),
    reference={"answer": answer},
  )


class _Draws:
  """Draws 0, 1, ... of one seed; draws i + k·size stand by to replace draw i."""

  def __init__(self, draw: Callable[[int], Problem], size: int, what: str):
    self._draw = draw
    self._what = what
    self.size = size

  def first_not_in(self, taken: Collection[str], index: int) -> Problem:
    """The first of draws index + k·size, k = 0, 1, ..., whose question is not taken."""
    for k in range(_MAX_DRAWS):
      try:
        problem = self._draw(index + k * self.size)
      except IndexError:  # some datasets have only `size` problems
        break
      if problem.question not in taken:
        return problem
    raise ValueError(
      f"no question left for problem {index} of {self.size}: {self._what} has too few distinct "
      f"ones ({len(taken)} are taken, tried {k + 1}). Lower the sizes or widen the settings."
    )

  def distinct(self, taken: Collection[str] = ()) -> tuple[Problem, ...]:
    """`size` problems whose questions all differ, from the taken ones too."""
    questions = set(taken)
    problems = []
    for index in range(self.size):
      problems.append(self.first_not_in(questions, index))
      questions.add(problems[-1].question)
    return tuple(problems)


class _Excluding:
  """Problems drawn on access, never one with an excluded question."""

  def __init__(self, draws: _Draws, excluded: frozenset[str]):
    self._draws = draws
    self._excluded = excluded

  def __len__(self) -> int:
    return self._draws.size

  def __getitem__(self, index: int) -> Problem:
    index = operator.index(index)
    if not 0 <= index < len(self):
      raise IndexError(f"index {index} is out of range for {len(self)} problems")
    return self._draws.first_not_in(self._excluded, index)


def _create_dataset(dataset: str, settings: Mapping[str, Any], *, seed: int, size: int):
  # Imported here: it takes a second, which a run on another task does not owe.
  from reasoning_gym.factory import create_dataset

  try:
    return create_dataset(dataset, **settings, seed=seed, size=size)
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} refuses settings {dict(settings)}: {error}"
    ) from error


def _check_dataset(dataset: str, settings: Mapping[str, Any]) -> None:
  from reasoning_gym.factory import DATASETS

  if dataset not in DATASETS:
    raise ValueError(
      f"unknown reasoning_gym dataset {dataset!r}; near names: {_near(dataset, DATASETS)}"
    )
  hash_seed = os.environ.get("PYTHONHASHSEED", "random")
  if dataset in _HASH_SEED_DEPENDENT and hash_seed == "random":
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} draws other problems in every process unless Python's "
      "hash seed is fixed, and a resumed run would not repeat itself: start with PYTHONHASHSEED=0 "
      "in the environment"
    )
  fields = {field.name for field in dataclasses.fields(DATASETS[dataset][1])} - {"seed", "size"}
  for name in settings:
    if name in ("seed", "size"):
      raise ValueError(f"settings has {name!r}: give it by train_{name}, held_out_{name}, ...")
    if name not in fields:
      raise ValueError(
        f"reasoning_gym dataset {dataset!r} has no setting {name!r}; near names: "
        f"{_near(name, fields)}; all: {sorted(fields)}"
      )


def _near(name: str, names: Iterable[str]) -> list[str]:
  return difflib.get_close_matches(name, sorted(names), n=5, cutoff=0.4)


def _solution_writer(dataset: str, solution: str) -> Callable[[dict[str, Any]], str]:
  if solution != STEPS:
    return lambda entry: _fill("solution", solution, {**entry["metadata"], **entry})
  if dataset not in worked_solutions.__all__:
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} has no step-by-step solutions; those that have: "
      f"{worked_solutions.__all__}. Give `solution` as a template such as '#### {{answer}}'."
    )
  return getattr(worked_solutions, dataset)


def _fill(what: str, template: str, fields: Mapping[str, Any]) -> str:
  """`template.format(**fields)`, with an error that lists the fields there are."""
  try:
    return template.format_map(fields)
  except (KeyError, ValueError, IndexError, AttributeError) as error:
    raise ValueError(
      f"{what} is {template!r}, a template whose fields may be {sorted(fields)}: "
      f"{type(error).__name__} {error}"
    ) from error


def _check_seeds(train_seed: int, warm_start_seed: int, held_out_seed: int) -> None:
  if held_out_seed in (train_seed, warm_start_seed):
    raise ValueError(
      f"held_out_seed is {held_out_seed}, train_seed {train_seed} and warm_start_seed "
      f"{warm_start_seed}: the held-out one must differ from both others"
    )


def _check_size(name: str, size: int, *, minimum: int = 0, maximum: int | None = None) -> None:
  if size < minimum:
    raise ValueError(f"{name} is {size}, must be at least {minimum}")
  if maximum is not None and size > maximum:
    raise ValueError(f"{name} is {size}, but there are only {maximum} problems to take it from")


def _check_reference(entries: Any, problem: Problem) -> None:
  """Raises unless the reference survives the way to the grader: as JSON, and still scoring 1."""
  dataset, answer = problem.reference["dataset"], problem.reference["answer"]
  try:
    reference = json.loads(json.dumps(problem.reference))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} cannot be graded in another process, its metadata are "
      f"not JSON-able: {error}"
    ) from error
  if answer is None:
    return  # the dataset accepts many answers and names none
  score = entries.score_answer(answer, reference)
  if score < 1 - 1e-9:
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} cannot be graded in another process: its own answer "
      f"{answer!r} scores {score:g} once its metadata have gone through JSON. Use another dataset."
    )


def _warn_of_common_answer(task: Task) -> Task:
  share = task.most_common_answer_share()
  if share > _COMMON_ANSWER_SHARE:
    logging.warning(
      "task %s: one answer is right for %.0f %% of the held-out problems; a policy that always "
      "gives it scores that much", task.name, 100 * share,
    )  # fmt: skip
  return task
