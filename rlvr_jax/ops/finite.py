"""Finds arrays with NaN or infinite entries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.types import Array, Params


def nonfinite_names(tree: Any) -> list[str]:
  """Paths, joined by "/", of a tree's floating-point arrays with NaN or infinite entries."""
  leaves = {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if jnp.issubdtype(leaf.dtype, jnp.floating)
  }
  return [name for name, finite in jax.device_get(_are_finite(leaves)).items() if not finite]


def check_finite(where: str, params: Params) -> None:
  """Raises ValueError if weights are not finite.

  Args:
    where: the place that the weights were read from. The message names this place and
      weights that are not finite.
  """
  if names := nonfinite_names(params):
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    raise ValueError(
      f"{where}: NaN or infinite weights in {len(names)} of {len(jax.tree.leaves(params))}"
      f" parameters: {shown}; use an earlier checkpoint"
    )


@jax.jit
def _are_finite(leaves: dict[str, Array]) -> dict[str, Array]:
  # NaN and infinities propagate to the sum; unlike isfinite(x), isfinite(sum) needs no memory.
  return {name: jnp.isfinite(jnp.sum(x)) for name, x in leaves.items()}
