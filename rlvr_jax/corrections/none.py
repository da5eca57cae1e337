"""No correction."""

from __future__ import annotations

from rlvr_jax.corrections.base import Correction


def none() -> Correction:
  """Leaves the loss as it is."""
  return Correction(apply=None, weighs=False)
