"""The interface of reweightings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.ops.component_repr import component_repr
from rlvr_jax.types import Array, Metrics


class Reweighting(NamedTuple):
  """A function from coefficients and the Gram matrix of gradient features to new coefficients.

  A reweighting acts on n blocks of b rollouts; each block has its own Gram matrix. A block is the
  full batch (n = 1), a group, or a number of consecutive rollouts of the batch.

  Attributes:
    apply: (coefficients f32[n, b], gram f32[n, b, b] or None, valid bool[n, b], key) → (new
      coefficients f32[n, b], metrics). Rollouts that are not valid have the coefficient 0 in the
      input and in the result.
    needs_gram: whether `apply` reads the Gram matrix; otherwise None may be passed.
    scope: the block: "batch", "group", or a number of rollouts.
  """

  apply: Callable[[Array, Array | None, Array, Array], tuple[Array, Metrics]]
  needs_gram: bool = False
  scope: str | int = "batch"

  def __repr__(self) -> str:
    return component_repr(self)

  def on_batch(
    self, coefficients: Array, gram: Array | None, valid: Array, key: Array
  ) -> tuple[Array, Metrics]:
    """Applies the reweighting to the blocks of a batch.

    Args:
      coefficients: f32[P, G].
      gram: f32[B, B], the inner products g_i · g_j of gradient features of the B = P·G rollouts, in
        the order of coefficients.reshape(B); may be None if `needs_gram` is False.
      valid: bool[P, G].
      key: random key.
    Returns:
      (coefficients f32[P, G], constant for differentiation; metrics).
    Raises:
      ValueError: at trace time, the scope is a number of rollouts that does not divide B.
    """
    blocks = coefficients.reshape(-1, self._block_size(*coefficients.shape))
    count, size = blocks.shape
    if gram is not None:
      gram = jnp.diagonal(gram.reshape(count, size, count, size), axis1=0, axis2=2)
      gram = jnp.moveaxis(gram, -1, 0)
    reweighted, metrics = self.apply(blocks, gram, valid.reshape(blocks.shape), key)
    return jax.lax.stop_gradient(reweighted.reshape(coefficients.shape)), metrics

  def _block_size(self, P: int, G: int) -> int:
    """The number of rollouts in a block; these rollouts share a Gram matrix."""
    scope = self.scope
    if not isinstance(scope, int):
      return {"batch": P * G, "group": G}[scope]
    if P * G % scope:
      allowed = [size for size in range(2, P * G + 1) if P * G % size == 0]
      raise ValueError(
        f"reweighting: scope = {scope} rollouts does not divide the {P * G} rollouts of a batch"
        f" ({P} prompts with {G} rollouts each); choose one of {allowed}"
      )
    return scope
