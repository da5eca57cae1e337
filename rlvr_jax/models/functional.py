"""The boundary between flax and the rest of the package: functions of plain dicts of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from rlvr_jax.models.layout import ONE_DEVICE, Layout
from rlvr_jax.models.linear import merge_low_rank
from rlvr_jax.models.rotary import RotaryTables
from rlvr_jax.models.transformer import (
  Transformer,
  TransformerConfig,
  layer_graph,
  make_rotary_tables,
)
from rlvr_jax.ops.layers import ATTENTION, DELTA, DENSE, FULL, SPARSE, STACKS, rows_of, take_rows
from rlvr_jax.types import Array, Head, Params, Routes

# Training applies the scales of norms, the decays of states, routers, and the gates of shared
# experts in at least float32.
_WIDE = ("scale", "log_rate", "decay_bias", "router", "shared_weight")


def take_trained(trained: Params, frozen: Params) -> Params:
  """Returns `trained`. If no parameters are frozen, this function is `Model.combine`."""
  del frozen
  return trained


class Model(NamedTuple):
  """A policy as pure functions of a nested dict of arrays."""

  config: TransformerConfig
  init: Callable[[Array], Params]  # key → parameters, layers stacked as `ops.layers` says
  head: Callable[[Params], Head]
  # The methods of `Transformer` with the same names, as functions of the parameters.
  response_hidden: Callable[..., Array]  # (params, prompts, tokens)
  row_hidden: Callable[..., Array]  # (params, tokens, rows)
  response_routed: Callable[..., tuple[Array, Routes, Array]]
  row_routed: Callable[..., tuple[Array, Array, Array]]
  # Parameters → decoding params: cast and gathered parameters, with one dict per layer under
  # "blocks". `prefill`, `decode` and `head` take decoding params.
  decoding_params: Callable[[Params], Params]
  prefill: Callable  # (decoding params, tokens[, lengths, attended]), see `Transformer`
  rotary: Callable[[Array], RotaryTables]  # positions i32[..., L] → tables
  decode: Callable  # (decoding params, tokens, tables, attend, delta[, running]), see `Transformer`
  # (trained, frozen) → the parameters that the functions above take; see `lora.adapt`.
  combine: Callable[[Params, Params], Params] = take_trained
  mesh: Mesh | None = None  # mesh over which batches are split
  # Shapes of the parameters → shardings of decoding params, with the shardings of one layer under
  # "blocks". None without a mesh.
  decoding_shardings: Callable[[Params], Params] | None = None


def transformer(config: TransformerConfig, layout: Layout = ONE_DEVICE) -> Model:
  """The transformer with settings `config` as pure functions; see `Transformer` for shapes."""
  build = lambda key: Transformer(config, nnx.Rngs(key), layout)
  # Splitting off `Param` only raises if the module has any other state.
  module = jax.eval_shape(build, jax.random.key(0))
  graph, _ = nnx.split(module, nnx.Param)
  bind = lambda params: nnx.merge(graph, params)
  others_graph, _ = nnx.split(module.without_layers(), nnx.Param)
  layer_graphs = {kind: layer_graph(config, kind) for kind in set(config.kinds)}

  def kind_of(layer):
    mixer = next((stack for stack in (DELTA, FULL) if stack in layer), ATTENTION)
    return mixer, SPARSE if "experts" in layer else DENSE

  def bind_others(params):
    return nnx.merge(others_graph, {k: x for k, x in params.items() if k != "blocks"})

  def decoding_params(params):
    params = layout.gather(cast_to_decode(merge_low_rank(params), config))
    blocks = params["blocks"]
    first_norm = "attention_norm" if config.pre_norm else "post_attention_norm"  # in all layers
    number = len(jax.tree.leaves(blocks[first_norm])[0])
    layers = range(config.num_layers)
    single = [dict.fromkeys(STACKS, 0)]  # a lone layer is row 0 of its stacks, whatever its kind
    rows = single if number == 1 else [rows_of(layer, config.kinds) for layer in layers]
    return {**params, "blocks": tuple(take_rows(blocks, of_layer) for of_layer in rows)}

  def on_layers(method):
    """Turns a `Transformer` method that takes layers into a function of decoding params."""

    def apply(params, *args):
      layers = [nnx.merge(layer_graphs[kind_of(x)], x) for x in params["blocks"]]
      return method(bind_others(params), layers, *args)

    return apply

  return Model(
    config=config,
    init=lambda key: nnx.to_pure_dict(nnx.split(build(key), nnx.Param)[1]),
    head=lambda params: bind_others(params).head(),
    response_hidden=lambda params, *args: bind(params).response_hidden(*args),
    row_hidden=lambda params, *args: bind(params).row_hidden(*args),
    response_routed=lambda params, *args: bind(params).response_routed(*args),
    row_routed=lambda params, *args: bind(params).row_routed(*args),
    decoding_params=decoding_params,
    prefill=on_layers(Transformer.prefill),
    rotary=functools.partial(make_rotary_tables, config),
    decode=on_layers(Transformer.decode),
    mesh=layout.mesh,
    decoding_shardings=layout.decoding_shardings,
  )


def cast_to_decode(params: Params, config: TransformerConfig) -> Params:
  """Casts parameters to `compute_dtype` for decoding, except 8-bit ones and those in `_WIDE`."""

  def cast(path, w):
    is_wide = jax.tree_util.keystr(path[-1:], simple=True) in _WIDE
    return w if is_wide or w.dtype.itemsize == 1 else w.astype(config.compute_dtype)

  return jax.tree_util.tree_map_with_path(cast, params)
