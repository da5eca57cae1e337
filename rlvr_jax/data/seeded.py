"""Tasks whose problems are drawn from seeds."""

from __future__ import annotations

import random
from collections.abc import Callable

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.sources import Candidates, Chosen, Generated
from rlvr_jax.data.task_utils import warn_of_common_answer
from rlvr_jax.ops.checks import check_integer


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
  """A task whose problems are candidates of three seeds.

  All held-out questions differ, and so do all warm-start questions.

  Args:
    name: of the task.
    candidates: (seed, number of problems) → the candidates.
    grader: of the task.
    train_size: problems in an epoch of training; they cost nothing until they are generated.
    warm_start_size: problems with demonstrations; may be 0.
    held_out_size: problems for evaluation; no other has one of their questions.
    train_seed, warm_start_seed, held_out_seed: of the problems.
  Raises:
    ValueError: sizes out of range, or too few different questions for them.
  """
  check_integer(name, "train_size", train_size, low=1)
  check_integer(name, "warm_start_size", warm_start_size, low=0)
  check_integer(name, "held_out_size", held_out_size, low=1)
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


def seeded_task(
  name: str,
  draw: Callable[[random.Random], Problem],
  grader: str,
  **sizes_and_seeds: int,
) -> Task:
  """A task of problems that a function draws; problem i of seed s is always the same.

  Args:
    name, grader: as for `task_of`.
    draw: a generator of random numbers → a problem with a demonstration.
    sizes_and_seeds: as for `task_of`; the seeds are all different.
  Raises:
    ValueError: equal seeds, sizes out of range, or too few different questions for them.
  """
  phases = ("train", "warm_start", "held_out")
  seeds = tuple(sizes_and_seeds[f"{phase}_seed"] for phase in phases)
  if len(set(seeds)) < len(seeds):
    raise ValueError(
      f"task {name}: train_seed, warm_start_seed and held_out_seed are {seeds}; set them to three"
      " different numbers"
    )

  def candidates(seed: int, size: int) -> Candidates:
    one = lambda index: draw(random.Random(f"{name} {seed} {index}"))
    return Candidates(one, size, f"task {name} with seed {seed}")

  return task_of(name, candidates, grader, **sizes_and_seeds)
