"""A task whose problems and grader are imported in no time, for the runs that tests start."""

import random

from rlvr_jax.data.problems import Problem, Task


class Sums:
  """Sums and differences of two digits; the same index and seed always give the same."""

  def __init__(self, size, seed):
    self._size, self._seed = size, seed

  def __len__(self):
    return self._size

  def __getitem__(self, index):
    if not 0 <= index < self._size:
      raise IndexError(index)
    number = random.Random(self._seed + index)
    left, right, sign = number.randrange(10), number.randrange(10), number.choice((1, -1))
    answer = str(left + sign * right)
    question = f"{left} {'+' if sign > 0 else '-'} {right}="
    return Problem(question, answer, solution=answer, reference={"answer": answer})


def sums(*, train_size=1000, warm_start_size=80, held_out_size=10):
  """The held-out questions may be among the others: no test of a run asks what was learned."""
  return Task(
    name="sums",
    train=Sums(train_size, seed=0),
    warm_start=Sums(warm_start_size, seed=2_000_000),
    held_out=Sums(held_out_size, seed=3_000_000),
    grader="rewards.user_graders:unhurried",
  )
