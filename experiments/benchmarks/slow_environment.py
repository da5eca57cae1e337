"""An environment that sleeps; a separate file, because environments' processes do not load jax."""

from __future__ import annotations

import random
import time
from typing import Any

from rlvr_jax.environments import Turn, waiting


class _Slow:
  """One dialogue, of a number of turns that the seed decides."""

  def __init__(self, seconds: float, letters: int, turns: tuple[int, int]):
    self._seconds, self._letters, self._turns = seconds, letters, turns
    self._left = 0

  def reset(self, problem: Any, seed: int) -> None:
    del problem
    self._left = random.Random(seed).randint(*self._turns)

  def step(self, text: str) -> Turn:
    del text
    self._left -= 1
    with waiting(3600.0):  # others sleep meanwhile
      time.sleep(self._seconds)
    return Turn("a" * self._letters) if self._left else Turn(done=True, score=1.0)


def slow(*, seconds: float, letters: int = 16, low: int = 4, high: int = 8) -> _Slow:
  """Replies with `letters` letters after `seconds`; ends with the `low`th to the `high`th turn."""
  return _Slow(seconds, letters, (low, high))
