"""Tasks whose problems a function draws from a random number generator."""

from __future__ import annotations

import random
from collections.abc import Callable

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.sources import Candidates, Chosen, Generated
from rlvr_jax.data.task_utils import check_size, warn_of_common_answer


def seeded_task(
  name: str,
  draw: Callable[[random.Random], Problem],
  grader: str,
  *,
  train_size: int,
  warm_start_size: int,
  held_out_size: int,
  train_seed: int,
  warm_start_seed: int,
  held_out_seed: int,
) -> Task:
  """A task of problems drawn on access; problem i of seed s is always the same.

  Args:
    name: of the task.
    draw: a generator of random numbers → a problem with a demonstration.
    grader: of the task.
    train_size: problems in an epoch of training; they cost nothing until they are drawn.
    warm_start_size: problems with demonstrations; may be 0.
    held_out_size: problems for evaluation; no other has one of their questions.
    train_seed, warm_start_seed, held_out_seed: of the problems, all different.
  Raises:
    ValueError: equal seeds, sizes out of range, or too few different questions for them.
  """
  seeds = (train_seed, warm_start_seed, held_out_seed)
  if len(set(seeds)) < len(seeds):
    raise ValueError(
      f"task {name}: train_seed, warm_start_seed and held_out_seed are {seeds}; set them to three"
      " different numbers"
    )

  def candidates(seed: int, size: int) -> Candidates:
    one = lambda index: draw(random.Random(f"{name} {seed} {index}"))
    return Candidates(one, size, f"task {name} with seed {seed}")

  return task_of(
    name,
    candidates,
    grader,
    train_size=train_size,
    warm_start_size=warm_start_size,
    held_out_size=held_out_size,
    train_seed=train_seed,
    warm_start_seed=warm_start_seed,
    held_out_seed=held_out_seed,
  )


def task_of(
  name: str,
  candidates: Callable[[int, int], Candidates],
  grader: str,
  *,
  train_size: int,
  warm_start_size: int,
  held_out_size: int,
  train_seed: int,
  warm_start_seed: int,
  held_out_seed: int,
) -> Task:
  """A task whose problems are `candidates(seed, size)`; the other arguments as of `seeded_task`.

  All held-out questions differ, and so do all warm-start questions. Problems of training are
  generated on access.
  """
  check_size("train_size", train_size, minimum=1)
  check_size("warm_start_size", warm_start_size)
  check_size("held_out_size", held_out_size, minimum=1)
  held_out = candidates(held_out_seed, held_out_size).distinct()
  taken = frozenset(problem.question for problem in held_out)
  warm_start: tuple[Problem, ...] = ()
  if warm_start_size:
    warm_start = candidates(warm_start_seed, warm_start_size).distinct(taken)
  task = Task(
    name=name,
    train=Generated(candidates(train_seed, train_size), taken),
    warm_start=Chosen.of(warm_start),
    held_out=Chosen.of(held_out),
    grader=grader,
  )
  return warn_of_common_answer(task)
