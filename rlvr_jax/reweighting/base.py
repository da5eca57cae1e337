"""What a reweighting is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlvr_jax.types import Array, Metrics

SCOPES = ("batch", "micro_batch", "group")


class Reweighting(NamedTuple):
  """Coefficients and the Gram matrix of the rollouts' gradient features → coefficients.

  It acts on N blocks of b rollouts, each with its own Gram matrix: the whole batch (N = 1), the
  micro-batches of an update, or its groups.

  Attributes:
    apply: (coefficients f32[N, b], gram f32[N, b, b] or None, key) → (f32[N, b], metrics).
    needs_gram: whether `apply` reads the Gram matrix; None may be passed where it does not.
    scope: "batch", "micro_batch" or "group": what a block is.
  """

  apply: Callable[[Array, Array | None, Array], tuple[Array, Metrics]]
  needs_gram: bool = False
  scope: str = "batch"
