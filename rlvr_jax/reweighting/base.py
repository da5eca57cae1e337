"""The interface of reweightings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlvr_jax.types import Array, Metrics


class Reweighting(NamedTuple):
  """Coefficients and the Gram matrix of the rollouts' gradient features → coefficients.

  It acts on N blocks of b rollouts, each with its own Gram matrix. A block is the full batch
  (N = 1), a group, or a number of rollouts that follow one another in the batch.

  Attributes:
    apply: (coefficients f32[N, b], gram f32[N, b, b] or None, key) → (f32[N, b], metrics).
    needs_gram: whether `apply` reads the Gram matrix; if not, None may be passed.
    scope: the block: "batch", "group", or a number of rollouts.
  """

  apply: Callable[[Array, Array | None, Array], tuple[Array, Metrics]]
  needs_gram: bool = False
  scope: str | int = "batch"
