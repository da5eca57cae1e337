"""No reweighting."""

from __future__ import annotations

from rlvr_jax.reweighting.base import Reweighting


def none() -> Reweighting:
  """A reweighting that returns the coefficients unchanged."""
  return Reweighting(
    apply=lambda coefficients, gram, valid, key: (coefficients, {}), needs_gram=False
  )
