"""The teachers of a run, from `config.teacher`: whose distribution the policy learns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import ml_collections
from jax.sharding import Mesh

from rlvr_jax import distillation, specs
from rlvr_jax.data import Tokenizer
from rlvr_jax.data.huggingface_tokenizer import HuggingFaceTokenizer
from rlvr_jax.losses import Loss
from rlvr_jax.models.functional import Model, transformer
from rlvr_jax.models.huggingface import load_params, open_tensors
from rlvr_jax.models.huggingface_config import checkpoint_config
from rlvr_jax.models.presets import model_settings
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_between
from rlvr_jax.sampling import LEAST_TEMPERATURE
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.checkpointing.checkpoint_files import CheckpointError, read_params, saved_steps
from rlvr_jax.train.checkpointing.workdir import read_config
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.tokenizers import make_tokenizer
from rlvr_jax.types import Params
from rlvr_jax.update.teaching import Teaching

INITIAL, BASE = "initial", "base"  # in place of a checkpoint
_FIELD = "config.teacher.checkpoint"


class Teacher(NamedTuple):
  """One teacher, before its parameters are read.

  Attributes:
    name: for metrics and messages.
    model: its functions, on the mesh of updates.
    checkpoint: a folder; or `INITIAL`, the policy before the first update, or `BASE`, the network
      without adapters.
    params: shapes, dtypes and shardings of parameters that only the teacher has; {} if it has none.
    read: reads these; None if there are none.
    check: raises ValueError unless the checkpoint has them, without reading weights, and another
      ValueError unless its tokenizer is this one's.
  """

  name: str
  model: Model
  checkpoint: str
  params: Params
  read: Callable[[], Params] | None
  check: Callable[[Tokenizer], None]

  def policy(self, own: Params, initial: Params, frozen: Params) -> tuple[Params, Params]:
    """(trained, frozen) parameters, as `model.combine` takes them.

    Args:
      own: from `read`.
      initial: the trained parameters before the first update.
      frozen: the parameters that are not trained.
    """
    of_run = {INITIAL: (initial, frozen), BASE: (frozen, {})}
    return of_run.get(self.checkpoint, (own, {}))


def make_teaching(
  name: str,
  settings: ml_collections.ConfigDict,
  *,
  policy_temperature: float,
  vocab_size: int,
  loss: tuple[str, Loss],
) -> Teaching | None:
  """The part of the teacher in an update; None without one.

  Args:
    name: `config.distillation`.
    settings: `config.teacher`.
    policy_temperature: `config.policy_temperature`.
    vocab_size: V.
    loss: `config.loss`, and what it has made.
  Raises:
    ValueError: there is a teacher without distillation or the other way round, a number is out of
      range, or the loss takes one coefficient per response where each token has its own.
  """
  made = specs.make("config.distillation", distillation, name, distillation.Distillation)
  for field in ("weight", "reward_weight"):
    check_between("config.teacher", field, settings[field], low=0.0)
  temperature = settings.temperature
  if temperature is None:
    temperature = policy_temperature
  check_between("config.teacher", "temperature", temperature, low=LEAST_TEMPERATURE)
  if made.distills and not settings.checkpoint:
    raise ValueError(
      f"config.distillation = {name!r} needs a teacher; set {_FIELD} to WORKDIR/checkpoints/STEP of"
      f" a run, a folder in Hugging Face's layout, or {INITIAL!r}, or set config.distillation ="
      " 'none'"
    )
  if not made.distills and settings.checkpoint:
    raise ValueError(
      f"{_FIELD} = {settings.checkpoint!r} has no effect with config.distillation = {name!r}; set"
      " that to 'opd' or another one, or the checkpoint to ''"
    )
  if not made.distills:
    return None
  if made.divergence is not None and made.divergence.top_k > vocab_size:
    raise ValueError(
      f"config.distillation = {name!r}: top_k = {made.divergence.top_k} is above the vocabulary of"
      f" {vocab_size} tokens; lower it, or set support = 'all' and top_k = 0"
    )
  if made.advantage is not None and loss[1].of_responses:
    raise ValueError(
      f"config.distillation = {name!r} gives each token its own advantage, but config.loss ="
      f" {loss[0]!r} is of full responses, and needs one number for each; choose another loss, such"
      " as ppo_clip or gspo, or config.distillation = 'opd_score'"
    )
  return Teaching(made, settings.weight, settings.reward_weight, temperature, names=("teacher",))


def make_teachers(
  settings: ml_collections.ConfigDict,
  model: Model,
  mesh: Mesh,
  make_model: Callable[[TransformerConfig], Model],
) -> tuple[Teacher, ...]:
  """The teachers of a run; none if `config.teacher` names none.

  Args:
    settings: `config.teacher`.
    model: of the policy, on `mesh`.
    mesh: of updates.
    make_model: a network → its functions on `mesh`.
  Raises:
    ValueError: there is no such checkpoint, or its vocabulary is not the policy's.
  """
  if not settings.checkpoint:
    return ()
  return (make_teacher("teacher", settings.checkpoint, model, mesh, make_model),)


def make_teacher(
  name: str,
  checkpoint: str,
  model: Model,
  mesh: Mesh,
  make_model: Callable[[TransformerConfig], Model],
) -> Teacher:
  """One teacher; arguments and errors as those of `make_teachers`."""
  if checkpoint == INITIAL:
    return Teacher(name, model, checkpoint, {}, None, lambda tokenizer: None)
  if checkpoint == BASE:
    plain = transformer(model.config, sharding.make_layout(mesh))
    return Teacher(name, plain, checkpoint, {}, None, lambda tokenizer: None)
  folder = parse_path(_FIELD, checkpoint)
  is_run = folder.name.isdigit() and folder.parent.name == "checkpoints"
  if not is_run and (folder / "checkpoints").is_dir():
    raise ValueError(
      f"{_FIELD} = {checkpoint!r} is a run; name one of its checkpoints, so that a resumed run has"
      f" the same teacher: {folder}/checkpoints/STEP, STEP one of"
      f" {saved_steps(folder / 'checkpoints')}"
    )
  network = _network_of_run(folder) if is_run else _published_network(checkpoint)
  if network.vocab_size != model.config.vocab_size:
    raise ValueError(
      f"{_FIELD} = {checkpoint!r} has a vocabulary of {network.vocab_size} tokens, the policy one"
      f" of {model.config.vocab_size}; choose a teacher of the same vocabulary and tokenizer"
    )
  own = make_model(_computed_as(network, model.config))
  params = sharding.add_shardings(jax.eval_shape(own.init, jax.random.key(0)), mesh)
  sparse = network.sparse_layers
  if is_run:
    read: Callable[[], Params] = functools.partial(read_params, folder, params)
    find = lambda: None
    others = functools.partial(_tokenizer_of_run, folder)
  else:
    read = functools.partial(load_params, checkpoint, params, sparse_layers=sparse)
    find = lambda: open_tensors(checkpoint, params, sparse)
    others = functools.partial(HuggingFaceTokenizer, checkpoint)

  def check(tokenizer: Tokenizer) -> None:
    try:
      find()
      theirs = others()
    except (ImportError, OSError, ValueError) as error:
      raise ValueError(f"{_FIELD} = {checkpoint!r}: {error}") from error
    check_same_tokens(f"{_FIELD} = {checkpoint!r}", theirs, tokenizer)

  def read_checked() -> Params:
    try:
      return read()
    except ValueError as error:
      raise CheckpointError(f"{_FIELD} = {checkpoint!r}: {error}") from error

  return Teacher(name, own, checkpoint, params, read_checked, check)


def _computed_as(network: TransformerConfig, policy: TransformerConfig) -> TransformerConfig:
  """The network, computed in the dtype and the precision of the policy's."""
  return dataclasses.replace(
    network,
    compute_dtype=policy.compute_dtype,
    matmul_precision=policy.matmul_precision,
    attention="auto",
    expert_products="auto",
  )


def _published_network(checkpoint: str) -> TransformerConfig:
  """The network of a folder in Hugging Face's layout."""
  try:
    return checkpoint_config(checkpoint)
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{_FIELD} = {checkpoint!r} is neither WORKDIR/checkpoints/STEP of a run, nor a folder in"
      f" Hugging Face's layout ({error}), nor {INITIAL!r}, nor {BASE!r}"
    ) from error


def _network_of_run(folder: Path) -> TransformerConfig:
  """The network of the run that has saved a checkpoint."""
  config = _config_of_run(folder)
  try:
    rank, network = config["lora"]["rank"], model_settings(config["model"])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{_FIELD} = '{folder}': its run's config.json: {error}") from error
  if rank:
    raise ValueError(
      f"{_FIELD} = '{folder}' has adapters alone; export that run with --mode=export, and name the"
      " folder of the export"
    )
  return network


def _tokenizer_of_run(folder: Path) -> Tokenizer:
  """The tokenizer of the run that has saved a checkpoint."""
  config = _config_of_run(folder)
  prompts = ml_collections.ConfigDict(config["prompts"])
  return make_tokenizer(config["tokenizer"], prompts, config["model"]["checkpoint"])


def _config_of_run(folder: Path) -> Mapping:
  path = folder.parent.parent / "config.json"
  if not folder.is_dir() or not path.exists():
    steps = saved_steps(folder.parent) if folder.parent.is_dir() else []
    raise ValueError(
      f"{_FIELD} = '{folder}' has no checkpoint of a run with a config.json; its steps: {steps}"
    )
  return read_config(path)


def check_same_tokens(owner: str, theirs: Tokenizer, ours: Tokenizer) -> None:
  """Raises ValueError unless every token of `ours` has the same id in `theirs`.

  Args:
    owner: field and value that name the teacher.
    theirs: the teacher's tokenizer.
    ours: the policy's.
  """
  found, expected = theirs.vocabulary(), ours.vocabulary()
  differing = sum(found.get(token) != number for token, number in expected.items())
  if differing:
    token = next(token for token, number in expected.items() if found.get(token) != number)
    raise ValueError(
      f"{owner} has another tokenizer ({type(theirs).__name__}) than the policy: {differing} of"
      f" {len(expected)} tokens differ, such as {token!r}, id {expected[token]} of the policy and"
      f" {found.get(token)} of the teacher; choose a teacher of the same tokenizer"
    )
