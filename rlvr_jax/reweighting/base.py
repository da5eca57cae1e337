"""What a reweighting is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlvr_jax.types import Array, Metrics


class Reweighting(NamedTuple):
  """Coefficients and the Gram matrix of the rollouts' gradient features → coefficients.

  Attributes:
    apply: (coefficients f32[P, G], gram f32[B, B] or None) → (f32[P, G], metrics).
    needs_gram: whether `apply` reads the Gram matrix; None may be passed where it does not.
  """

  apply: Callable[[Array, Array | None], tuple[Array, Metrics]]
  needs_gram: bool = False
