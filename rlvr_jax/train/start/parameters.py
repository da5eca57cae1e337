"""The start of a run: its first state, its demonstrations, and the policy of a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from rlvr_jax.data import (
  ProblemSource,
  Tokenizer,
  encode_demonstrations,
  encode_prompts,
  problem_batches,
)
from rlvr_jax.storage.files import JSON
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.checkpointing.checkpoint_files import (
  CheckpointError,
  read_field,
  read_params,
  saved_steps,
)
from rlvr_jax.train.checkpointing.workdir import read_config
from rlvr_jax.train.setup.initial_params import InitialParams, network_identity
from rlvr_jax.types import BatchShape, Params, Prompts, TrainState
from rlvr_jax.update.objective import Method
from rlvr_jax.update.step import initial_state


def first_state(
  method: Method,
  abstract: TrainState,
  params: Params,
  initial_entropy: float,
  *,
  moments_of: Path | None = None,
) -> TrainState:
  """The train state before the first update.

  Args:
    method: the method of the run.
    abstract: the state's shapes, dtypes and shardings.
    params: the trained parameters.
    initial_entropy: the initial entropy of the policy, nats per token.
    moments_of: the checkpoint whose optimizer's moments the state takes; None: no moments.
  """
  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  build_state = jax.jit(functools.partial(initial_state, method), out_shardings=shardings)
  state: TrainState = build_state(params, jnp.float32(initial_entropy))
  if moments_of is None:
    return state
  moments = read_field("opt_state", moments_of, abstract.opt_state)
  return dataclasses.replace(state, opt_state=_with_first_rate(moments, state.opt_state))


def _with_first_rate(moments: optax.OptState, first: optax.OptState) -> optax.OptState:
  """A loaded optimizer state whose learning-rate schedule starts again at the first update.

  Args:
    moments: the optimizer's state of another run.
    first: the optimizer's state before the first update.
  """
  scheduled = lambda node: isinstance(node, optax.ScaleByScheduleState)
  choose = lambda node, new: new if scheduled(node) else node
  return jax.tree.map(choose, moments, first, is_leaf=scheduled)


def supervised_batches(
  demonstrations: ProblemSource,
  tokenizer: Tokenizer,
  shape: BatchShape,
  *,
  batch_size: int,
  seed: int,
) -> Iterator[tuple[Prompts, np.ndarray, np.ndarray]]:
  """Endless warm-start batches on the host: prompts, solutions i32[P, T], mask bool[P, T].

  Args:
    demonstrations: problems with solutions.
    tokenizer: the tokenizer of the run.
    shape: the shape of a batch, with the limits on length.
    batch_size: P.
    seed: the seed of the run.
  """
  for problems in problem_batches(demonstrations, batch_size=batch_size, seed=seed):
    solutions = encode_demonstrations(problems, tokenizer, shape.max_response_length)
    yield encode_prompts(problems, tokenizer, shape.max_prompt_length), *solutions


# --- parameters of a checkpoint -------------------------------------------------------------------


def check_start(start: ml_collections.ConfigDict, adapters: str, workdir: Path) -> None:
  """Raises CheckpointError if `config.start` cannot be used.

  A run that has checkpoints of its own no longer needs the policy of `config.start.checkpoint`.

  Args:
    start: `config.start`.
    adapters: `config.lora.adapters`.
    workdir: the workdir of the run.
  """
  if start.optimizer and not start.checkpoint:
    raise CheckpointError(
      "config.start.optimizer = True has no effect without config.start.checkpoint; set"
      " config.start.checkpoint to another run's WORKDIR/checkpoints/STEP"
    )
  if start.checkpoint and adapters:
    raise CheckpointError(
      f"config.start.checkpoint = {start.checkpoint!r} and config.lora.adapters ="
      f" {adapters!r} both give the first parameters; set one of them to ''"
    )
  if start.checkpoint and not (workdir / "checkpoints").exists():
    start_folder(start.checkpoint)


def start_folder(checkpoint: str, step: int | None = None) -> Path:
  """The folder of `config.start.checkpoint`.

  Args:
    checkpoint: the field; it may name a run, which may go on.
    step: the step that a run has begun with; None for the run's last step.
  Raises:
    CheckpointError: there is no such checkpoint.
  """
  try:
    folder = checkpoint_folder(checkpoint, field="config.start.checkpoint")
  except ValueError as error:
    raise CheckpointError(str(error)) from error
  folder = folder if step is None else folder.with_name(str(step))
  if not folder.is_dir():
    raise CheckpointError(
      f"config.start.checkpoint = {checkpoint!r}: this run has begun with its checkpoint {step},"
      " which is gone; to begin with a later one, use another --workdir"
    )
  return folder


def checkpoint_folder(checkpoint: str, *, field: str = "--checkpoint") -> Path:
  """The folder WORKDIR/checkpoints/STEP that a field names; the last STEP if the field names a run.

  Raises:
    ValueError: there is no checkpoint.
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


def load_policy(initial: InitialParams, folder: Path | None) -> tuple[Params, int]:
  """Loads (trained parameters of a policy, number of updates of the policy).

  Args:
    initial: the initial parameters of a run with the policy's network and adapters.
    folder: the result of `checkpoint_folder`; None for the policy before training.
  Raises:
    CheckpointError: the checkpoint is damaged, or of a run with another network, adapters or
      tokenizer.
    WorkdirError: the run's configuration is damaged.
  """
  if folder is None:
    return initial.trained(), 0
  _check_same_network(initial.identity, folder.parent.parent / "config.json")
  return read_params(folder, initial.placement.state.params), int(folder.name)


def _check_same_network(ours: Mapping[str, JSON], path: Path) -> None:
  """Raises CheckpointError if a run's network, adapters or tokenizer differ or are not known.

  Args:
    ours: the result of `network_identity`.
    path: the run's configuration.
  """
  if not path.exists():
    return  # a checkpoint that was copied without its run
  config = read_config(path)
  try:
    theirs = network_identity(config)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise CheckpointError(
      f"{path} is not the configuration of a run ({type(error).__name__}: {error}). Put back a copy"
      " of the run's config.json, or copy the checkpoint to a folder without config.json"
    ) from error
  differing = {name: (theirs[name], ours[name]) for name in ours if theirs[name] != ours[name]}
  if differing:
    raise CheckpointError(
      f"the run of {path.parent} has another network, adapters or tokenizer. Differing fields, each"
      f" with (that run's value, this configuration's value): {differing}. Set them to that run's"
      " values"
    )
