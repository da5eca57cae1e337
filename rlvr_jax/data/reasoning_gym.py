"""Tasks of reasoning-gym problems, generated on access."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from absl import logging

from rlvr_jax.data import demonstrations
from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.seeded import make_task
from rlvr_jax.data.sources import Candidates
from rlvr_jax.data.task_utils import fill_template

STEPS = "steps"  # `solution` that selects the dataset's step-by-step solutions
# reasoning-gym 0.1.25 generates these by iterating over sets of strings.
_HASH_SEED_DEPENDENT = (
  "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder",
)  # fmt: skip

# One answer is right for every problem: puzzle24 takes any four numbers that give 24.
TAKES_ONE_ANSWER = ("puzzle24",)


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
  """Makes a task from one reasoning-gym dataset, whose problems are generated on access.

  The dataset generates problem i of seed s with a generator seeded with s + i. If the prompt of
  problem i is held out, another problem of the same seed replaces problem i: the first of the
  problems i + size, i + 2·size, ... whose prompt is not held out. All held-out prompts differ, and
  so do all warm-start prompts.

  Args:
    dataset: name, such as "chain_sum".
    settings: fields of the dataset's configuration, except seed and size.
    train_size: problems in an epoch of training; they cost nothing until they are generated.
    warm_start_size: problems with demonstrations; may be 0.
    held_out_size: problems for evaluation.
    train_seed: seed of the training problems.
    warm_start_seed: seed of the warm-start problems.
    held_out_seed: seed of the held-out problems; must differ from the other two.
    prompt: template over {question} and the fields of the entry's metadata, e.g. "{expression}=".
    solution: template over the same fields and {answer}, or "steps" for the step-by-step text of
      `demonstrations`. The grader reads the text after the last "####", or else all of it.
  Raises:
    ValueError: a dataset, setting or template field is unknown, seeds are equal, a size is out of
      range, or there are too few distinct questions.
    ImportError: reasoning-gym is not installed.
  """
  settings = dict(settings or {})
  _check_seeds(train_seed, warm_start_seed, held_out_seed)
  _check_dataset(dataset, settings)
  write_solution = _solution_writer(dataset, solution)

  def make_candidates(seed: int, size: int) -> Candidates:
    entries = _create_dataset(dataset, settings, seed=seed, size=size)
    what = f"reasoning_gym dataset {dataset!r} with settings {settings} and seed {seed}"
    return Candidates(lambda i: make_problem(entries[i]), size, what)

  def make_problem(entry: dict[str, Any]) -> Problem:
    answer = entry["answer"]
    return Problem(
      question=fill_template(
        "prompt", prompt, {**entry["metadata"], "question": entry["question"]}
      ),
      answer=answer or "",
      solution="" if answer is None else write_solution(entry),
      reference={
        "dataset": dataset,
        "settings": settings,
        "answer": answer,
        "metadata": entry["metadata"],
      },
    )

  task = make_task(
    dataset,
    make_candidates,
    "reasoning_gym",
    train_size=train_size,
    warm_start_size=warm_start_size,
    held_out_size=held_out_size,
    train_seed=train_seed,
    warm_start_seed=warm_start_seed,
    held_out_seed=held_out_seed,
  )
  _check_reference(_create_dataset(dataset, settings, seed=0, size=1), task.held_out[0])
  if dataset in TAKES_ONE_ANSWER:
    logging.warning(
      "reasoning_gym dataset %r: its own program accepts one answer for every problem, which a"
      " policy can learn instead of solving them; use another dataset", dataset,
    )  # fmt: skip
  if any(not task.warm_start[index].solution for index in range(warm_start_size)):
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} gives no answers, so there are no demonstrations to "
      "train on: set warm_start_size to 0"
    )
  return task


def _create_dataset(dataset: str, settings: Mapping[str, Any], *, seed: int, size: int):
  try:
    return _import_library().create_dataset(dataset, **settings, seed=seed, size=size)
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} rejects settings {dict(settings)}: {error}"
    ) from error


def _import_library() -> ModuleType:
  # Imported here because the import takes a second and other tasks do not need it.
  try:
    from reasoning_gym import factory
  except ImportError as error:
    raise ImportError(
      f'the task reasoning_gym needs {error.name}: pip install "rlvr_jax[reasoning-gym]"'
    ) from error
  return factory


def _check_dataset(dataset: str, settings: Mapping[str, Any]) -> None:
  known = _import_library().DATASETS
  if dataset not in known:
    raise ValueError(
      f"unknown reasoning_gym dataset {dataset!r}; similar names: {_similar_names(dataset, known)}"
    )
  hash_seed = os.environ.get("PYTHONHASHSEED", "random")
  if dataset in _HASH_SEED_DEPENDENT and hash_seed == "random":
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} generates different problems in every process unless "
      "Python's hash seed is fixed, so a resumed run would not be reproducible: set "
      "PYTHONHASHSEED=0 in the environment"
    )
  fields = {field.name for field in dataclasses.fields(known[dataset][1])} - {"seed", "size"}
  for name in settings:
    if name in ("seed", "size"):
      raise ValueError(
        f"settings has {name!r}, but each phase has its own: set train_{name}, held_out_{name}, ..."
      )
    if name not in fields:
      raise ValueError(
        f"reasoning_gym dataset {dataset!r} has no setting {name!r}; similar names: "
        f"{_similar_names(name, fields)}; all settings: {sorted(fields)}"
      )


def _similar_names(name: str, names: Iterable[str]) -> list[str]:
  return difflib.get_close_matches(name, sorted(names), n=5, cutoff=0.4)


def _solution_writer(dataset: str, solution: str) -> Callable[[dict[str, Any]], str]:
  if solution != STEPS:
    return lambda entry: fill_template("solution", solution, {**entry["metadata"], **entry})
  if dataset not in demonstrations.__all__:
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} has no step-by-step solutions; datasets that have them: "
      f"{demonstrations.__all__}. Set `solution` to a template such as '#### {{answer}}'."
    )
  return getattr(demonstrations, dataset)


def _check_seeds(train_seed: int, warm_start_seed: int, held_out_seed: int) -> None:
  if held_out_seed in (train_seed, warm_start_seed):
    raise ValueError(
      f"held_out_seed is {held_out_seed}, train_seed {train_seed} and warm_start_seed "
      f"{warm_start_seed}: held_out_seed must differ from the other two"
    )


def _check_reference(entries: Any, problem: Problem) -> None:
  """Raises ValueError unless the answer scores 1 with a reference that was read back from JSON."""
  dataset, answer = problem.reference["dataset"], problem.reference["answer"]
  try:
    reference = json.loads(json.dumps(problem.reference))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} cannot be graded in another process: its metadata is "
      f"not JSON-serializable: {error}"
    ) from error
  if answer is None:
    return  # the dataset accepts many answers and has no reference answer
  score = entries.score_answer(answer, reference)
  if score < 1 - 1e-9:
    raise ValueError(
      f"reasoning_gym dataset {dataset!r} cannot be graded in another process, which gets the"
      f" metadata as JSON: with these metadata the dataset's own answer {answer!r} scores"
      f" {score:g}, not 1. Use another dataset."
    )
