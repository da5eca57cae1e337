"""The environment `guess` with a score for each turn that goes on, written as one's own."""

from rlvr_jax.environments.base import Turn
from rlvr_jax.environments.guess import guess


class ScoredGuess:
  """A guess scores 1 if it is where the replies allow, else 0; what is no guess has no score."""

  def __init__(self, low, high):
    self._guess, self._range = guess(low=low, high=high), [low, high]

  def reset(self, problem, seed):
    return self._guess.reset(problem, seed)

  def step(self, text):
    turn = self._guess.step(text)
    if turn.done or turn.reply == "?":
      return turn
    guessed, (low, high) = int(text), self._range
    if turn.reply == ">":
      self._range[0] = max(low, guessed + 1)
    else:
      self._range[1] = min(high, guessed - 1)
    return Turn(turn.reply, score=float(low <= guessed <= high))


def scored_guess(*, low=1, high=7):
  return ScoredGuess(low, high)
