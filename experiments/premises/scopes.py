"""The blocks of rollouts whose gradient geometry is measured."""

import numpy as np


def scope_blocks(
  gram: np.ndarray, coefficients: np.ndarray, scope: str | int, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
  """Returns the Gram matrix f32[B, B] and A f32[B], ordered by the N blocks of a scope, and N.

  Args:
    gram: f32[B, B].
    coefficients: f32[P, G], A.
    scope: "batch", "group", or a number of rollouts, which are drawn at random.
    seed: seed of the draw.
  """
  A = coefficients.ravel()
  count = 1 if scope == "batch" else len(coefficients)
  order = np.arange(A.size)
  if isinstance(scope, int):
    count = A.size // scope
    order = np.random.default_rng(seed).permutation(A.size)[: count * scope]
  return gram[np.ix_(order, order)], A[order], count
