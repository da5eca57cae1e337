"""The only boundary between flax and the rest: plain dict parameters in, arrays out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx

from rlvr_jax.models.transformer import Transformer, TransformerConfig
from rlvr_jax.types import Array, Head, Params, Prompts


class Model(NamedTuple):
  """A policy as pure functions of a nested dict of arrays."""

  config: TransformerConfig
  init: Callable[[Array], Params]  # key → parameters, layers stacked on their first axis
  head: Callable[[Params], Head]
  response_hidden: Callable[[Params, Prompts, Array], Array]
  start_decoding: Callable  # (params, prompts, group_size, max_new_tokens), see Transformer


def transformer(
  config: TransformerConfig, constrain: Callable[[Array], Array] = lambda x: x
) -> Model:
  """The transformer of `config` as pure functions; see `Transformer` for shapes.

  Args:
    config: the network's settings.
    constrain: applied to the residual stream [P, ...] after every layer; on a mesh it keeps
      activations sharded on prompts.
  """
  build = lambda key: Transformer(config, nnx.Rngs(key), constrain)
  # Splitting off `Param` alone raises if the module holds any other state.
  graph, _ = nnx.split(jax.eval_shape(build, jax.random.key(0)), nnx.Param)
  bind = lambda params: nnx.merge(graph, params)
  return Model(
    config=config,
    init=lambda key: nnx.to_pure_dict(nnx.split(build(key), nnx.Param)[1]),
    head=lambda params: bind(params).head(),
    response_hidden=lambda params, *args: bind(params).response_hidden(*args),
    start_decoding=lambda params, *args: bind(params).start_decoding(*args),
  )
