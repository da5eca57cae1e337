"""No correction."""

from __future__ import annotations

from rlvr_jax.corrections.base import Correction


def none() -> Correction:
  """Makes no correction: the loss is unchanged."""
  return Correction(apply=None, weighs=False)
