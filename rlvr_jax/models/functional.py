"""The boundary between flax and the rest of the package: plain dicts in, arrays out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from rlvr_jax.models.layout import ONE_DEVICE, Layout
from rlvr_jax.models.linear import merged
from rlvr_jax.models.transformer import Transformer, TransformerConfig
from rlvr_jax.types import Array, Head, Params, Prompts, Rows


def all_trained(trained: Params, frozen: Params) -> Params:
  """The parameters of a network without frozen parameters."""
  del frozen
  return trained


class Model(NamedTuple):
  """A policy as pure functions of a nested dict of arrays."""

  config: TransformerConfig
  init: Callable[[Array], Params]  # key → parameters, layers stacked on their first axis
  head: Callable[[Params], Head]
  response_hidden: Callable[[Params, Prompts, Array], Array]
  row_hidden: Callable[[Params, Array, Rows], Array]
  decoding_params: Callable[[Params], Params]  # as `start_decoding` and `head` best take them
  start_decoding: Callable  # (params, prompts, group_size, length), see Transformer
  # (trained, frozen) → the parameters that the functions above take; see `lora.adapted`.
  combine: Callable[[Params, Params], Params] = all_trained
  mesh: Mesh | None = None  # over which its batches are split


def transformer(config: TransformerConfig, layout: Layout = ONE_DEVICE) -> Model:
  """The transformer of `config` as pure functions; see `Transformer` for shapes."""
  build = lambda key: Transformer(config, nnx.Rngs(key), layout)
  # Splitting off `Param` alone raises if the module holds any other state.
  graph, _ = nnx.split(jax.eval_shape(build, jax.random.key(0)), nnx.Param)
  bind = lambda params: nnx.merge(graph, params)

  def decoding_params(params):
    # Norm scales stay as they are: training applies them in at least float32.
    cast = lambda path, w: w if path[-1].key == "scale" else w.astype(config.compute_dtype)
    return layout.gather(jax.tree_util.tree_map_with_path(cast, merged(params)))

  return Model(
    config=config,
    init=lambda key: nnx.to_pure_dict(nnx.split(build(key), nnx.Param)[1]),
    head=lambda params: bind(params).head(),
    response_hidden=lambda params, *args: bind(params).response_hidden(*args),
    row_hidden=lambda params, *args: bind(params).row_hidden(*args),
    decoding_params=decoding_params,
    start_decoding=lambda params, *args: bind(params).start_decoding(*args),
    mesh=layout.mesh,
  )
