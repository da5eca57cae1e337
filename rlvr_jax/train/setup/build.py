"""Builds the parts of a run from its configuration; all errors are found before compilation."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import optax
from jax.sharding import Mesh

from rlvr_jax import advantages, geometry, losses, reweighting, specs
from rlvr_jax.advantages.masses import gradient_masses
from rlvr_jax.data import Problem, Task, Tokenizer, encode_prompts, tasks
from rlvr_jax.models import lora
from rlvr_jax.models.functional import Model, transformer
from rlvr_jax.models.presets import model_settings
from rlvr_jax.ops.aggregate import AGGREGATIONS
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.ops.veto import Veto, negative_advantage_veto
from rlvr_jax.rollouts import staleness
from rlvr_jax.rollouts.packing import RowLayout, with_rows
from rlvr_jax.rollouts.store import StoreError
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup import checks
from rlvr_jax.train.setup.adapters import make_lora
from rlvr_jax.train.setup.behavior_sources import Sources, make_sources
from rlvr_jax.train.setup.engines import make_engine
from rlvr_jax.train.setup.grading import make_outcome_policy, with_graders
from rlvr_jax.train.setup.problem_filters import fitting, warn_of_long_texts
from rlvr_jax.train.setup.programs import (
  Programs,
  Sampler,
  abstract_state,
  choose_row_attention,
  make_gram,
  make_programs,
  make_row_layout,
  trained_params,
)
from rlvr_jax.train.setup.tokenizers import make_tokenizer
from rlvr_jax.types import Params, Prompts, TrainBatch, TrainState
from rlvr_jax.update import learning_rate, optimizer
from rlvr_jax.update.objective import REFERENCE_KL_ESTIMATORS, Method


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of a run, before anything is placed on a device."""

  config: ml_collections.ConfigDict
  mesh: Mesh
  task: Task
  tokenizer: Tokenizer
  model: Model
  method: Method
  schedule: staleness.Schedule
  sources: Sources  # the policies that sample the rollouts of every batch
  abstract_state: TrainState  # shapes, dtypes, shardings
  programs: Programs

  def encode(self, problems: Sequence[Problem]) -> Prompts:
    return encode_prompts(problems, self.tokenizer, self.config.max_prompt_length)

  def to_devices(self, tree: Any) -> Any:
    return sharding.to_devices(tree, sharding.batch_sharding(self.mesh))

  def batch_to_devices(self, batch: TrainBatch) -> TrainBatch:
    """A batch of NumPy arrays, laid into rows."""
    return sharding.batch_to_devices(with_rows(batch, self.row_layout), self.mesh)

  @functools.cached_property
  def row_layout(self) -> RowLayout:
    return make_row_layout(self.config, self.model.config.attention, self.mesh)

  def to_generation(self, tree: Any) -> Any:
    """As `to_devices`, on the devices that generate rollouts."""
    return sharding.to_devices(tree, sharding.batch_sharding(self.generation_mesh))

  @functools.cached_property
  def generation_mesh(self) -> Mesh:
    """The mesh that generates rollouts: `mesh` itself, or that of `config.generation_mesh`."""
    return make_generation_mesh(self.config, self.mesh)

  @functools.cached_property
  def lora(self) -> lora.LoraSettings | None:
    """Settings of the trained adapters; None if all parameters are trained."""
    return make_lora(self.config)

  @functools.cached_property
  def abstract_base(self) -> Params:
    """Shapes, dtypes and shardings of all parameters of the network."""
    return abstract_params(self.model, self.mesh)

  @property
  def abstract_frozen(self) -> Params:
    """Shapes, dtypes and shardings of the frozen parameters; {} if all are trained."""
    return {} if self.lora is None else self.abstract_base

  @property
  def gap_prompts(self) -> int:
    """Number of groups per source whose log-probabilities are compared."""
    return self.generation_mesh.shape["data"] * self.generation_mesh.shape["fsdp"]


def build(
  config: ml_collections.ConfigDict,
  *,
  task: Task | None = None,
  tokenizer: Tokenizer | None = None,
  mesh: Mesh | None = None,
) -> Parts:
  """All parts of the run that `config` describes.

  Args:
    config: see `configs/base.py`.
    task: instead of `config.task`, for problems made by the caller.
    tokenizer: instead of `config.tokenizer`.
    mesh: instead of `config.mesh` on the available devices; for shapes and compilation only.
  Raises:
    ValueError: an invalid setting, with the field, its value, what is allowed and how to fix it.
  """
  mesh = mesh or sharding.make_mesh(**config.mesh)
  config = config.copy_and_resolve_references()
  config.mesh.update(mesh.shape)  # a run is resumed with the sizes that -1 had when it began
  checks.check_shapes(config, mesh)
  policy = make_outcome_policy(config)
  tokenizer = tokenizer or make_tokenizer(config)
  model = make_model(config, mesh, tokenizer.vocab_size)
  checks.check_heads(model.config, mesh)
  warn_of_long_texts(config)
  checks.check_samplings(config, model.config.vocab_size)
  schedule = make_schedule(config)
  sampler = make_sampler(config, model, mesh, tokenizer)
  sources = sources_of(config, sampler, tokenizer, pins={})
  method = make_method(config, model, mesh)._replace(sources=tuple(s.name for s in sources))
  base = abstract_params(model, mesh)
  warm_start = warm_start_optimizer(config)
  checks.check_optimizers(config, method.optimizer, warm_start, trained_params(config, base))
  state = abstract_state(config, method, base, mesh)
  checks.check_update(config, mesh, method, state, {} if make_lora(config) is None else base)
  checks.check_rewards(config, method, policy, sources)
  task = fitting(config, with_graders(config, task or make_task(config)), tokenizer)
  programs = make_programs(
    config,
    tokenizer,
    method,
    sources,
    state,
    mesh=mesh,
    sampler=sampler,
    warm_start_optimizer=warm_start,
  )
  return Parts(
    config=config,
    mesh=mesh,
    task=task,
    tokenizer=tokenizer,
    model=model,
    method=method,
    schedule=schedule,
    sources=sources,
    abstract_state=state,
    programs=programs,
  )


def make_sampler(
  config: ml_collections.ConfigDict, model: Model, mesh: Mesh, tokenizer: Tokenizer
) -> Sampler:
  """The mesh and model that generate rollouts: `mesh` and `model`, or those of another layout."""
  own = make_generation_mesh(config, mesh)
  if own is not mesh:
    checks.check_sampling_heads("config.generation_mesh", model.config, own.shape["tensor"])
  return Sampler(model if own is mesh else make_model(config, own, tokenizer.vocab_size), own)


def sources_of(
  config: ml_collections.ConfigDict,
  sampler: Sampler,
  tokenizer: Tokenizer,
  pins: Mapping[str, Any],
) -> Sources:
  """The sources of the rollouts of every batch; see `make_sources`."""
  engine_of = functools.partial(make_engine, config, tokenizer, group_size=config.batch.group_size)
  return make_sources(config, *sampler, tokenizer, engine_of, pins)


def with_sources_as_begun(parts: Parts, pins: Mapping[str, Any]) -> Parts:
  """The parts with the sources pinned as they were when the run began, see `Source.pin`."""
  config, tokenizer = parts.config, parts.tokenizer
  sampler = make_sampler(config, parts.model, parts.mesh, tokenizer)
  return dataclasses.replace(parts, sources=sources_of(config, sampler, tokenizer, pins))


def abstract_params(model: Model, mesh: Mesh) -> Params:
  """Shapes, dtypes and shardings of all parameters of the network."""
  return sharding.placed(jax.eval_shape(model.init, jax.random.key(0)), mesh)


def make_model(config: ml_collections.ConfigDict, mesh: Mesh, vocab_size: int) -> Model:
  settings = model_settings(config.model)
  if settings.vocab_size < vocab_size and config.model.checkpoint:
    raise ValueError(
      f"config.tokenizer = {config.tokenizer!r} has {vocab_size} tokens, config.model.checkpoint ="
      f" {config.model.checkpoint!r} only {settings.vocab_size}, so they do not match; set"
      " config.tokenizer = 'checkpoint', or to the folder of that model's tokenizer"
    )
  if settings.vocab_size < vocab_size:
    raise ValueError(
      f"config.model: vocab_size = {settings.vocab_size} is smaller than the tokenizer's"
      f" {vocab_size}; set config.model.overrides.vocab_size = {vocab_size}"
    )
  attention = choose_row_attention(config, settings, mesh)
  model = transformer(dataclasses.replace(settings, attention=attention), sharding.layout(mesh))
  return lora.adapted(model, make_lora(config))


def make_task(config: ml_collections.ConfigDict) -> Task:
  """The task of `config.task`: its problems and its grader."""
  name, kwargs = config.task.name, config.task.kwargs.to_dict()
  spec = specs.parse("config.task.name", name)
  if twice := sorted(spec.arguments.keys() & kwargs):
    raise ValueError(
      f"config.task.name = {name!r} and config.task.kwargs both set {', '.join(twice)}; set it in"
      " one of them"
    )
  spec = spec._replace(arguments={**kwargs, **spec.arguments})
  try:
    return specs.call(f"config.task.name = {name!r}", tasks, spec, Task)
  except OSError as error:
    field = _field_of(error.filename, "config.task.kwargs", kwargs)
    missing = f"{field} = {error.filename!r}: {error.strerror}"
    raise ValueError(missing if field else f"config.task.name = {name!r}: {error}") from error


def _field_of(value: Any, owner: str, fields: Mapping[str, Any]) -> str:
  """The dotted name of the field that has this text; "" if none has it."""
  for name, own in fields.items():
    if isinstance(own, Mapping) and (found := _field_of(value, f"{owner}.{name}", own)):
      return found
    if isinstance(own, str | os.PathLike) and os.fspath(own) == value:
      return f"{owner}.{name}"
  return ""


def make_schedule(config: ml_collections.ConfigDict) -> staleness.Schedule:
  """The staleness schedule of `config.schedule`."""
  prefix = f"config.schedule = {config.schedule!r}"
  of_run = dict(num_updates=config.num_updates, seed=config.seed)
  try:
    schedule = specs.make(
      "config.schedule", staleness, config.schedule, staleness.Schedule, **of_run
    )
  except StoreError as error:
    raise ValueError(f"{prefix}: {error}") from error
  if schedule.real_time and jax.process_count() > 1:
    raise ValueError(
      f"{prefix} needs all devices in one process, this run has {jax.process_count()}; choose"
      " simulated_asynchronous, or run one process"
    )
  own = config.generation_mesh
  separate = any(own[axis] for axis in sharding.AXES) and not own.get("same_devices")
  if schedule.real_time and math.prod(config.mesh.to_dict().values()) > 1 and not separate:
    # Two threads could dispatch programs that wait for each other on the same devices.
    raise ValueError(
      f"{prefix} on config.mesh = {config.mesh.to_dict()} needs separate devices for generation;"
      " set config.generation_mesh, for example config.generation_mesh.data = 1"
    )
  return schedule


def make_generation_mesh(config: ml_collections.ConfigDict, mesh: Mesh) -> Mesh:
  """The mesh that generates rollouts: `mesh` itself unless `config.generation_mesh` is set."""
  settings = config.generation_mesh
  sizes: dict[str, Any] = {axis: settings[axis] for axis in sharding.AXES}
  if not any(sizes.values()):
    return mesh
  sizes = {axis: size or 1 for axis, size in sizes.items()}
  if settings.get("same_devices"):
    return sharding.rearranged(mesh, field="generation_mesh", **sizes)
  return sharding.make_mesh(**sizes, field="generation_mesh", skipped=mesh.size)


def make_method(config: ml_collections.ConfigDict, model: Model, mesh: Mesh) -> Method:
  rate, transformation = make_optimizer("config", config, config.num_updates)
  check_choice("config", "aggregation", config.aggregation, AGGREGATIONS)
  check_choice("config.reference", "estimator", config.reference.estimator, REFERENCE_KL_ESTIMATORS)
  check_between("config.reference", "kl_coefficient", config.reference.kl_coefficient, low=0.0)
  check_between("config", "entropy_bonus", config.entropy_bonus, low=0.0)
  check_between("config", "policy_temperature", config.policy_temperature, low=0.0, open_low=True)
  make = lambda field, package, kind: specs.make(f"config.{field}", package, config[field], kind)
  reweighter = make("reweighting", reweighting, reweighting.Reweighting)
  return Method(
    model=model,
    optimizer=transformation,
    learning_rate=rate,
    advantage=make("advantage", advantages, advantages.Advantage),
    coefficient_metrics=gradient_masses,
    reweighting=reweighter,
    loss=make("loss", losses, losses.Loss),
    gram=make_gram(config) if reweighter.needs_gram else None,
    gram_context=gram_context(config, model, mesh),
    aggregation=config.aggregation,
    max_response_length=config.max_response_length,
    temperature=config.policy_temperature,
    reference_kl=config.reference.kl_coefficient,
    reference_kl_estimator=config.reference.estimator,
    veto=make_veto(config),
    entropy_bonus=config.entropy_bonus,
    seed=config.seed,
  )


def gram_context(
  config: ml_collections.ConfigDict, model: Model, mesh: Mesh
) -> geometry.GramContext:
  """The properties of the run that a Gram matrix needs."""
  unconstrained = transformer(model.config)  # single rollouts do not split over devices
  unconstrained = unconstrained._replace(combine=model.combine)
  return geometry.GramContext(unconstrained, config.policy_temperature, mesh)


def make_veto(config: ml_collections.ConfigDict) -> Veto | None:
  settings = config.veto.to_dict()
  enabled = settings.pop("enabled")
  veto = negative_advantage_veto(**settings)  # also checks the settings of a veto that is off
  return veto if enabled else None


def make_optimizer(
  owner: str, settings: ml_collections.ConfigDict, num_updates: int
) -> tuple[optax.Schedule, optax.GradientTransformation]:
  """(learning rate as a function of the update, optimizer) of the group of fields `owner`."""
  field, name = f"{owner}.optimizer", settings.optimizer
  rate = specs.make(
    f"{owner}.learning_rate", learning_rate, settings.learning_rate, Callable,
    num_updates=num_updates,
  )  # fmt: skip
  if not specs.takes(field, optimizer, name, "learning_rate"):
    raise ValueError(
      f"{field} = {name!r} has no parameter learning_rate, so {owner}.learning_rate would have no"
      " effect; add that parameter, a function of the update"
    )
  of_run = dict(learning_rate=rate, num_updates=num_updates)
  made = specs.make(field, optimizer, name, optax.GradientTransformation, **of_run)
  norm = settings.max_gradient_norm
  if norm is not None:
    check_between(owner, "max_gradient_norm", norm, low=0.0, open_low=True)
  return rate, optimizer.clipped(made, norm)


def warm_start_optimizer(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """The optimizer of the supervised phase."""
  settings = config.warm_start
  return make_optimizer("config.warm_start", settings, settings.num_steps)[1]
