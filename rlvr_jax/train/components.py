"""From a configuration to the parts of a run; every mistake is found here, before compilation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import Mesh

from rlvr_jax import advantages, geometry, losses, reweighting, specs
from rlvr_jax.advantages.masses import gradient_masses
from rlvr_jax.data import (
  Problem,
  Task,
  Tokenizer,
  encode_prompts,
  encode_solutions,
  problem_batches,
  tasks,
)
from rlvr_jax.models import lora
from rlvr_jax.models.functional import Model, transformer
from rlvr_jax.models.huggingface import load_params
from rlvr_jax.models.presets import model_settings
from rlvr_jax.models.transformer import merged
from rlvr_jax.ops.aggregate import AGGREGATIONS
from rlvr_jax.ops.checks import check_between, check_choice, check_whole
from rlvr_jax.ops.keys import key_for
from rlvr_jax.ops.logprobs import check_sampling, is_truncated
from rlvr_jax.ops.veto import Veto, negative_advantage_veto
from rlvr_jax.rewards.outcome import OutcomePolicy, outcome_policy
from rlvr_jax.rollouts import schedules
from rlvr_jax.rollouts.sampler import generate
from rlvr_jax.rollouts.store import StoreError
from rlvr_jax.train import learning_rate, optimizer, sharding
from rlvr_jax.train.adapters import first_adapters, make_lora
from rlvr_jax.train.checkpoint import CheckpointError, parameter_checksums
from rlvr_jax.train.geometry import mean_entropy, measure
from rlvr_jax.train.objective import REFERENCE_KL_ESTIMATORS, Method, policy_logprobs
from rlvr_jax.train.sources import Source, behavior_gap, make_sources
from rlvr_jax.train.step import initial_state, train_step
from rlvr_jax.train.texts import fitting, make_tokenizer, warn_of_long_texts, with_graders
from rlvr_jax.train.warm_start import supervised_step
from rlvr_jax.types import Array, Params, Prompts, Sampling, TrainBatch, TrainState

_MOST_UPDATES = 10_000_000  # schedules are planned ahead
_MOST_WORKERS = 1024  # processes of grading
_MOST = 2**31 - 1  # of indices and counters on the devices
_AT_LEAST_ONE = {
  "": "max_prompt_length max_skipped_in_a_row",
  "batch": "prompts group_size micro_batches",
  "evaluation": "every num_samples batch_prompts",
  "grading": "memory_mib",
  "checkpoint": "every keep",
  "logging": "print_every rollouts_every rollouts_per_refresh",
}


def make_sampling(settings: Mapping[str, Any], vocab_size: int) -> Sampling:
  sampling = Sampling(
    temperature=settings["temperature"], top_k=settings["top_k"], top_p=settings["top_p"]
  )
  check_sampling(sampling, vocab_size)
  return sampling


def may_differ(config: ml_collections.ConfigDict, schedule: schedules.Schedule) -> list[str]:
  """Fields that may change when a run is taken up again: they change no number of it."""
  fields = ["checkpoint", "logging", "grading.num_workers", "grading.timeout_s", "diagnostics"]
  fields += ["grading.memory_mib", "grading.unsandboxed_code"]
  fields += ["dynamic_sampling.max_batches", "store", "max_behavior_gap"]
  fields += ["generation_deadline_s"]
  # A learning rate that decays, and some schedules, depend on where the run ends.
  may_end_elsewhere = schedule.open_ended and not any(
    specs.takes(f"config.{field}", package, config[field], "num_updates")
    for field, package in (("learning_rate", learning_rate), ("optimizer", optimizer))
  )
  return [*fields, "num_updates"] if may_end_elsewhere else fields


def check_training_sampling(config: ml_collections.ConfigDict) -> None:
  """Raises where rollouts could not be trained on: without density, or truncated unasked."""
  sampling = config.sampling
  if sampling.temperature == 0:
    raise ValueError(
      "config.sampling.temperature = 0: greedy rollouts have no density to train on; set it > 0"
    )
  if is_truncated(sampling) and not config.allow_truncated_behavior:
    raise ValueError(
      f"config.sampling.top_k = {sampling.top_k}, top_p = {sampling.top_p}: training on truncated"
      " sampling biases the ratio (its mean is the kept mass). Set top_k = 0 and top_p = 1, or"
      " config.allow_truncated_behavior = True to do it knowingly"
    )


def make_model(config: ml_collections.ConfigDict, mesh: Mesh, vocab_size: int) -> Model:
  settings = model_settings(config.model)
  if settings.vocab_size < vocab_size and config.model.checkpoint:
    raise ValueError(
      f"config.tokenizer = {config.tokenizer!r} has {vocab_size} tokens, config.model.checkpoint ="
      f" {config.model.checkpoint!r} only {settings.vocab_size}; they do not belong together: set"
      " config.tokenizer = 'checkpoint', or to the folder of its tokenizer"
    )
  if settings.vocab_size < vocab_size:
    raise ValueError(
      f"config.model: vocab_size = {settings.vocab_size} is smaller than the tokenizer's"
      f" {vocab_size}; set config.model.overrides.vocab_size = {vocab_size}"
    )
  model = transformer(settings, sharding.batch_constraint(mesh), sharding.gather_over_fsdp(mesh))
  return lora.adapted(model, make_lora(config))


def make_task(config: ml_collections.ConfigDict) -> Task:
  """The problems."""
  try:
    name = config.task.name
    spec = specs.Spec(name, config.task.kwargs.to_dict())
    return specs.call(f"config.task.name = {name!r}", tasks, spec, Task)
  except OSError as error:
    raise ValueError(f"config.task.kwargs = {config.task.kwargs.to_dict()}: {error}") from error


def make_schedule(config: ml_collections.ConfigDict) -> schedules.Schedule:
  """Which policy draws which rollouts."""
  told = f"config.schedule = {config.schedule!r}"
  of_run = dict(num_updates=config.num_updates, seed=config.seed)
  try:
    schedule = specs.make(
      "config.schedule", schedules, config.schedule, schedules.Schedule, **of_run
    )
  except StoreError as error:
    raise ValueError(f"{told}: {error}") from error
  if schedule.real_time and jax.process_count() > 1:
    raise ValueError(
      f"{told} needs all devices in one process, this run has {jax.process_count()}; choose"
      " simulated_asynchronous, or run one process"
    )
  apart = any(config.generation_mesh.to_dict().values())
  if schedule.real_time and math.prod(config.mesh.to_dict().values()) > 1 and not apart:
    # Two threads could begin programs that wait for each other on the same devices.
    raise ValueError(
      f"{told} on config.mesh = {config.mesh.to_dict()} needs devices of its own for generation;"
      " set config.generation_mesh, for example config.generation_mesh.data = 1"
    )
  return schedule


def make_generation_mesh(config: ml_collections.ConfigDict, mesh: Mesh) -> Mesh:
  """Where rollouts are generated: on devices of their own if the configuration says so."""
  sizes = config.generation_mesh.to_dict()
  if not any(sizes.values()):
    return mesh
  sizes = {axis: size or 1 for axis, size in sizes.items()}
  return sharding.make_mesh(**sizes, field="generation_mesh", skipped=mesh.size)


def make_sync_weights(mesh: Mesh, own: Mesh, shardings: Params) -> Callable:
  """(parameters of the trainer, whether to outlive them) → parameters to draw rollouts from.

  An update donates its parameters: what is drawn from meanwhile must outlive them.
  """
  if own is not mesh:
    moved = jax.tree.map(lambda s: jax.sharding.NamedSharding(own, s.spec), shardings)
    return lambda params, outlive: jax.device_put(params, moved)
  copied = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
  return lambda params, outlive: copied(params) if outlive else params


def make_method(config: ml_collections.ConfigDict, model: Model, mesh: Mesh) -> Method:
  schedule, transformation = make_optimizer("config", config, config.num_updates)
  check_choice("config", "aggregation", config.aggregation, AGGREGATIONS)
  check_choice(
    "config.reference", "estimator", config.reference.estimator, REFERENCE_KL_ESTIMATORS
  )
  check_between("config.reference", "kl_coefficient", config.reference.kl_coefficient, low=0.0)
  check_between("config", "entropy_bonus", config.entropy_bonus, low=0.0)
  check_between("config", "policy_temperature", config.policy_temperature, low=0.0, open_low=True)
  make = lambda field, package, kind: specs.make(f"config.{field}", package, config[field], kind)
  reweighter = make("reweighting", reweighting, reweighting.Reweighting)
  return Method(
    model=model,
    optimizer=transformation,
    schedule=schedule,
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
    num_micro_batches=config.batch.micro_batches,
    seed=config.seed,
  )


def make_gram(config: ml_collections.ConfigDict) -> geometry.GramFn:
  """The route to the Gram matrix."""
  return specs.make("config.gram", geometry, config.gram, geometry.GramFn)


def gram_context(
  config: ml_collections.ConfigDict, model: Model, mesh: Mesh
) -> geometry.GramContext:
  """What a route to the Gram matrix needs to know of the run."""
  unconstrained = transformer(model.config)  # single rollouts do not split over devices
  unconstrained = unconstrained._replace(combine=model.combine)
  return geometry.GramContext(unconstrained, config.policy_temperature, mesh)


def make_measure(config: ml_collections.ConfigDict, method: Method) -> Callable:
  """`train.geometry.measure` with everything bound but (state, frozen, initial, batch)."""
  check_between("config.diagnostics", "every", config.diagnostics.every, low=0)
  if config.diagnostics.compared:
    geometry.per_rollout(parameters=config.diagnostics.compared)  # raises what is no pattern
  return functools.partial(
    measure,
    method=method,
    gram=make_gram(config),
    compared=config.diagnostics.compared,
  )


def make_veto(config: ml_collections.ConfigDict) -> Veto | None:
  settings = config.veto.to_dict()
  enabled = settings.pop("enabled")
  veto = negative_advantage_veto(**settings)  # a mistake shows also where it is off
  return veto if enabled else None


def check_rewards(
  config: ml_collections.ConfigDict,
  method: Method,
  policy: OutcomePolicy,
  sources: Sequence[Source],
) -> None:
  """Raises where the advantage, the filters and the rewards do not go together."""
  check_between("config.overlong", "buffer", config.overlong.buffer, low=0)
  if config.overlong.buffer > config.max_response_length:
    raise ValueError(
      f"config.overlong.buffer = {config.overlong.buffer} tokens is more than"
      f" config.max_response_length = {config.max_response_length}"
    )
  if config.proximal_every and not method.loss.needs_proximal:
    raise ValueError(
      f"config.proximal_every = {config.proximal_every}, but config.loss = {config.loss!r} has no"
      " proximal policy; set it to 0, or choose decoupled_ppo"
    )
  needs = f"config.advantage = {config.advantage!r} needs rewards that are 0 or 1, but"
  if method.advantage.needs_binary and config.overlong.buffer:
    raise ValueError(
      f"{needs} config.overlong.buffer = {config.overlong.buffer} shapes them; set it to 0, or"
      " choose another advantage"
    )
  if method.advantage.needs_binary and any(source.shaped for source in sources):
    raise ValueError(
      f"{needs} those of config.sources.recorded.store = {config.sources.recorded.store!r} are"
      " shaped; choose another store or another advantage"
    )
  if method.advantage.needs_binary and config.grading.extra:
    raise ValueError(
      f"{needs} config.grading.extra = {tuple(config.grading.extra)} adds to them; set it to (),"
      " or choose another advantage"
    )
  shaped = shaped_outcomes(policy)
  if method.advantage.needs_binary and shaped:
    raise ValueError(f"{needs} config.grading.outcomes has {shaped}")
  if config.dynamic_sampling.enabled:
    limit = config.dynamic_sampling.max_batches
    check_between("config.dynamic_sampling", "max_batches", limit, low=1)
    if config.batch.group_size < 2:
      raise ValueError(
        "config.dynamic_sampling.enabled with config.batch.group_size = 1: a group of one is always"
        " all right or all wrong, so nothing would ever be kept; set group_size ≥ 2"
      )


def shaped_outcomes(policy: OutcomePolicy) -> dict[str, Any]:
  """Outcomes whose reward may be another than 0 or 1: only a right answer's own score is 1."""
  plain = ("mask", "stop", 0.0, 1.0)
  binary = lambda outcome, reward: reward in plain or (outcome, reward) == ("correct", "score")
  return {o.value: reward for o, reward in policy.items() if not binary(o.value, reward)}


def make_optimizer(
  owner: str, settings: ml_collections.ConfigDict, num_updates: int
) -> tuple[optax.Schedule, optax.GradientTransformation]:
  """The learning rate and the optimizer that follows it, of the group of fields `owner`."""
  field, name = f"{owner}.optimizer", settings.optimizer
  schedule = specs.make(
    f"{owner}.learning_rate", learning_rate, settings.learning_rate, Callable,
    num_updates=num_updates,
  )  # fmt: skip
  if not specs.takes(field, optimizer, name, "learning_rate"):
    raise ValueError(
      f"{field} = {name!r} takes no learning_rate, so that {owner}.learning_rate would not count;"
      " add that parameter, a function of the update"
    )
  of_run = dict(learning_rate=schedule, num_updates=num_updates)
  made = specs.make(field, optimizer, name, optax.GradientTransformation, **of_run)
  norm = settings.max_gradient_norm
  if norm is not None:
    check_between(owner, "max_gradient_norm", norm, low=0.0, open_low=True)
  return schedule, optimizer.clipped(made, norm)


def _as_number(text: str) -> float | str:
  """A locked configuration field has one type, so numbers beside names are written as text."""
  try:
    return float(text)
  except ValueError:
    return text


def abstract_batch(
  config: ml_collections.ConfigDict, *, needs_proximal: bool = False
) -> TrainBatch:
  """Shapes and dtypes of a training batch."""
  P, G = config.batch.prompts, config.batch.group_size
  S, T = config.max_prompt_length, config.max_response_length
  of = jax.ShapeDtypeStruct
  return TrainBatch(
    prompts=Prompts(tokens=of((P, S), jnp.int32), lengths=of((P,), jnp.int32)),
    tokens=of((P, G, T), jnp.int32),
    mask=of((P, G, T), jnp.float32),
    behavior_logprobs=of((P, G, T), jnp.float32),
    rewards=of((P, G), jnp.float32),
    correct=of((P, G), jnp.float32),
    lags=of((P, G), jnp.int32),
    sources=of((P,), jnp.int32),
    reference_logprobs=of((P, G, T), jnp.float32) if config.reference.kl_coefficient else None,
    proximal_logprobs=of((P, G, T), jnp.float32) if needs_proximal else None,
    solve_rate=of((P,), jnp.float32),
  )


def check_shapes(config: ml_collections.ConfigDict, mesh: Mesh) -> None:
  """Raises where sizes do not fit together."""
  for group, names in _AT_LEAST_ONE.items():
    section = config[group] if group else config
    for name in names.split():
      check_whole(f"config.{group}".rstrip("."), name, section[name], low=1, high=_MOST)
  check_whole("config", "num_updates", config.num_updates, low=0, high=_MOST_UPDATES)
  check_between("config", "max_behavior_gap", config.max_behavior_gap, low=0.0)
  check_whole("config", "proximal_every", config.proximal_every, low=0, high=_MOST)
  deadline = config.generation_deadline_s
  check_between("config", "generation_deadline_s", deadline, low=0.0, open_low=True)
  for owner, section in (("config", config), ("config.evaluation", config.evaluation)):
    check_whole(owner, "seed", section.seed, low=0, high=2**32 - 1)
  warm_start = config.warm_start
  check_whole("config.warm_start", "num_steps", warm_start.num_steps, low=0, high=_MOST_UPDATES)
  workers = config.grading.num_workers
  check_whole("config.grading", "num_workers", workers, low=0, high=_MOST_WORKERS)
  check_between("config.grading", "timeout_s", config.grading.timeout_s, low=0, open_low=True)
  # A stop token alone answers nothing.
  check_whole("config", "max_response_length", config.max_response_length, low=2, high=_MOST)
  batch = config.batch
  sharding.check_batch("config.batch.prompts", batch.prompts, mesh, batch.micro_batches)
  sharding.check_batch("config.evaluation.batch_prompts", config.evaluation.batch_prompts, mesh)
  if warm_start.num_steps:
    check_whole("config.warm_start", "batch_size", warm_start.batch_size, low=1, high=_MOST)
    sharding.check_batch("config.warm_start.batch_size", warm_start.batch_size, mesh)
  for field, responses in {
    "config.batch.prompts · config.batch.group_size": batch.prompts * batch.group_size,
    "config.evaluation.batch_prompts · config.evaluation.num_samples": (
      config.evaluation.batch_prompts * config.evaluation.num_samples
    ),
    "config.warm_start.batch_size": warm_start.batch_size if warm_start.num_steps else 0,
  }.items():
    tokens = responses * (config.max_prompt_length + config.max_response_length)
    if tokens > _MOST:
      raise ValueError(
        f"{field} = {responses} responses of config.max_prompt_length = {config.max_prompt_length}"
        f" and config.max_response_length = {config.max_response_length} are {tokens} tokens, a"
        f" batch may have {_MOST}; lower one of them"
      )
  ks, limit = list(config.evaluation.ks), config.evaluation.num_samples
  wrong = [k for k in ks if not isinstance(k, int) or not 1 <= k <= limit]
  if wrong or not ks:
    raise ValueError(
      f"config.evaluation.ks = {ks}: pass@k needs at least one whole number k, 1 ≤ k ≤"
      f" config.evaluation.num_samples = {limit}"
    )


def abstract_state(
  config: ml_collections.ConfigDict, method: Method, base: Params, mesh: Mesh
) -> TrainState:
  """Shapes, dtypes and shardings of the train state; `base` are shapes of the whole network."""
  settings = make_lora(config)

  def build(key):
    trained = base if settings is None else lora.init(key, base, settings)
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)
    return initial_state(method, jax.tree.map(zeros, trained), jnp.zeros(()))

  return sharding.placed(jax.eval_shape(build, jax.random.key(0)), mesh)


def check_update(
  config: ml_collections.ConfigDict, method: Method, state: TrainState, frozen: Params
) -> None:
  """Traces one update on shapes alone, so that a component's own errors come before compilation."""
  batch = abstract_batch(config, needs_proximal=method.loss.needs_proximal)
  jax.eval_shape(functools.partial(train_step, method=method), state, frozen, batch)
  if config.diagnostics.every:
    jax.eval_shape(make_measure(config, method), state, frozen, state.params, batch)


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a run consists of, before any of it has touched a device."""

  config: ml_collections.ConfigDict
  mesh: Mesh
  task: Task
  tokenizer: Tokenizer
  model: Model
  method: Method
  outcome_policy: OutcomePolicy
  schedule: schedules.Schedule
  sources: tuple[Source, ...]  # of the rollouts of every batch
  sources_of: Callable  # pins → the sources as they were when a run began, see `Source.pin`
  generation_mesh: Mesh
  abstract_state: TrainState  # shapes, dtypes, shardings
  lora: lora.LoraSettings | None  # of the adapters that are trained; None: all parameters are
  abstract_base: Params  # all parameters of the network, as `abstract_state`
  train_step: Callable  # jitted (state, frozen, batch) → (state, metrics); the state is donated
  warm_start_optimizer: optax.GradientTransformation
  supervised_step: Callable  # jitted, see `train.warm_start.supervised_step`
  generate: Callable  # jitted (trained, frozen, prompts, key) → Rollouts of the policy
  generate_held_out: Callable  # the same with the evaluation's samples and sampling
  sync_weights: Callable  # see `make_sync_weights`
  checksums: Callable  # jitted params → u32[leaves]
  behavior_gap: Callable  # jitted, see `train.sources.behavior_gap`; sampling is static
  measure: Callable  # jitted, see `train.geometry.measure`
  mean_entropy: Callable  # jitted (trained, frozen, batch) → f32[], nats per token
  score: Callable  # jitted (trained, frozen, batch) → (log-probabilities, entropies) [P, G, T]
  merge: Callable  # jitted (trained, frozen) → all parameters of the network as arrays

  def encode(self, problems: Sequence[Problem]) -> Prompts:
    return encode_prompts(problems, self.tokenizer, self.config.max_prompt_length)

  def to_devices(self, tree: Any) -> Any:
    return sharding.to_devices(tree, sharding.batch_sharding(self.mesh))

  def to_generation(self, tree: Any) -> Any:
    """As `to_devices`, where rollouts are generated."""
    return sharding.to_devices(tree, sharding.batch_sharding(self.generation_mesh))

  @property
  def abstract_frozen(self) -> Params:
    """Parameters that are not trained, as `abstract_state`; {} where all are."""
    return {} if self.lora is None else self.abstract_base

  @property
  def gap_prompts(self) -> int:
    """Groups of a source on which log-probabilities are compared."""
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
    mesh: instead of one over the devices that are there, for shapes and for compiling alone.
  Raises:
    ValueError: what cannot work, with the field, its value, what is allowed and the remedy.
  """
  mesh = mesh or sharding.make_mesh(**config.mesh)
  check_shapes(config, mesh)
  policy = outcome_policy({k: _as_number(v) for k, v in config.grading.outcomes.items()})
  tokenizer = tokenizer or make_tokenizer(config)
  model = make_model(config, mesh, tokenizer.vocab_size)
  warn_of_long_texts(config)
  sampling = make_sampling(config.sampling, model.config.vocab_size)
  held_out_sampling = make_sampling(config.evaluation.sampling, model.config.vocab_size)
  check_training_sampling(config)
  schedule = make_schedule(config)
  own_mesh = make_generation_mesh(config, mesh)
  own_model = model if own_mesh is mesh else make_model(config, own_mesh, tokenizer.vocab_size)
  abstract_base = sharding.placed(jax.eval_shape(model.init, jax.random.key(0)), mesh)

  def jit_generate(model: Model, sampling: Sampling, group_size: int, mesh: Mesh) -> Callable:
    bound = functools.partial(
      generate,
      model=model,
      group_size=group_size,
      max_new_tokens=config.max_response_length,
      sampling=sampling,
      stop_tokens=tokenizer.stop_ids,
      pad_token=tokenizer.pad_id,
    )
    return jax.jit(bound, out_shardings=sharding.host_result_sharding(mesh))

  of_groups = functools.partial(jit_generate, group_size=config.batch.group_size, mesh=own_mesh)
  sources_of = functools.partial(
    make_sources, config, own_model, own_mesh, tokenizer, of_groups
  )
  sources = sources_of({})
  method = make_method(config, model, mesh)
  method = method._replace(sources=tuple(source.name for source in sources))
  settings = make_lora(config)
  state = abstract_state(config, method, abstract_base, mesh)
  check_update(config, method, state, {} if settings is None else abstract_base)
  check_rewards(config, method, policy, sources)
  task = with_graders(config, task or make_task(config))
  task = fitting(config, task, tokenizer)

  shardings = jax.tree.map(lambda x: x.sharding, state)
  for_host, whole = sharding.host_result_sharding(mesh), sharding.replicated(mesh)
  warm = config.warm_start
  _, warm_start_optimizer = make_optimizer("config.warm_start", warm, warm.num_steps)
  return Parts(
    config=config,
    mesh=mesh,
    task=task,
    tokenizer=tokenizer,
    model=model,
    method=method,
    outcome_policy=policy,
    schedule=schedule,
    sources=sources,
    sources_of=sources_of,
    generation_mesh=own_mesh,
    abstract_state=state,
    lora=settings,
    abstract_base=abstract_base,
    train_step=jax.jit(
      functools.partial(train_step, method=method),
      donate_argnums=0,
      out_shardings=(shardings, whole),
    ),
    warm_start_optimizer=warm_start_optimizer,
    supervised_step=jax.jit(
      functools.partial(supervised_step, model=model, optimizer=warm_start_optimizer),
      donate_argnums=0,
    ),
    generate=(
      sources[0].generate
      if sources[0].name == "policy" and own_mesh is mesh
      else jit_generate(model, sampling, config.batch.group_size, mesh)
    ),
    generate_held_out=jit_generate(model, held_out_sampling, config.evaluation.num_samples, mesh),
    sync_weights=make_sync_weights(mesh, own_mesh, shardings.params),
    checksums=jax.jit(parameter_checksums),
    behavior_gap=jax.jit(
      functools.partial(behavior_gap, model=own_model), static_argnames="sampling"
    ),
    measure=jax.jit(make_measure(config, method), out_shardings=whole),
    mean_entropy=jax.jit(functools.partial(mean_entropy, method=method), out_shardings=whole),
    score=jax.jit(functools.partial(policy_logprobs, method=method), out_shardings=for_host),
    merge=jax.jit(lambda trained, frozen: merged(model.combine(trained, frozen))),
  )


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


class Frozen(NamedTuple):
  """The parameters that are not trained, on the devices; {} where all are trained."""

  trainer: Params  # where updates are made
  sampler: Params  # where rollouts are generated


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
  shapes = jax.eval_shape(parts.warm_start_optimizer.init, params)
  init = jax.jit(
    parts.warm_start_optimizer.init, out_shardings=sharding.state_shardings(shapes, parts.mesh)
  )
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
