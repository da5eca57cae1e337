"""Lower-precision copies of a policy's parameters, to sample rollouts from.

Matrices become integers or 8-bit floats with one scale per output channel, w ≈ s·q; norms and
biases stay. A copy is a policy of its own: what it samples has log-probabilities under s·q.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.models.functional import Model, all_trained
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.types import Array, Params

FORMATS = ("int8", "float8_e4m3fn")


def quantized(params: Params, format: str) -> Params:
  """`params` with every matrix rounded to `format`, symmetrically, by its channels' largest values.

    s = max |w| / bound,  q = round(w / s),  bound: 127.5 for int8, 448 for float8_e4m3fn

  The maximum goes over the axis that a product with the matrix contracts, for each layer by itself;
  for the embedding over the width, so that a row is the same looked up and as a column of a tied
  head. Pure and deterministic, the same bits on every mesh; to be jitted with `format` static.
  Nothing is shared with `params`, which may be donated afterwards.

  Args:
    params: nested dict of float arrays, layers stacked under "blocks".
    format: one of `FORMATS`.
  Returns:
    The same nested dict with `qwix.QArray`s for matrices: qvalue in `format`, of the matrix's
    shape; scale at least float32, of length 1 along the contracted axis.
  Raises:
    ValueError: unknown format.
    ImportError: qwix, the extra `quantized`, is missing.
  Source: absmax rounding, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale"
    (arXiv:2208.07339), §2, there with the bound 127 for int8.
  """
  check_choice("quantized", "format", format, FORMATS)
  qwix = _qwix()

  def rounded(path: Any, weights: Array) -> Any:
    contracted = _contracted_axis(path, weights)
    if contracted is None:
      return jnp.copy(weights)  # an update may donate the original
    wide = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
    channels = [axis for axis in range(weights.ndim) if axis != contracted]
    return qwix.quantize(wide, jnp.dtype(format), channelwise_axes=channels)

  return jax.tree_util.tree_map_with_path(rounded, params)


def dequantized(params: Params) -> Params:
  """The arrays that `quantized` stands for, s·q in the scale's dtype; other leaves as they are."""
  qwix = _qwix()
  is_matrix = lambda leaf: isinstance(leaf, qwix.QArray)
  plain = lambda leaf: qwix.dequantize(leaf) if is_matrix(leaf) else leaf
  return jax.tree.map(plain, params, is_leaf=is_matrix)


def for_quantized(model: Model) -> Model:
  """Adapts `model` to parameters of which some, or none, are quantized.

  Raises:
    ImportError: qwix, the extra `quantized`, is missing.
  """
  _qwix()  # fails before anything is compiled
  taking = lambda function: lambda params, *args: function(dequantized(params), *args)
  return model._replace(
    combine=all_trained,
    head=taking(model.head),
    response_hidden=taking(model.response_hidden),
    row_hidden=taking(model.row_hidden),
    decoding_params=taking(model.decoding_params),  # once for all that is decoded
  )


def _qwix() -> ModuleType:
  try:
    import qwix
  except ImportError as error:
    raise ImportError(
      'config.sources.quantized needs qwix: pip install -e ".[quantized]"'
    ) from error
  return qwix


def _contracted_axis(path: Any, weights: Array) -> int | None:
  """The axis that a product with the matrix sums over; None for norms and biases."""
  stacked = path[0].key == "blocks"
  if weights.ndim - stacked < 2:
    return None
  return weights.ndim - (1 if path[-1].key == "embedding" else 2)
