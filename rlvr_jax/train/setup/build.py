"""Builds the parts of a run from its configuration; finds all errors in it before compilation."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections
import optax
from absl import logging
from jax.sharding import Mesh

import rlvr_jax
from rlvr_jax import advantages, corrections, geometry, losses, reweighting, specs
from rlvr_jax.advantages.masses import gradient_masses
from rlvr_jax.data import Task, Tokenizer, tasks
from rlvr_jax.data.by_name import make_tokenizer
from rlvr_jax.environments.dialogues import EnvironmentPool
from rlvr_jax.models import lora
from rlvr_jax.models.functional import Model, transformer
from rlvr_jax.models.presets import given_overrides, model_settings
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.aggregate import AGGREGATIONS
from rlvr_jax.ops.checks import MAX_INT32, check_between, check_choice, check_integer
from rlvr_jax.ops.grouped import choose_products
from rlvr_jax.ops.row_attention import longest_row
from rlvr_jax.ops.veto import Veto, negative_advantage_veto
from rlvr_jax.rewards.grading import GraderPool
from rlvr_jax.rollouts import staleness
from rlvr_jax.rollouts.answers import Answers
from rlvr_jax.rollouts.grading import Grading
from rlvr_jax.rollouts.packing import RowLayout, layout_of_few
from rlvr_jax.rollouts.sources import Sources
from rlvr_jax.rollouts.store import StoreError
from rlvr_jax.sampling import LEAST_TEMPERATURE
from rlvr_jax.train.checkpointing.workdir import Enter
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.setup import checks
from rlvr_jax.train.setup.behavior_sources import (
  make_held_out_sampling,
  make_sampling,
  make_sources,
)
from rlvr_jax.train.setup.checks import generates_separately
from rlvr_jax.train.setup.compiler_options import (
  CompilerOptions,
  make_compiler_options,
)
from rlvr_jax.train.setup.component_checks import check_optimizer, check_update
from rlvr_jax.train.setup.engines import (
  ROUTINGS,
  Engines,
  TrainerLayout,
  bytes_per_restored_parameter,
  bytes_per_trained_parameter,
  records_routes,
  routing_of,
)
from rlvr_jax.train.setup.grading import (
  check_environment,
  make_answers,
  make_grading,
  start_pools,
  with_graders,
)
from rlvr_jax.train.setup.initial_params import InitialParams, make_lora, network_identity
from rlvr_jax.train.setup.problem_filters import describe_long_texts, limit_lengths
from rlvr_jax.train.setup.programs import (
  PlacedModel,
  Programs,
  RowTokens,
  abstract_state,
  abstract_teacher,
  choose_row_attention,
  make_gram,
  make_measure,
  make_programs,
  make_row_layout,
  published_params,
  trained_params,
)
from rlvr_jax.train.setup.teachers import (
  Teacher,
  TeacherPrompts,
  check_recorded_texts,
  describe_long_teachers,
  make_prompts,
  make_teachers,
  make_teaching,
  read_problem,
)
from rlvr_jax.types import BatchShape
from rlvr_jax.update import learning_rate, optimizer
from rlvr_jax.update.objective import REFERENCE_KL_ESTIMATORS, Method

_MAX_UPDATES = 10_000_000  # schedules are planned for all updates
_MAX_PLANNED = 10_000  # updates for which a schedule is checked at the start


@dataclasses.dataclass(frozen=True)
class Parts:
  """The components that `build` makes of a configuration. Nothing is placed on a device yet.

  Only outer functions, such as `open_session`, take this record; other functions take only the
  parts that they use.
  """

  config: ml_collections.ConfigDict
  shape: BatchShape  # the shape of a training batch
  task: Task
  tokenizer: Tokenizer
  grading: Grading  # how grades become rewards
  make_answers: Callable[..., Answers]  # makes one sampler's answers, see `grading.make_answers`
  model: Model
  lora: lora.LoraSettings | None  # settings of adapters; None if all parameters are trained
  initial: InitialParams
  method: Method
  teachers: tuple[Teacher, ...]
  teacher_prompts: TeacherPrompts | None  # None: teachers read the policy's prompts
  schedule: staleness.Schedule
  sources: Sources  # the policies that sample the rollouts of every batch
  make_sources: Callable[..., Sources]  # makes the sources from given pins, see `Source.pin`
  placement: Placement
  compiler_options: CompilerOptions
  programs: Programs

  @property
  def training_grading(self) -> Grading:
    """The grading of training rollouts; it also records the fields that a teacher needs."""
    more_of = functools.partial(read_problem, self.config.teacher)
    return dataclasses.replace(self.grading, more_of=more_of)

  def start_pools(self, enter: Enter) -> tuple[GraderPool, EnvironmentPool | None]:
    """Starts the processes of graders and environments; see `grading.start_pools`."""
    config = self.config
    return start_pools(config.grading, config.environment, self.task, self.tokenizer, enter)


def build(
  config: ml_collections.ConfigDict,
  *,
  task: Task | None = None,
  tokenizer: Tokenizer | None = None,
  mesh: Mesh | None = None,
  only_samples: bool = False,
) -> Parts:
  """All parts of the run that `config` describes.

  Args:
    config: see `configs/base.py`.
    task: a task to use instead of `config.task`, for problems made by the caller.
    tokenizer: a tokenizer to use instead of `config.tokenizer`.
    mesh: a mesh to use instead of `config.mesh`; for shapes and compilation only.
    only_samples: whether the parts are for a sampler of a fleet. A sampler needs no memory for an
      optimizer, but needs memory for two copies of the policy while it restores a policy.
  Raises:
    ValueError: a setting is invalid; the message has the field, its value, what is allowed and how
      to fix it.
  """
  mesh = mesh or sharding.make_mesh(**config.mesh)
  config = config.copy_and_resolve_references()
  config.mesh.update(mesh.shape)  # in place of -1, so that a resumed run has the same mesh
  shape = batch_shape(config)
  warm_start = warm_start_optimizer(config.warm_start)
  checks.check_shapes(config, mesh)
  checks.check_dynamic_sampling(config.dynamic_sampling, shape.group_size)
  tokenizer = tokenizer or make_tokenizer(config.tokenizer, config.prompts, config.model.checkpoint)
  check_environment(config.environment, tokenizer)
  grading = make_grading(config.grading.outcomes, config.overlong, tokenizer, shape)
  adapters = make_lora(config.lora)
  network = make_network(config.model, config.tokenizer, tokenizer.vocab_size)
  if sharding.platform(mesh) == "gpu" and "unroll_layers" not in given_overrides(config.model):
    # Small presets unroll their layers, which saves copies on a CPU. For a GPU, every unrolled
    # layer adds seconds to the compilation.
    network = dataclasses.replace(network, unroll_layers=1)
  make_model_on = functools.partial(
    make_model, network, adapters, shape, tokens_per_row=config.batch.tokens_per_row
  )
  model = make_model_on(mesh)
  checks.check_heads(model.config, mesh)
  if long_texts := describe_long_texts(config.model.checkpoint, shape):
    logging.warning("%s", long_texts)
  vocab_size = model.config.vocab_size
  sampling = make_sampling(
    config.sampling, vocab_size, allow_truncated=config.allow_truncated_behavior
  )
  held_out_sampling = make_held_out_sampling(config.evaluation.sampling, vocab_size)
  schedule = make_schedule(config.schedule, num_updates=config.num_updates, seed=config.seed)
  checks.check_schedule(config, schedule)
  sampler = make_sampler(config.generation_mesh, model, mesh, make_model_on)
  compared = make_compared(sampler, model, mesh, make_model_on)
  compiler_options = make_compiler_options(config.compiler_options, mesh, sampler.mesh)
  method = make_method(config, model, mesh)
  checks.check_advantage(config, method, grading)
  if "rewards_by_name" in method.advantage.needs:
    grading = dataclasses.replace(grading, num_rewards=1 + len(config.grading.extra))
  base = sharding.abstract_params(model, mesh)
  trained = trained_params(adapters, base)
  check_optimizer("config", config.optimizer, method.optimizer, trained)
  check_optimizer("config.warm_start", config.warm_start.optimizer, warm_start, trained)
  state = abstract_state(method, trained, mesh)
  if only_samples:
    per_parameter = bytes_per_restored_parameter(
      published_params(trained, model.config, adapters is not None)
    )
  else:
    per_parameter = bytes_per_trained_parameter(state)
  separate = generates_separately(config.generation_mesh)
  engines = Engines(
    settings=config.sampling,
    shape=shape,
    tokenizer=tokenizer,
    trainer=TrainerLayout(mesh, separate, adapters is not None, per_parameter),
    batches=schedule.batches_per_refresh(config.num_updates),
    deadline_s=config.generation_deadline_s,
    compiler_options=compiler_options.generation,
    has_replies=bool(config.environment.name),
    records_routes=method.records_routes,
  )
  make_pinned = functools.partial(make_sources, config, *sampler, tokenizer, shape, engines)
  sources = make_pinned(pins={})
  checks.check_repeats(config.fleet.new_weights, schedule, sources)
  checks.check_recorded_rewards(config, method, sources)
  method = method._replace(sources=tuple(source.name for source in sources))
  row_layout = make_row_layout(config.batch, shape, model.config.attention, mesh)
  teachers: tuple[Teacher, ...] = ()
  if only_samples:  # teachers score rollouts in the trainer
    method = method._replace(teaching=None)
  if method.teaching is not None:
    check_recorded_texts(
      config.teacher,
      environment=config.environment.name,
      recorded=config.sources.recorded.fraction,
    )
    make_other = functools.partial(
      make_model,
      adapters=None,
      shape=shape,
      mesh=mesh,
      tokens_per_row=config.batch.tokens_per_row,
    )
    teachers = make_teachers(
      config.teacher,
      model,
      mesh,
      make_other,
      trained=state.params,
      has_adapters=adapters is not None,
    )
    method = method._replace(teaching=method.teaching._replace(model=teachers[0].model))
  placement = Placement(
    mesh=mesh,
    generation_mesh=sampler.mesh,
    compared_mesh=compared.mesh,
    row_layout=row_layout,
    compared_layout=layout_of_few(
      row_layout, shape, compared.mesh.shape["data"] * compared.mesh.shape["fsdp"]
    ),
    state=state,
    base=base,
    frozen={} if adapters is None else base,
    scored_groups=scored_groups(row_layout, shape, sampler.mesh),
    teachers=tuple(teacher.params for teacher in teachers),
  )
  diagnose = make_measure(config.diagnostics, method, make_gram(config.gram))
  check_update(
    method,
    placement,
    shape,
    advantage=config.advantage,
    loss=config.loss,
    diagnose=diagnose if config.diagnostics.every else None,
    teacher=abstract_teacher(method, teachers, placement),
    has_turns=bool(config.environment.name),
    num_rewards=grading.num_rewards,
  )
  task = limit_lengths(  # before graders wrap the sources, whose prompts it measures
    task or make_task(config.task),
    tokenizer,
    shape,
    too_long=config.prompts.too_long,
    warm_starts=config.warm_start.num_steps > 0,
  )
  task = with_graders(config.grading, config.evaluation.grader, task)
  teacher_prompts, attention = None, model.config.attention
  if teachers:
    teacher_prompts = make_prompts(
      config.teacher,
      tokenizer,
      lambda length: make_row_layout(
        RowTokens(0, 0), shape._replace(max_prompt_length=length), attention, mesh
      ),
      # Only memory limits the rows of the attention "whole"; --mode=fits shows it.
      longest_row=math.inf if attention == "whole" else longest_row(attention),
    )
  for text in describe_long_teachers(teachers, teacher_prompts, shape, config.model.checkpoint):
    logging.warning("%s", text)
  return Parts(
    config=config,
    shape=shape,
    task=task,
    tokenizer=tokenizer,
    grading=grading,
    make_answers=functools.partial(make_answers, config.environment, tokenizer),
    model=model,
    lora=adapters,
    initial=InitialParams(
      model=model,
      lora=adapters,
      placement=placement,
      checkpoint=config.model.checkpoint,
      adapters=config.lora.adapters,
      seed=config.seed,
      identity=network_identity(json.loads(config.to_json_best_effort())),
    ),
    method=method,
    teachers=teachers,
    teacher_prompts=teacher_prompts,
    schedule=schedule,
    sources=sources,
    make_sources=make_pinned,
    placement=placement,
    compiler_options=compiler_options,
    programs=make_programs(
      method,
      sources,
      teachers,
      placement,
      sampler=sampler,
      compared=compared,
      engines=engines,
      sampling=sampling,
      held_out_sampling=held_out_sampling,
      diagnose=diagnose,
      warm_start_optimizer=warm_start,
      compiler_options=compiler_options,
    ),
  )


def batch_shape(config: ml_collections.ConfigDict) -> BatchShape:
  """The shape of the largest training batch.

  Raises:
    ValueError: a size is out of range.
  """
  batch = config.batch
  for name, low in (
    ("prompts", 1), ("group_size", 1), ("tokens_per_row", 0), ("tokens_per_micro_batch", 0)
  ):  # fmt: skip
    check_integer("config.batch", name, batch[name], low=low, high=MAX_INT32)
  check_integer("config", "max_prompt_length", config.max_prompt_length, low=1, high=MAX_INT32)
  # At least 2: a stop token alone is not an answer.
  check_integer("config", "max_response_length", config.max_response_length, low=2, high=MAX_INT32)
  return BatchShape(
    batch.prompts, batch.group_size, config.max_prompt_length, config.max_response_length
  )


def scored_groups(layout: RowLayout, shape: BatchShape, mesh: Mesh) -> int:
  """Number of full-length groups that fit into a micro-batch; at least one for each device."""
  group = shape.group_size * (shape.max_prompt_length + shape.max_response_length)
  groups = max(layout.device_places // group, 1)
  devices: int = mesh.shape["data"] * mesh.shape["fsdp"]
  return groups * devices


def make_sampler(
  settings: ml_collections.ConfigDict,
  model: Model,
  mesh: Mesh,
  make_model_on: Callable[..., Model],
) -> PlacedModel:
  """Model and mesh for generation: `model` and `mesh`, unless `config.generation_mesh` is set.

  Args:
    settings: `config.generation_mesh`.
    model, mesh: model and mesh of updates.
    make_model_on: (a mesh, the mesh on which parameters are sharded) → the model on the first mesh.
  """
  generation_mesh = make_generation_mesh(settings, mesh)
  if generation_mesh is mesh:
    return PlacedModel(model, mesh)
  tensor = generation_mesh.shape["tensor"]
  checks.check_sampling_heads(model.config, tensor)
  # On other devices, the parameters are moved before they are used.
  alike = sharding.has_same_devices(generation_mesh, mesh)
  parameters = mesh if alike else generation_mesh
  return PlacedModel(make_model_on(generation_mesh, parameters), generation_mesh)


def make_compared(
  sampler: PlacedModel, model: Model, mesh: Mesh, make_model_on: Callable[..., Model]
) -> PlacedModel:
  """The model whose log-probabilities are compared with the sampler's.

  If the sampler uses the devices of updates, the result is the model of updates. Otherwise the
  result is a model on the sampler's devices, which uses the sampler's copy of the parameters and
  whose mesh splits no key/value head.

  Args:
    sampler, make_model_on: see `make_sampler`.
    model, mesh: model and mesh of updates.
  """
  if sharding.has_same_devices(sampler.mesh, mesh):
    return PlacedModel(model, mesh)
  sizes = dict(sampler.mesh.shape)
  tensor = math.gcd(sizes["tensor"], model.config.split_heads)
  if tensor == sizes["tensor"]:
    return sampler
  sizes |= {"fsdp": sizes["fsdp"] * sizes["tensor"] // tensor, "tensor": tensor}
  other = sharding.rearrange(sampler.mesh, **sizes, field="generation_mesh")
  return PlacedModel(make_model_on(other, sampler.mesh), other)


def make_network(
  settings: ml_collections.ConfigDict, tokenizer: str, vocab_size: int
) -> TransformerConfig:
  """The network of `config.model`.

  Args:
    settings: `config.model`.
    tokenizer: `config.tokenizer`, for messages.
    vocab_size: the vocabulary size of the tokenizer.
  Raises:
    ValueError: the network has no embedding for some tokens.
  """
  network = model_settings(settings)
  if network.vocab_size < vocab_size and settings.checkpoint:
    raise ValueError(
      f"config.tokenizer = {tokenizer!r} has {vocab_size} tokens, but config.model.checkpoint ="
      f" {settings.checkpoint!r} has embeddings for only {network.vocab_size}; set config.tokenizer"
      " to 'checkpoint', or to the folder of that model's tokenizer"
    )
  if network.vocab_size < vocab_size:
    raise ValueError(
      f"config.model: vocab_size = {network.vocab_size} is smaller than the tokenizer's"
      f" {vocab_size}; set config.model.overrides.vocab_size = {vocab_size}"
    )
  return network


def make_model(
  network: TransformerConfig,
  adapters: lora.LoraSettings | None,
  shape: BatchShape,
  mesh: Mesh,
  parameters: Mesh | None = None,
  *,
  tokens_per_row: int,
) -> Model:
  """The policy's functions on a mesh.

  Args:
    network: the result of `make_network`.
    adapters: the result of `make_lora`.
    shape: the shape of a training batch.
    mesh: the mesh of updates, or of generation.
    parameters: the mesh on which the parameters are sharded, with the same devices; None for
      `mesh`.
    tokens_per_row: `config.batch.tokens_per_row`.
  """
  attention = choose_row_attention(network, mesh, shape, tokens_per_row=tokens_per_row)
  products = choose_products(
    network.expert_products, platform=sharding.platform(mesh), dtype=network.compute_dtype
  )
  network = dataclasses.replace(network, attention=attention, expert_products=products)
  return lora.adapt(transformer(network, sharding.make_layout(mesh, parameters)), adapters)


def make_task(settings: ml_collections.ConfigDict) -> Task:
  """The task of `config.task`: its problems and its grader."""
  name, kwargs = settings.name, settings.kwargs.to_dict()
  spec = specs.parse("config.task.name", name)
  if spec.arguments:
    raise ValueError(
      f"config.task.name = {name!r} has arguments; set name = {spec.name!r}, and set each argument"
      f" as a field, such as config.task.kwargs.{next(iter(spec.arguments))}"
    )
  spec = spec._replace(arguments=kwargs)
  try:
    task: Task = specs.make_from_spec(f"config.task.name = {name!r}", tasks, spec, Task)
    return task
  except OSError as error:
    field = _field_of(error.filename, "config.task.kwargs", kwargs)
    missing = f"{field} = {error.filename!r}: {error.strerror}"
    raise ValueError(missing if field else f"config.task.name = {name!r}: {error}") from error


def _field_of(value: object, owner: str, fields: Mapping[str, object]) -> str:
  """The dotted name of the field whose value is this text; "" if there is no such field."""
  for name, field in fields.items():
    if isinstance(field, Mapping) and (path := _field_of(value, f"{owner}.{name}", field)):
      return path
    if isinstance(field, str | os.PathLike) and os.fspath(field) == value:
      return f"{owner}.{name}"
  return ""


def make_schedule(name: str, *, num_updates: int, seed: int) -> staleness.Schedule:
  """The staleness schedule of `config.schedule`, for a run."""
  check_integer("config", "num_updates", num_updates, low=0, high=_MAX_UPDATES)
  run_values = dict(num_updates=num_updates, seed=seed)
  try:
    schedule: staleness.Schedule = specs.make(
      "config.schedule", staleness, name, staleness.Schedule, **run_values
    )
    if not schedule.threaded:
      staleness.plan(schedule, min(num_updates, _MAX_PLANNED))
  except (StoreError, staleness.PlanError) as error:
    raise ValueError(f"config.schedule = {name!r}: {error}") from error
  return schedule


def make_generation_mesh(settings: ml_collections.ConfigDict, mesh: Mesh) -> Mesh:
  """The mesh for generation: `mesh` itself unless `config.generation_mesh` is set."""
  sizes: dict[str, Any] = {axis: settings[axis] for axis in sharding.AXES}
  if not any(sizes.values()):
    return mesh
  sizes = {axis: size or 1 for axis, size in sizes.items()}
  if settings.get("same_devices", False):
    return sharding.rearrange(mesh, field="generation_mesh", **sizes)
  return sharding.make_mesh(**sizes, field="generation_mesh", skipped=mesh.size)


def make_method(config: ml_collections.ConfigDict, model: Model, mesh: Mesh) -> Method:
  """The components and settings of an update, from the configuration."""
  rate, transformation = make_optimizer("config", config, config.num_updates)
  check_choice("config", "aggregation", config.aggregation, AGGREGATIONS)
  check_choice("config.reference", "estimator", config.reference.estimator, REFERENCE_KL_ESTIMATORS)
  check_between("config.reference", "kl_coefficient", config.reference.kl_coefficient, low=0.0)
  check_between("config", "entropy_bonus", config.entropy_bonus, low=0.0)
  check_between("config", "expert_balance", config.expert_balance, low=0.0)
  if config.expert_balance and not model.config.num_experts:
    raise ValueError(
      f"config.expert_balance = {config.expert_balance} needs a mixture of experts, but the network"
      " has no experts; set config.expert_balance = 0, or choose a mixture"
      f" ({rlvr_jax.page('experts.md')})"
    )
  check_between("config", "policy_temperature", config.policy_temperature, low=LEAST_TEMPERATURE)
  check_integer("config", "proximal_every", config.proximal_every, low=0, high=MAX_INT32)
  _check_routing(config.model, model.config, config.gram, config.diagnostics.compared)
  make = lambda field, package, kind: specs.make(f"config.{field}", package, config[field], kind)
  reweighter = make("reweighting", reweighting, reweighting.Reweighting)
  advantage = make("advantage", advantages, advantages.Advantage)
  loss = make_loss(config.loss, config.correction, config.proximal_every)
  return Method(
    model=model,
    optimizer=transformation,
    learning_rate=rate,
    advantage=advantage,
    coefficient_metrics=gradient_masses,
    reweighting=reweighter,
    loss=loss,
    gram=make_needed_gram(config.gram, config.advantage, reweighter, advantage),
    gram_context=gram_context(model, mesh, config.policy_temperature),
    aggregation=config.aggregation,
    max_response_length=config.max_response_length,
    temperature=config.policy_temperature,
    reference_kl=config.reference.kl_coefficient,
    reference_kl_estimator=config.reference.estimator,
    teaching=make_teaching(
      config.distillation,
      config.teacher,
      policy_temperature=config.policy_temperature,
      vocab_size=model.config.vocab_size,
      loss=(config.loss, loss),
    ),
    veto=make_veto(config.veto),
    entropy_bonus=config.entropy_bonus,
    expert_balance=config.expert_balance,
    seed=config.seed,
    records_routes=records_routes(config.model),
    replays_routes=routing_of(config.model) == "replayed",
  )


def make_needed_gram(
  name: str,
  advantage_name: str,
  reweighter: reweighting.Reweighting,
  advantage: advantages.Advantage,
) -> geometry.GramFn | None:
  """The function of `config.gram`; None if neither reweighting nor advantage needs a Gram matrix.

  Args:
    name, advantage_name: `config.gram` and `config.advantage`.
    reweighter, advantage: reweighter and advantage of the method.
  Raises:
    ValueError: the advantage needs norms of gradients, but the vectors whose inner products `name`
      computes are not the gradients.
  """
  needs_norms = "squared_norms" in advantage.needs
  if not (reweighter.needs_gram or needs_norms):
    return None
  gram = make_gram(name)
  if needs_norms and gram.feature != "score":
    raise ValueError(
      f"config.advantage = {advantage_name!r} needs the norms of gradients, but config.gram ="
      f" {name!r} computes norms of the feature {gram.feature!r}, which is not the gradient; set"
      " config.gram = 'streaming'"
    )
  return gram


def make_loss(name: str, correction: str, proximal_every: int) -> losses.Loss:
  """The loss of `config.loss` with the correction of `config.correction`.

  Args:
    name, correction, proximal_every: fields of the configuration.
  """
  loss = specs.make("config.loss", losses, name, losses.Loss)
  made = specs.make("config.correction", corrections, correction, corrections.Correction)
  try:
    loss = corrections.corrected(loss, made)
  except ValueError as error:
    raise ValueError(
      f"config.correction = {correction!r} with config.loss = {name!r}: {error}"
    ) from error
  if proximal_every and not loss.needs_proximal:
    raise ValueError(
      f"config.proximal_every = {proximal_every} needs a proximal policy, but config.loss ="
      f" {name!r} has no proximal policy; set config.proximal_every = 0, or choose config.loss ="
      " 'decoupled_ppo' or a correction, such as config.correction = 'tis'"
    )
  return loss


def _check_routing(
  settings: ml_collections.ConfigDict, network: TransformerConfig, gram: str, compared: str
) -> None:
  """Raises ValueError if routes are to be recorded or replayed where that is not possible.

  Args:
    settings: `config.model`.
    network: the network of the policy.
    gram: `config.gram`.
    compared: `config.diagnostics.compared`.
  """
  routing = routing_of(settings)
  check_choice("config.model", "routing", routing, ROUTINGS)
  if records_routes(settings) and not network.num_experts:
    field = "routing = 'replayed'" if routing == "replayed" else "record_routes = True"
    raise ValueError(
      f"config.model.{field} needs a mixture of experts, but num_experts = 0; choose a mixture"
      f" ({rlvr_jax.page('experts.md')}), or set routing = 'recomputed' and record_routes = False"
    )
  single = gram if gram.startswith("per_rollout") else ""
  if routing == "replayed" and (single or compared):
    field, other = ("gram", "streaming") if single else ("diagnostics.compared", "")
    raise ValueError(
      f"config.{field} = {single or compared!r} differentiates rollouts one by one, which is not"
      f" supported with config.model.routing = 'replayed'; set config.{field} = {other!r}, or"
      " config.model.routing = 'recomputed'"
    )


def gram_context(model: Model, mesh: Mesh, temperature: float) -> geometry.GramContext:
  """The properties of the run that a Gram matrix needs."""
  unconstrained = transformer(model.config)  # a single rollout is not split over devices
  unconstrained = unconstrained._replace(combine=model.combine)
  return geometry.GramContext(unconstrained, temperature, mesh)


def make_veto(settings: ml_collections.ConfigDict) -> Veto | None:
  """The veto of `config.veto`; None if it is off."""
  fields = settings.to_dict()
  enabled = fields.pop("enabled")
  veto = negative_advantage_veto(**fields)  # also checks the settings of a veto that is off
  return veto if enabled else None


def make_optimizer(
  owner: str, settings: ml_collections.ConfigDict, num_updates: int
) -> tuple[optax.Schedule, optax.GradientTransformation]:
  """(learning rate as a function of the update, optimizer) of a section of the configuration.

  Args:
    owner: name of the section, such as "config".
    settings: the section.
    num_updates: number of updates.
  """
  field, name = f"{owner}.optimizer", settings.optimizer
  rate = specs.make(
    f"{owner}.learning_rate", learning_rate, settings.learning_rate, Callable,
    num_updates=num_updates,
  )  # fmt: skip
  if not specs.has_parameter(field, optimizer, name, "learning_rate"):
    raise ValueError(
      f"{field} = {name!r} has no parameter learning_rate, so {owner}.learning_rate would have no"
      " effect; add this parameter to the function that makes the optimizer: its value is the"
      " learning rate as a function of the update"
    )
  run_values = dict(learning_rate=rate, num_updates=num_updates)
  made = specs.make(field, optimizer, name, optax.GradientTransformation, **run_values)
  norm = settings.max_gradient_norm
  if norm is not None:
    check_between(owner, "max_gradient_norm", norm, low=0.0, open_low=True)
  return rate, optimizer.clip_gradients(made, norm)


def warm_start_optimizer(settings: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """The optimizer of `config.warm_start`."""
  check_integer("config.warm_start", "num_steps", settings.num_steps, low=0, high=_MAX_UPDATES)
  if settings.num_steps:
    check_integer("config.warm_start", "batch_size", settings.batch_size, low=1, high=MAX_INT32)
  return make_optimizer("config.warm_start", settings, settings.num_steps)[1]
