"""Numbers to be found by "higher" and "lower", for the environment of that name."""

from __future__ import annotations

import random

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.sources import Candidates, Chosen, Generated
from rlvr_jax.ops.checks import check_integer


def guess(
  *,
  low: int = 1,
  high: int = 31,
  history: int = 4,
  train_size: int = 1_000_000,
  warm_start_size: int = 4096,
  held_out_size: int = 256,
  warm_start_seed: int = 2,
) -> Task:
  """Makes a task of one question, whose number the environment `guess` draws.

  The question is always the same, also for held-out problems: what is learned is how to ask. A
  demonstration is a guess at random, after up to `history` guesses at random and their true
  replies. So it shows the form of a dialogue, and nothing of how to play.

  Args:
    low, high: as for the environment; 0 ≤ low ≤ high.
    history: turns of the policy before the one that is shown, at most, ≥ 0.
    train_size, warm_start_size, held_out_size: problems of each phase.
    warm_start_seed: of the demonstrations.
  Raises:
    ValueError: an argument is out of range.
  """
  check_integer("guess", "low", low, low=0)
  check_integer("guess", "high", high, low=low)
  check_integer("guess", "history", history, low=0)
  for name, size in (("train_size", train_size), ("held_out_size", held_out_size)):
    check_integer("guess", name, size, low=1)
  check_integer("guess", "warm_start_size", warm_start_size, low=0)
  question = f"{low}-{high}:"

  def problem(index: int) -> Problem:
    del index
    return Problem(question=question, answer="", solution="", reference={})

  def demonstration(index: int) -> Problem:
    rng = random.Random(f"guess {warm_start_seed} {index}")
    number, turns = rng.randint(low, high), []
    for _ in range(rng.randint(0, history)):
      said = rng.randint(low, high)
      if said == number:
        break
      turns += [str(said), ">" if number > said else "<"]
    return Problem(
      question=question,
      answer="",
      solution=str(rng.randint(low, high)),
      reference={},
      history=tuple(turns),
    )

  return Task(
    name="guess",
    train=Generated(Candidates(problem, train_size, "task guess"), frozenset()),
    warm_start=Chosen.of(tuple(demonstration(index) for index in range(warm_start_size))),
    held_out=Chosen.of((problem(0),) * held_out_size),
    grader="pattern(regex='(?!)')",  # matches nothing: the environment gives the score
  )
