"""No correction."""

from __future__ import annotations

from rlvr_jax.corrections.base import Correction


def none() -> Correction:
  """A correction that leaves the loss unchanged."""
  return Correction(apply=None, weighs=False)
