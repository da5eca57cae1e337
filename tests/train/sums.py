"""A task whose problems and grader are imported in no time, for the runs that tests start."""

import random

from rlvr_jax.data.problems import Problem, Task


class Sums:
  """Sums and differences of two digits; the same index and seed always give the same."""

  def __init__(self, size, seed, long_from=None):
    self._size, self._seed, self._long_from = size, seed, long_from

  def __len__(self):
    return self._size

  def __getitem__(self, index):
    if not 0 <= index < self._size:
      raise IndexError(index)
    number = random.Random(self._seed + index)
    left, right, sign = number.randrange(10), number.randrange(10), number.choice((1, -1))
    answer = str(left + sign * right)
    question = f"{left} {'+' if sign > 0 else '-'} {right}="
    if self._long_from is not None and index >= self._long_from:
      question = "as long as no limit allows: " + question
    return Problem(question, answer, solution=answer, reference={"answer": answer})


def sums(*, train_size=1000, warm_start_size=80, held_out_size=10, long_from=None):
  """The held-out questions may be among the others: no test of a run asks what was learned.

  Training prompts from `long_from` on are long.
  """
  return Task(
    name="sums",
    train=Sums(train_size, seed=0, long_from=long_from),
    warm_start=Sums(warm_start_size, seed=2_000_000),
    held_out=Sums(held_out_size, seed=3_000_000),
    grader="rewards.user_graders:unhurried",
  )


def too_late():
  """A schedule that samples no batch before the first update."""
  from rlvr_jax.rollouts.staleness import Schedule, same_number  # not where problems are graded

  return Schedule(limit=lambda v: v, batch=same_number, first=same_number, open_ended=True)
