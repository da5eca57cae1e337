"""Tasks whose problems are drawn from seeds."""

from __future__ import annotations

import random
from collections.abc import Callable

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.sources import Candidates, Chosen, Generated
from rlvr_jax.data.task_utils import warn_of_common_answer
from rlvr_jax.ops.checks import check_integer


def make_task(
  name: str,
  make_candidates: Callable[[int, int], Candidates],
  grader: str,
  *,
  train_size: int,
  warm_start_size: int,
  held_out_size: int,
  train_seed: int,
  warm_start_seed: int,
  held_out_seed: int,
) -> Task:
  """Makes a task whose problems are generated from three seeds.

  All held-out questions differ, and so do all warm-start questions.

  Args:
    name: name of the task.
    make_candidates: (seed, number of problems) → candidates.
    grader: grader of the task.
    train_size: problems in an epoch of training; they cost nothing until they are generated.
    warm_start_size: problems with demonstrations; may be 0.
    held_out_size: problems for evaluation; their questions occur in no other phase.
    train_seed, warm_start_seed, held_out_seed: seeds of the problems.
  Raises:
    ValueError: a size is out of range, or there are too few different questions.
  """
  check_integer(name, "train_size", train_size, low=1)
  check_integer(name, "warm_start_size", warm_start_size, low=0)
  check_integer(name, "held_out_size", held_out_size, low=1)
  held_out = make_candidates(held_out_seed, held_out_size).choose_distinct()
  held_out_questions = frozenset(problem.question for problem in held_out)
  warm_start: tuple[Problem, ...] = ()
  if warm_start_size:
    candidates = make_candidates(warm_start_seed, warm_start_size)
    warm_start = candidates.choose_distinct(held_out_questions)
  task = Task(
    name=name,
    train=Generated(make_candidates(train_seed, train_size), held_out_questions),
    warm_start=Chosen.of(warm_start),
    held_out=Chosen.of(held_out),
    grader=grader,
  )
  return warn_of_common_answer(task)


def make_seeded_task(
  name: str,
  draw: Callable[[random.Random], Problem],
  grader: str,
  **sizes_and_seeds: int,
) -> Task:
  """Makes a task of problems that a function draws; problem i of seed s is always the same.

  Args:
    name, grader: as for `make_task`.
    draw: random number generator → problem with a demonstration.
    sizes_and_seeds: as for `make_task`; the seeds must differ.
  Raises:
    ValueError: seeds are equal, a size is out of range, or there are too few different questions.
  """
  phases = ("train", "warm_start", "held_out")
  seeds = tuple(sizes_and_seeds[f"{phase}_seed"] for phase in phases)
  if len(set(seeds)) < len(seeds):
    raise ValueError(
      f"task {name}: train_seed, warm_start_seed and held_out_seed are {seeds}; set them to three"
      " different numbers"
    )

  def make_candidates(seed: int, size: int) -> Candidates:
    def generate(index: int) -> Problem:
      return draw(random.Random(f"{name} {seed} {index}"))

    return Candidates(generate, size, f"task {name} with seed {seed}")

  return make_task(name, make_candidates, grader, **sizes_and_seeds)
