"""A number is guessed by "higher" and "lower": the smallest dialogue whose best play is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlvr_jax.environments.base import Message, Problem, Turn


class _Guess:
  """See `guess`."""

  def __init__(self, low: int, high: int, higher: str, lower: str, unclear: str):
    self._range = range(low, high + 1)
    self._replies = higher, lower, unclear
    self._number = low

  def reset(self, problem: Problem, seed: int) -> Sequence[Message] | None:
    del problem
    self._number = random.Random(seed).choice(self._range)
    return None

  def step(self, text: str) -> Turn:
    higher, lower, unclear = self._replies
    said = text.strip()
    if not (said.isascii() and said.isdigit() and len(said) <= 20 and int(said) in self._range):
      return Turn(unclear)
    if int(said) == self._number:
      return Turn(done=True, score=1.0)
    return Turn(higher if self._number > int(said) else lower)


def guess(
  *, low: int = 1, high: int = 32, higher: str = ">", lower: str = "<", unclear: str = "?"
) -> _Guess:
  """A number between `low` and `high`, drawn from the seed, is to be guessed.

  A turn of the policy is a decimal number, with white space around it or not. Other turns are
  answered by `unclear`, and count.

  Args:
    low, high: both may be the number; 0 ≤ low ≤ high.
    higher, lower, unclear: replies: the number is higher, or lower, than the guess; or the turn is
      no number in this range.
  """
  if not 0 <= low <= high:
    raise ValueError(f"low = {low}, high = {high}: expected 0 ≤ low ≤ high")
  return _Guess(low, high, higher, lower, unclear)


def best_success(numbers: int, turns: int) -> float:
  """The probability that the best play finds one of so many numbers within so many turns.

  With t turns bisection tells 2ᵗ − 1 numbers apart, and nothing tells more: every turn but the last
  has three answers, of which one ends the dialogue.
  """
  return min(1.0, (2**turns - 1) / numbers)
