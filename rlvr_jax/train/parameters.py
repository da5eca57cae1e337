"""Parameters of a run before its first update: read, initialized, and placed on the devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.data import encode_solutions, problem_batches
from rlvr_jax.models.huggingface import load_params
from rlvr_jax.ops.keys import key_for
from rlvr_jax.train import sharding
from rlvr_jax.train.adapters import first_adapters
from rlvr_jax.train.build import Parts, warm_start_optimizer
from rlvr_jax.train.checkpoint import CheckpointError
from rlvr_jax.train.step import initial_state
from rlvr_jax.types import Array, Params, Prompts, TrainState


class Frozen(NamedTuple):
  """The parameters that are not trained, on the devices; {} where all are trained."""

  trainer: Params  # where updates are made
  sampler: Params  # where rollouts are generated


def network_params(parts: Parts) -> Params:
  """All parameters: those of `config.model.checkpoint`, or else freshly drawn ones, sharded."""
  checkpoint = parts.config.model.checkpoint
  if checkpoint:
    try:
      return load_params(checkpoint, parts.abstract_base)
    except ValueError as error:
      raise CheckpointError(f"config.model.checkpoint = {checkpoint!r}: {error}") from error
  shardings = jax.tree.map(lambda x: x.sharding, parts.abstract_base)
  init = jax.jit(parts.model.init, out_shardings=shardings)
  return init(key_for(parts.config.seed, "init"))


def load_frozen(parts: Parts) -> Frozen:
  """Reads or initializes the frozen parameters, once for a run."""
  if parts.lora is None:
    return Frozen({}, {})
  base = network_params(parts)
  if parts.generation_mesh is parts.mesh:
    return Frozen(base, base)
  own = jax.tree.map(lambda x: x.sharding, sharding.placed(base, parts.generation_mesh))
  return Frozen(base, jax.device_put(base, own))


def initial_params(parts: Parts) -> Params:
  """What is trained, before the first step: all parameters, or adapters beside them."""
  if parts.lora is None:
    return network_params(parts)
  try:
    return first_adapters(parts.config, parts.model.config, parts.abstract_base, parts.mesh)
  except ValueError as error:
    raise CheckpointError(str(error)) from error


def first_state(parts: Parts, params: Params, initial_entropy: float) -> TrainState:
  """The train state before the first update; the entropy is in nats per token."""
  shardings = jax.tree.map(lambda x: x.sharding, parts.abstract_state)
  build_state = jax.jit(functools.partial(initial_state, parts.method), out_shardings=shardings)
  return build_state(params, jnp.float32(initial_entropy))


def supervised_state(parts: Parts) -> tuple[Params, Any]:
  """Parameters and optimizer state before the warm start."""
  params = initial_params(parts)
  optimizer = warm_start_optimizer(parts.config)
  shapes = jax.eval_shape(optimizer.init, params)
  init = jax.jit(optimizer.init, out_shardings=sharding.state_shardings(shapes, parts.mesh))
  return params, init(params)


def supervised_batches(parts: Parts) -> Iterator[tuple[Prompts, Array, Array]]:
  """Warm-start batches on the devices, for ever: prompts, solutions i32[P, T], lengths i32[P]."""
  config = parts.config
  batches = problem_batches(
    parts.task.warm_start, batch_size=config.warm_start.batch_size, seed=config.seed
  )
  for problems in batches:
    solutions = encode_solutions(problems, parts.tokenizer, config.max_response_length)
    yield parts.to_devices((parts.encode(problems), *solutions))
