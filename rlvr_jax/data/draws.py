"""The batches of problems of a run, in order, with a position that can be restored."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from rlvr_jax.data.batches import problem_batches
from rlvr_jax.data.curriculum import Curriculum, CurriculumDraws
from rlvr_jax.data.problems import Problem, ProblemSource


class Draws(Protocol):
  """The interface of a run's draws; a draw is one batch of problems that are sampled together.

  The state can be restored. The problems of later draws may depend on the solve rates of earlier
  draws.
  """

  def draw(self, draw: int, version: int, /) -> list[Problem]:
    """Returns the problems of draw number `draw`, for a policy after `version` updates."""
    ...

  def observe(
    self, draw: int, solve_rates: np.ndarray, state: dict[str, Any], /
  ) -> tuple[dict[str, Any], dict[str, float]]:
    """Records the solve rate of each group of a draw; call it in the order of the draws.

    Args:
      draw: number of the draw.
      solve_rates: f[P], in the order of the draw's problems; NaN for a group without a grade, which
        is ignored.
      state: what `get_state()` returned right after the draw.
    Returns:
      The state from which a resumed run makes its next draw, and the metrics of draw `draw`.
    """
    ...

  def get_state(self) -> dict[str, Any]:
    """Returns the state that determines the next draws, JSON-serializable."""
    ...

  def set_state(self, state: dict[str, Any], /) -> None:
    """Restores a state that `get_state` returned."""
    ...


class ShuffledDraws:
  """Batches of `problem_batches`, independent of the solve rates."""

  def __init__(self, source: ProblemSource, *, batch_size: int, seed: int):
    self._batches = problem_batches(source, batch_size=batch_size, seed=seed)
    self.get_state, self.set_state = self._batches.get_state, self._batches.set_state

  def draw(self, draw: int, version: int) -> list[Problem]:
    return next(self._batches)

  def observe(
    self, draw: int, solve_rates: np.ndarray, state: dict[str, Any]
  ) -> tuple[dict[str, Any], dict[str, float]]:
    return state, {}


def problem_draws(source: ProblemSource, *, batch_size: int, seed: int) -> Draws:
  """The batches of problems of a run; for arguments see `problem_batches`."""
  draws_class = CurriculumDraws if isinstance(source, Curriculum) else ShuffledDraws
  return draws_class(source, batch_size=batch_size, seed=seed)  # type: ignore[arg-type]
