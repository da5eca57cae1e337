"""The task of the environment `guess`: to find a number by the replies "higher" and "lower"."""

from __future__ import annotations

import functools
import random

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.sources import Candidates, Chosen, Generated
from rlvr_jax.ops.checks import check_integer, check_order


def guess(
  *,
  low: int = 1,
  high: int = 31,
  turns: int = 5,
  train_size: int = 1_000_000,
  warm_start_size: int = 4096,
  held_out_size: int = 256,
  warm_start_seed: int = 2,
) -> Task:
  """Makes a task of one question, which asks for a number that the environment `guess` draws.

  All problems, including the held-out problems, have the same question: a policy learns how to
  search. A demonstration is a dialogue whose guesses are drawn at random. So it shows the form of
  a dialogue, but no strategy.

  Args:
    low, high: as for the environment; 0 ≤ low ≤ high.
    turns: ≥ 1, the most guesses of a demonstration; a right guess ends the demonstration earlier.
    train_size, warm_start_size, held_out_size: problems of each phase.
    warm_start_seed: seed by which the demonstrations are drawn.
  Raises:
    ValueError: an argument is out of range.
  """
  check_integer("guess", "low", low, low=0)
  check_integer("guess", "high", high, low=low)
  check_integer("guess", "turns", turns, low=1)
  for name, size in (("train_size", train_size), ("held_out_size", held_out_size)):
    check_integer("guess", name, size, low=1)
  check_integer("guess", "warm_start_size", warm_start_size, low=0)
  question = f"{low}-{high}:"

  def problem(index: int) -> Problem:
    del index
    return Problem(question=question, answer="", solution="", reference={})

  def demonstration(index: int) -> Problem:
    rng = random.Random(f"guess {warm_start_seed} {index}")
    history: list[str] = []
    number, said = rng.randint(low, high), rng.randint(low, high)
    while said != number and len(history) < 2 * (turns - 1):
      history += [str(said), ">" if number > said else "<"]
      said = rng.randint(low, high)
    return Problem(
      question=question, answer="", solution=str(said), reference={}, history=tuple(history)
    )

  return Task(
    name="guess",
    train=Generated(Candidates(problem, train_size, "task guess"), frozenset()),
    warm_start=Chosen.of(tuple(demonstration(index) for index in range(warm_start_size))),
    held_out=Chosen.of((problem(0),) * held_out_size),
    grader="pattern(regex='(?!)')",  # matches nothing: the environment gives the score
    best_play=functools.partial(optimal_success, low, high),
  )


def optimal_success(low: int, high: int, turns: int) -> float:
  """The probability that the best strategy finds the number within `turns` guesses.

  With t guesses a strategy can find min(n, 2^t − 1) of the n = high − low + 1 numbers. Each wrong
  guess gets one of two replies. So a turn has at most twice as many different guesses as the turn
  before it.

  Args:
    low: smallest number.
    high: largest number.
    turns: guesses allowed, ≥ 0.
  Raises:
    ValueError: an argument is out of range.
  """
  check_order("optimal_success", ("low", low), ("high", high))
  check_integer("optimal_success", "turns", turns, low=0)
  size = high - low + 1
  return min(size, 2**turns - 1) / size


def optimal_turns(low: int, high: int, turns: int) -> float:
  """The expected number of guesses of the best strategy, at most `turns` in each dialogue.

  The expectation is Σ over t < turns of the probability that t guesses have not found the number
  to guess. Halving the range minimizes every term.

  Args:
    low: smallest number.
    high: largest number.
    turns: guesses allowed, ≥ 0; a dialogue that does not find the number uses all `turns`.
  Raises:
    ValueError: an argument is out of range.
  """
  check_integer("optimal_turns", "turns", turns, low=0)
  return sum(1.0 - optimal_success(low, high, done) for done in range(turns))
