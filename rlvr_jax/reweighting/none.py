"""No reweighting."""

from __future__ import annotations

from rlvr_jax.reweighting.base import Reweighting


def none() -> Reweighting:
  """Coefficients go through as they are."""
  return Reweighting(apply=lambda coefficients, gram, key: (coefficients, {}), needs_gram=False)
