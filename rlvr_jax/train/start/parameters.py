"""Parameters on the devices: initialized, or loaded from a model or from a run's checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from rlvr_jax.data import encode_demonstrations, problem_batches
from rlvr_jax.models.huggingface import load_params
from rlvr_jax.models.presets import given_overrides
from rlvr_jax.ops.keys import key_for
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.checkpointing.checkpoint_files import (
  CheckpointError,
  read_field,
  read_params,
  saved_steps,
)
from rlvr_jax.train.checkpointing.workdir import read_config
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.adapters import first_adapters
from rlvr_jax.train.setup.build import Parts, warm_start_optimizer
from rlvr_jax.types import Params, Prompts, TrainState
from rlvr_jax.update.step import initial_state


class Frozen(NamedTuple):
  """The parameters that are not trained, on the devices; {} if all are trained."""

  trainer: Params  # where updates are made
  sampler: Params  # where rollouts are generated


def network_params(parts: Parts) -> Params:
  """All parameters, sharded: those of `config.model.checkpoint`, or else randomly initialized."""
  checkpoint = parts.config.model.checkpoint
  if checkpoint:
    try:
      sparse_layers = parts.model.config.sparse_layers
      return load_params(checkpoint, parts.placement.base, sparse_layers=sparse_layers)
    except ValueError as error:
      raise CheckpointError(f"config.model.checkpoint = {checkpoint!r}: {error}") from error
  shardings = jax.tree.map(lambda x: x.sharding, parts.placement.base)
  init = jax.jit(parts.model.init, out_shardings=shardings)
  return init(key_for(parts.config.seed, "init"))


def load_frozen(parts: Parts) -> Frozen:
  """Loads or initializes the frozen parameters; call it once per run."""
  if parts.lora is None:
    return Frozen({}, {})
  base = network_params(parts)
  mesh, generation_mesh = parts.placement.mesh, parts.placement.generation_mesh
  if sharding.has_same_devices(generation_mesh, mesh):
    return Frozen(base, base)
  shardings = jax.tree.map(lambda x: x.sharding, sharding.add_shardings(base, generation_mesh))
  return Frozen(base, jax.device_put(base, shardings))


def initial_params(parts: Parts) -> Params:
  """The trained parameters before the first step: all parameters, or the adapters only."""
  if parts.lora is None:
    return network_params(parts)
  try:
    return first_adapters(
      parts.lora,
      parts.config.lora.adapters,
      parts.model.config,
      parts.placement.base,
      parts.placement.mesh,
      seed=parts.config.seed,
    )
  except ValueError as error:
    raise CheckpointError(str(error)) from error


def first_state(parts: Parts, params: Params, initial_entropy: float) -> TrainState:
  """The train state before the first update; `initial_entropy` in nats per token."""
  shardings = jax.tree.map(lambda x: x.sharding, parts.placement.state)
  build_state = jax.jit(functools.partial(initial_state, parts.method), out_shardings=shardings)
  state = build_state(params, jnp.float32(initial_entropy))
  if not parts.config.start.optimizer:
    return state
  folder = start_folder(parts.config.start.checkpoint)
  moments = read_field("opt_state", folder, parts.placement.state.opt_state)
  return dataclasses.replace(state, opt_state=_with_first_rate(moments, state.opt_state))


def _with_first_rate(moments: Any, first: Any) -> Any:
  """An optimizer's state whose learning rate is that of the first update, as metrics report it."""
  scheduled = lambda node: isinstance(node, optax.ScaleByScheduleState)
  choose = lambda node, new: new if scheduled(node) else node
  return jax.tree.map(choose, moments, first, is_leaf=scheduled)


def supervised_state(parts: Parts) -> tuple[Params, Any]:
  """Parameters and optimizer state before the warm start."""
  params = initial_params(parts)
  optimizer = warm_start_optimizer(parts.config.warm_start)
  shapes = jax.eval_shape(optimizer.init, params)
  init = jax.jit(
    optimizer.init, out_shardings=sharding.state_shardings(shapes, parts.placement.mesh)
  )
  return params, init(params)


def supervised_batches(parts: Parts) -> Iterator[tuple[Prompts, np.ndarray, np.ndarray]]:
  """Endless warm-start batches on the host: prompts, solutions i32[P, T], mask bool[P, T]."""
  config = parts.config
  batches = problem_batches(
    parts.task.warm_start, batch_size=config.warm_start.batch_size, seed=config.seed
  )
  for problems in batches:
    solutions = encode_demonstrations(problems, parts.tokenizer, config.max_response_length)
    yield parts.encode(problems), *solutions


# --- parameters of a checkpoint -------------------------------------------------------------------


def check_start(start: ml_collections.ConfigDict, adapters: str, workdir: Path) -> None:
  """Raises CheckpointError unless `config.start` can be used, or its policy is in the workdir.

  Args:
    start: `config.start`.
    adapters: `config.lora.adapters`.
    workdir: of the run.
  """
  if start.optimizer and not start.checkpoint:
    raise CheckpointError(
      "config.start.optimizer = True has no effect without config.start.checkpoint; set that to"
      " another run's WORKDIR/checkpoints/STEP"
    )
  if start.checkpoint and adapters:
    raise CheckpointError(
      f"config.start.checkpoint = {start.checkpoint!r} and config.lora.adapters ="
      f" {adapters!r} both give the first parameters; set one of them to ''"
    )
  if start.checkpoint and not (workdir / "checkpoints").exists():
    start_folder(start.checkpoint)


def start_folder(checkpoint: str) -> Path:
  """The folder of `config.start.checkpoint`; CheckpointError if there is none."""
  try:
    return checkpoint_folder(checkpoint, field="config.start.checkpoint")
  except ValueError as error:
    raise CheckpointError(str(error)) from error


def checkpoint_folder(checkpoint: str, *, field: str = "--checkpoint") -> Path:
  """The folder WORKDIR/checkpoints/STEP that a field names; the last STEP if it names a run.

  Raises:
    ValueError: there is no checkpoint, or the path is not local.
  """
  folder = parse_path(field, checkpoint)
  of_run = folder if folder.name == "checkpoints" else folder / "checkpoints"
  if of_run.is_dir():
    steps = saved_steps(of_run)
    folder = of_run / str(steps[-1]) if steps else of_run
  if not folder.name.isdigit() or not folder.is_dir():
    raise ValueError(
      f"{field}={checkpoint} has no checkpoint; give the --workdir of a run, or one of its"
      " checkpoints, WORKDIR/checkpoints/STEP"
    )
  return folder


def load_policy(parts: Parts, folder: Path | None) -> tuple[Params, int]:
  """(trained parameters of a policy, its number of updates).

  Args:
    parts: of a configuration with the policy's network and adapters.
    folder: from `checkpoint_folder`; None for the policy before training.
  Raises:
    CheckpointError: the checkpoint is damaged, or of a run with another network, adapters or
      tokenizer.
    WorkdirError: the run's configuration is damaged.
  """
  if folder is None:
    return initial_params(parts), 0
  _check_same_policy(parts, folder.parent.parent / "config.json")
  return read_params(folder, parts.placement.state.params), int(folder.name)


def _check_same_policy(parts: Parts, path: Path) -> None:
  """Raises if a run's parameters would compute another function under this configuration."""
  if not path.exists():
    return  # a checkpoint that was copied without its run
  theirs, ours = read_config(path), json.loads(parts.config.to_json_best_effort())
  fields = [("model", name) for name in ("preset", "checkpoint")]
  fields += [("lora", name) for name in ("rank", "alpha", "targets")]
  try:
    values = {f"{a}.{b}": (theirs.get(a, {}).get(b), ours[a][b]) for a, b in fields}
    values["tokenizer"] = (theirs["tokenizer"], ours["tokenizer"])
    values["model.overrides"] = (given_overrides(theirs["model"]), given_overrides(ours["model"]))
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise CheckpointError(
      f"{path} is not the configuration of a run ({type(error).__name__}: {error}). Put it back, or"
      " copy the checkpoint to a folder without it"
    ) from error
  differing = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
  if differing:
    raise CheckpointError(
      f"the run of {path.parent} has another network, adapters or tokenizer: {differing} (in the"
      " run, in this configuration); set config to the run's values"
    )
