"""An environment in which the policy guesses a number, and replies say "higher" or "lower".

Its best play is known: `optimal_success` in `rlvr_jax/data/guess.py`.
"""

from __future__ import annotations

import hashlib
import re

from rlvr_jax.environments.base import Environment, Problem, Turn
from rlvr_jax.ops.checks import check_integer, check_order

# Longer integers are out of every range, and converting long texts to integers is slow.
_INTEGER = re.compile(r"-?[0-9]{1,20}")


class _Guess:
  """The dialogue about one number to guess."""

  def __init__(self, low: int, high: int, words: tuple[str, str, str]):
    self._low = low
    self._high = high
    self._words = words
    self._number = low

  def reset(self, problem: Problem, seed: int) -> None:
    """Draws the number from the seed alone: all rollouts of a group have the same number."""
    del problem
    digest = hashlib.sha256(f"guess {seed}".encode()).digest()
    self._number = self._low + int.from_bytes(digest) % (self._high - self._low + 1)

  def step(self, text: str) -> Turn:
    """Compares the number with the policy's text."""
    higher, lower, invalid = self._words
    answer = text.strip()
    guessed = int(answer) if _INTEGER.fullmatch(answer) else None
    if guessed is None or not self._low <= guessed <= self._high:
      return Turn(invalid)
    if guessed == self._number:
      return Turn(done=True, score=1.0)
    return Turn(higher if self._number > guessed else lower)


def guess(
  *, low: int = 1, high: int = 31, higher: str = ">", lower: str = "<", invalid: str = "?"
) -> Environment:
  """Asks for a number, uniform in [low, high]; the right guess ends the dialogue with score 1.

  The policy's text is a decimal integer; space around it is ignored. The question of the problem is
  the prompt. The default replies are one byte each, for tiny policies whose tokens are bytes.

  Args:
    low: smallest number.
    high: largest number, ≥ low.
    higher: reply if the number is higher than the guess.
    lower: reply if the number is lower than the guess.
    invalid: reply if the text is not an integer in the range; such a turn counts like any other.
  Raises:
    ValueError: a hyper-parameter is out of range, or two replies are equal.
  """
  for name, value in (("low", low), ("high", high)):
    check_integer("guess", name, value, low=-(10**18), high=10**18)
  check_order("guess", ("low", low), ("high", high))
  words = (higher, lower, invalid)
  if not all(isinstance(word, str) for word in words) or len(set(words)) < 3:
    raise ValueError(
      f"guess: higher, lower and invalid = {words!r} are not three different texts; set them to"
      " three different texts"
    )
  return _Guess(low, high, words)
