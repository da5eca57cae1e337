"""Lower-precision copies of a policy's parameters, to sample rollouts from.

Matrices become integers or 8-bit floats with one scale per output channel, w ≈ s·q; norms, biases
and the routers of experts are not changed. A copy is a separate policy: its samples have
log-probabilities under s·q.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.models.functional import Model, take_trained
from rlvr_jax.models.linear import Rounded
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.types import Array, Params

FORMATS = ("int8", "float8_e4m3fn")
# Matrices that are not rounded. Rounded routers would choose other experts. Errors in the gates of
# a DeltaNet's state would act on all later tokens. Gates and convolutions' taps are small.
_EXACT_MATRICES = (
  *("router", "shared_weight", "strength", "decay"),
  *("query_taps", "key_taps", "value_taps"),
)


def quantize(params: Params, format: str) -> Params:
  """Rounds every matrix to `format`, symmetrically, with one scale per channel.

    s = max |w| / bound,  q = round(w / s),  bound: 127.5 for int8, 448 for float8_e4m3fn

  The maximum is over the axis that a product with the matrix contracts, for each layer separately.
  In the embedding the maximum is over the width, so that a row has the same values in the lookup
  and in a tied head. The function is pure and gives the same bits on every mesh; jit it with
  `format` static. The result shares no buffer with `params`, so `params` may be donated afterwards.

  Args:
    params: nested dict of float arrays, layers stacked under "blocks".
    format: one of `FORMATS`.
  Returns:
    The same nested dict with `qwix.QArray`s for matrices. A qvalue has the dtype `format` and the
    matrix's shape; a scale is at least float32, and has length 1 along the contracted axis.
  Raises:
    ValueError: unknown format.
    ImportError: qwix, the extra `quantized`, is missing.
  Source: absmax rounding, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale"
    (arXiv:2208.07339), §2, there with the bound 127 for int8.
  """
  check_choice("quantize", "format", format, FORMATS)
  qwix = _import_qwix()

  def quantize_leaf(path: Any, weights: Array) -> Any:
    contracted = _contracted_axis(path, weights)
    if contracted is None:
      return jnp.copy(weights)  # an update may donate the original
    wide = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
    channels = [axis for axis in range(weights.ndim) if axis != contracted]
    return qwix.quantize(wide, jnp.dtype(format), channelwise_axes=channels)

  return jax.tree_util.tree_map_with_path(quantize_leaf, params)


def dequantize(params: Params) -> Params:
  """Converts quantized matrices to arrays, s·q in the scale's dtype; other leaves are unchanged."""
  return _map_matrices(_import_qwix().dequantize, params)


def rounded(params: Params) -> Params:
  """Converts quantized matrices to `Rounded`, to decode with; other leaves are unchanged."""
  return _map_matrices(lambda matrix: Rounded(matrix.qvalue, matrix.scale), params)


def _map_matrices(function: Callable[[Any], Any], params: Params) -> Params:
  qwix = _import_qwix()
  is_matrix = lambda leaf: isinstance(leaf, qwix.QArray)
  convert = lambda leaf: function(leaf) if is_matrix(leaf) else leaf
  return jax.tree.map(convert, params, is_leaf=is_matrix)


def adapt_to_quantized(model: Model, format: str, *, decode_rounded: bool) -> Model:
  """Adapts `model` to quantized parameters.

  Args:
    model: the model of the parameters that were quantized.
    format: one of `FORMATS`.
    decode_rounded: whether decoding reads the 8-bit numbers, which have half the bytes of bfloat16.
      Otherwise it reads s·q in the compute dtype, dequantized once beforehand, which is faster on
      CPUs.
  Returns:
    The adapted model. Its `init` returns parameters of the shapes that the given
    `model.decoding_params` takes.
  Raises:
    ImportError: qwix, the extra `quantized`, is missing.
  """
  _import_qwix()  # raises before anything is compiled
  wrap = lambda function: lambda params, *args: function(dequantize(params), *args)
  shapes, prepare = model.init, dequantize
  if decode_rounded:
    shapes = lambda key: rounded(quantize(model.init(key), format))
    prepare = rounded
  return model._replace(
    init=shapes,
    combine=take_trained,
    head=wrap(model.head),
    response_hidden=wrap(model.response_hidden),
    row_hidden=wrap(model.row_hidden),
    response_routed=wrap(model.response_routed),
    row_routed=wrap(model.row_routed),
    decoding_params=lambda params: model.decoding_params(prepare(params)),
  )


def _import_qwix() -> ModuleType:
  try:
    import qwix
  except ImportError as error:
    raise ImportError(
      'config.sources.quantized needs qwix: pip install "rlvr_jax[quantized]"'
    ) from error
  return qwix


def _contracted_axis(path: Any, weights: Array) -> int | None:
  """The axis that a product with the matrix sums over; None for a parameter that is not rounded.

  Norms, biases and `_EXACT_MATRICES` are not rounded.
  """
  stacked = path[0].key == "blocks"
  if weights.ndim - stacked < 2 or path[-1].key in _EXACT_MATRICES:
    return None
  return weights.ndim - (1 if path[-1].key == "embedding" else 2)
