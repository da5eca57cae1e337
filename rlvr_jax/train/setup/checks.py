"""Checks that compare parts of a run before compilation; each part checks itself when made."""

from __future__ import annotations

import math

import jax
import ml_collections
from jax.sharding import Mesh

from rlvr_jax import specs
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import (
  MAX_INT32,
  check_between,
  check_choice,
  check_integer,
  check_reasons,
)
from rlvr_jax.rollouts import staleness
from rlvr_jax.rollouts.grading import Grading
from rlvr_jax.rollouts.sampler import CHOICES, FINISH, SWITCH
from rlvr_jax.rollouts.sources import Sources
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.engines import routing_of
from rlvr_jax.train.setup.grading import scores_partly, shaped_outcomes
from rlvr_jax.update import learning_rate, optimizer
from rlvr_jax.update.objective import Method

# Fields by section that must be at least 1, and that nothing else checks before compilation.
_AT_LEAST_ONE = {
  "": "max_skipped_in_a_row",
  "evaluation": "every num_samples batch_prompts",
  "checkpoint": "every keep",
  "logging": "print_every rollouts_every rollouts_per_refresh",
}


def check_shapes(config: ml_collections.ConfigDict, mesh: Mesh) -> None:
  """Raises ValueError if batches do not split over a mesh, or a number of a run is out of range.

  The numbers are the fields in `_AT_LEAST_ONE`, the seeds, `generation_deadline_s`,
  `evaluation.ks`, and the tokens of a batch.
  """
  for group, names in _AT_LEAST_ONE.items():
    section = config[group] if group else config
    for name in names.split():
      check_integer(f"config.{group}".rstrip("."), name, section[name], low=1, high=MAX_INT32)
  deadline = config.generation_deadline_s
  check_between("config", "generation_deadline_s", deadline, low=0.0, open_low=True)
  for owner, section in (("config", config), ("config.evaluation", config.evaluation)):
    check_integer(owner, "seed", section.seed, low=0, high=2**32 - 1)
  evaluation, warm_start = config.evaluation, config.warm_start
  ks, limit = list(evaluation.ks), evaluation.num_samples
  wrong = [k for k in ks if not isinstance(k, int) or not 1 <= k <= limit]
  if wrong or not ks:
    raise ValueError(
      f"config.evaluation.ks = {ks}: pass@k needs at least one k, and each k must be an integer"
      f" with 1 ≤ k ≤ config.evaluation.num_samples = {limit}"
    )
  sharding.check_batch("config.batch.prompts", config.batch.prompts, mesh)
  batches = {
    "config.batch.prompts · config.batch.group_size": (
      config.batch.prompts * config.batch.group_size
    ),
    "config.evaluation.batch_prompts · config.evaluation.num_samples": (
      evaluation.batch_prompts * evaluation.num_samples
    ),
  }
  if warm_start.num_steps:
    sharding.check_batch("config.warm_start.batch_size", warm_start.batch_size, mesh)
    batches["config.warm_start.batch_size"] = warm_start.batch_size
  for field, responses in batches.items():
    tokens = responses * (config.max_prompt_length + config.max_response_length)
    if tokens > MAX_INT32:
      raise ValueError(
        f"{field} = {responses} responses with their prompts may have {tokens} tokens, since each"
        " may have config.max_prompt_length + config.max_response_length ="
        f" {config.max_prompt_length} + {config.max_response_length}, but a batch may have at most"
        f" {MAX_INT32} tokens; lower one of these fields"
      )


def check_heads(network: TransformerConfig, mesh: Mesh) -> None:
  """Raises ValueError if a key/value head would be split over devices.

  Attention would then sum float32 scores over devices, in every layer.
  """
  tensor, heads = mesh.shape["tensor"], network.split_heads
  if heads % tensor:
    allowed = [size for size in range(1, heads + 1) if heads % size == 0]
    raise ValueError(
      f"config.mesh.tensor = {tensor} does not divide the network's {_key_heads(network)} key/value"
      " heads;"
      f" allowed: {allowed}. Set config.mesh.tensor to an allowed size, and config.mesh.fsdp ="
      " -1 for the remaining devices"
    )


def check_sampling_heads(network: TransformerConfig, tensor: int) -> None:
  """Raises ValueError unless `sampling_splits` is true of `config.generation_mesh`."""
  if not sampling_splits(network, tensor):
    heads = network.num_heads
    allowed = [size for size in range(1, heads + 1) if sampling_splits(network, size)]
    raise ValueError(
      f"config.generation_mesh: tensor = {tensor} does not split {heads} query heads and"
      f" {_key_heads(network)} key/value heads; choose one of {allowed}"
    )


def sampling_splits(network: TransformerConfig, tensor: int) -> bool:
  """Whether all heads can be divided among `tensor` devices; key/value heads may be copied."""
  return all(
    heads.queries % tensor == 0 and (heads.keys % tensor == 0 or tensor % heads.keys == 0)
    for heads in network.heads
  )


def _key_heads(network: TransformerConfig) -> str:
  """The numbers of key/value heads of the layers."""
  return " and ".join(map(str, dict.fromkeys(heads.keys for heads in network.heads)))


def check_schedule(config: ml_collections.ConfigDict, schedule: staleness.Schedule) -> None:
  """Raises ValueError if this run cannot sample as its schedule and `config.fleet` require.

  Args:
    config: the configuration of the run.
    schedule: the schedule of the run.
  """
  name, fleet, mesh = config.schedule, config.fleet, config.mesh.to_dict()
  is_separate = generates_separately(config.generation_mesh)
  is_raw = config.sources.temperature.recorded == "raw"
  check_choice("config.fleet", "new_weights", fleet.new_weights, CHOICES)
  if fleet.samplers:
    check_between("config.fleet", "silent_s", fleet.silent_s, low=1.0)
    reasons = {
      f"config.schedule = {name!r} does not sample during updates; set config.schedule ="
      " 'asynchronous(max_lag=4)'": not schedule.threaded,
      "config.sources.temperature.recorded = 'raw' needs the policy's parameters at the time of"
      " sampling, which a fleet's trainer does not keep; set recorded = 'sampled'": is_raw,
      "config.sources.recorded.fraction = 1.0 leaves nothing to sample; lower it": (
        config.sources.recorded.fraction == 1.0
      ),
      f"config.generation_mesh = {config.generation_mesh.to_dict()} has devices of its own, while a"
      " fleet's sampler samples on the devices of config.mesh; set"
      " config.generation_mesh.same_devices = True, or all axes of config.generation_mesh to 0": (
        is_separate
      ),
    }
    check_reasons("config.fleet.samplers = True, but ", reasons)
  elif schedule.threaded:
    reasons = {
      "config.sources.temperature.recorded = 'raw' needs one policy per batch, but with"
      f" config.schedule = {name!r} several policies may sample one batch; set recorded ="
      " 'sampled', or choose another schedule": is_raw,
      f"config.schedule = {name!r} needs all devices in one process, but this run has"
      f" {jax.process_count()} processes; choose simulated_asynchronous, or run one process": (
        jax.process_count() > 1
      ),
      # Two threads could dispatch programs that wait for each other on the same devices.
      f"config.schedule = {name!r} on config.mesh = {mesh} needs separate devices for generation;"
      " set config.generation_mesh, for example config.generation_mesh.data = 1": (
        math.prod(mesh.values()) > 1 and not is_separate
      ),
    }
    check_reasons("", reasons)
  if schedule.recorded is not None and schedule.recorded.has_several and is_raw:
    raise ValueError(
      "config.sources.temperature.recorded = 'raw' needs one policy per batch, but several policies"
      f" sampled a batch of the run that config.schedule = {name!r} repeats; set recorded ="
      " 'sampled'"
    )
  if fleet.new_weights != FINISH and schedule.recorded is None:
    reasons = {
      f"config.schedule = {name!r} never changes weights within a response; set config.schedule ="
      " 'asynchronous(max_lag=4)'": not schedule.threaded,
      "config.model.routing = 'replayed' replays the routes of one policy version, while several"
      " versions make the KV cache; set new_weights = 'recompute'": (
        fleet.new_weights == SWITCH and routing_of(config.model) == "replayed"
      ),
      "config.sources.temperature.recorded = 'raw' needs one policy per batch; set recorded ="
      " 'sampled'": is_raw,
    }
    check_reasons(f"config.fleet.new_weights = {fleet.new_weights!r}, but ", reasons)


def generates_separately(settings: ml_collections.ConfigDict) -> bool:
  """Whether `config.generation_mesh` has devices of its own."""
  return any(settings[axis] for axis in sharding.AXES) and not settings.get("same_devices", False)


def check_repeats(new_weights: str, schedule: staleness.Schedule, sources: Sources) -> None:
  """Raises ValueError unless a run samples like the recorded run that its schedule repeats.

  Args:
    new_weights: `config.fleet.new_weights`.
    schedule, sources: schedule and sources of the run.
  """
  recorded, engine = schedule.recorded, sources[0].engine
  drawn = recorded.drawn(0) if recorded is not None and recorded.versions else None
  if recorded is None or engine is None or drawn is None:
    return  # runs of earlier versions of this package have no record of these settings
  settings = engine.settings
  for name, own, theirs in (
    ("fleet.new_weights", new_weights, drawn.new_weights),
    ("sampling.slots", settings.slots, drawn.slots),
    ("max_response_length: tokens of a burst", settings.shape.steps, drawn.burst_steps),
  ):
    if own != theirs:
      raise ValueError(
        f"config.{name} = {own!r}, but {theirs!r} in the run {recorded.name!r}, which"
        f" config.schedule repeats; set config.{name.partition(':')[0]}"
        f" {'as in that run' if ':' in name else f'to {theirs!r}'}"
      )


def check_advantage(config: ml_collections.ConfigDict, method: Method, grading: Grading) -> None:
  """Raises ValueError if the run lacks inputs of its advantage, or cannot use its coefficients.

  Args:
    config: the configuration of the run.
    method, grading: method and grading of the run.
  """
  advantage, owner = method.advantage, f"config.advantage = {config.advantage!r}"
  another = ". Or choose another advantage"
  extra, environment = tuple(config.grading.extra), config.environment.name
  recorded, buffer = config.sources.recorded.fraction, config.overlong.buffer
  if "rewards_by_name" in advantage.needs:
    reasons = {
      "config.grading.extra = () names no grader besides the main grader; name one, such as"
      " (('boxed', 0.5),)": not extra,
      f"config.environment.name = {environment!r} gives one score; set it to ''": environment,
      f"config.sources.recorded.fraction = {recorded} adds rollouts that lack such rewards; set it"
      " to 0": recorded,
      f"config.overlong.buffer = {buffer} shapes only the sum of rewards; set it to 0": buffer,
    }
    check_reasons(f"{owner} needs one reward from each grader, but ", reasons, remedy=another)
  if advantage.needs_binary:
    shaped = shaped_outcomes(grading.outcome_policy)
    reasons = {
      f"config.overlong.buffer = {buffer} shapes rewards; set it to 0, or choose"
      " another advantage": buffer,
      f"config.grading.extra = {extra} adds to rewards; set it to (), or choose"
      " another advantage": extra,
      f"config.grading.outcomes has other rewards: {shaped}": shaped,
      f"config.environment.name = {environment!r} may give other scores; set"
      " config.grading.outcomes.correct = 1, or choose another"
      " advantage": scores_partly(environment, grading.outcome_policy),
    }
    check_reasons(f"{owner} needs rewards that are 0 or 1, but ", reasons)
  if advantage.per_token is not None:
    reasons = {
      "config.environment.name = '' has no turns to compare; name an environment": (
        "turn_scores" in advantage.needs and not (environment or recorded)
      ),
      f"config.reweighting = {config.reweighting!r} needs one coefficient per rollout; set it to"
      " 'none'": specs.parse("config.reweighting", config.reweighting).name != "none",
      f"config.loss = {config.loss!r} works on full responses, and needs one coefficient for each;"
      " choose another loss, such as ppo_clip or gspo": method.loss.of_responses,
    }
    what = "gives tokens of a response different coefficients"
    check_reasons(f"{owner} {what}, but ", reasons, remedy=another)


def check_recorded_rewards(
  config: ml_collections.ConfigDict, method: Method, sources: Sources
) -> None:
  """Raises ValueError if rewards must be 0 or 1, but a recorded run may have other rewards.

  Args:
    config: the configuration of the run.
    method, sources: method and sources of the run.
  """
  if method.advantage.needs_binary and sources.shaped:
    raise ValueError(
      f"config.advantage = {config.advantage!r} needs rewards that are 0 or 1, but rewards of"
      f" config.sources.recorded.store = {config.sources.recorded.store!r} are shaped; choose"
      " another store or another advantage"
    )


def check_dynamic_sampling(settings: ml_collections.ConfigDict, group_size: int) -> None:
  """Raises ValueError if dynamic sampling would never keep a group.

  Args:
    settings: `config.dynamic_sampling`.
    group_size: G.
  """
  if not settings.enabled:
    return
  check_between("config.dynamic_sampling", "max_batches", settings.max_batches, low=1)
  if group_size < 2:
    raise ValueError(
      "config.dynamic_sampling.enabled = True keeps groups with both right and wrong responses, but"
      " with config.batch.group_size = 1 there are none; set group_size ≥ 2"
    )


def may_differ(config: ml_collections.ConfigDict, schedule: staleness.Schedule) -> list[str]:
  """Names of fields that may change when a run is resumed.

  The fields describe machines, limits such as `grading.timeout_s`, and what a run writes, but not
  the method. Fields of the machine, such as `mesh`, may change rounding; `restore.find_resumable`
  then prints what changed.
  """
  fields = ["checkpoint", "logging", "grading.num_workers", "grading.timeout_s", "diagnostics"]
  fields += ["grading.memory_mib", "grading.unsandboxed_code"]
  fields += ["environment.processes", "environment.deadline_s", "environment.memory_mib"]
  fields += ["dynamic_sampling.max_batches", "store", "max_behavior_gap"]
  fields += ["fleet", "generation_deadline_s", "mesh", "generation_mesh", "sampling.slots"]
  fields += ["batch.tokens_per_row", "batch.tokens_per_micro_batch"]
  fields += ["lora.targets"] if config.lora.rank == 0 else []
  # A decaying learning rate, and some schedules, depend on num_updates.
  may_end_elsewhere = schedule.open_ended and not any(
    specs.has_parameter(f"config.{field}", package, config[field], "num_updates")
    for field, package in (("learning_rate", learning_rate), ("optimizer", optimizer))
  )
  return [*fields, "num_updates"] if may_end_elsewhere else fields
