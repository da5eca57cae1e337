"""Sums and differences of two numbers, for a policy that chats."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.sources import Chosen
from rlvr_jax.data.task_utils import warn_of_common_answer
from rlvr_jax.ops.checks import check_integer


def sums(*, largest: int = 40, held_out_numbers: int = 10, split_seed: int = 0) -> Task:
  """Makes a task of questions such as "What is 23 + 8?" and "What is 31 - 17?".

  Held-out numbers occur only in held-out problems, and held-out problems have no other numbers. So
  training shows neither a question nor a number of a held-out problem. No difference is negative.

  Args:
    largest: the numbers are 1 … `largest`.
    held_out_numbers: how many numbers are held out.
    split_seed: seed of the choice of held-out numbers.
  Raises:
    ValueError: an argument is out of range.
  """
  check_integer("sums", "largest", largest, low=2)
  check_integer("sums", "held_out_numbers", held_out_numbers, low=1, high=largest - 1)
  numbers = range(1, largest + 1)
  held_out = set(random.Random(split_seed).sample(numbers, held_out_numbers))
  trained = [number for number in numbers if number not in held_out]
  task = Task(
    name="sums",
    train=Chosen.of(tuple(_problems(trained))),
    warm_start=Chosen.of(()),
    held_out=Chosen.of(tuple(_problems(sorted(held_out)))),
    grader="gsm8k",  # the last number of a response is its answer
  )
  return warn_of_common_answer(task)


def _problems(numbers: Sequence[int]) -> Iterator[Problem]:
  """All sums of two of the numbers in either order, and all differences that are ≥ 0."""
  for a, b in itertools.product(numbers, repeat=2):
    yield _problem(f"{a} + {b}", a + b)
    if a >= b:
      yield _problem(f"{a} - {b}", a - b)


def _problem(formula: str, answer: int) -> Problem:
  return Problem(
    question=f"What is {formula}?",
    answer=str(answer),
    solution=f"{formula} = {answer}",
    reference={"answer": str(answer)},
  )
