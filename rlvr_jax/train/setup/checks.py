"""Checks that compare parts of a run before compilation; each part checks itself when made."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import ml_collections
from jax.sharding import Mesh

from rlvr_jax import specs
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import MAX_INT32, check_between, check_choice, check_integer
from rlvr_jax.rollouts import staleness
from rlvr_jax.rollouts.grading import Grading
from rlvr_jax.rollouts.sampler import CHOICES
from rlvr_jax.rollouts.sources import Source
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.grading import scores_partly, shaped_outcomes
from rlvr_jax.update import learning_rate as learning_rates
from rlvr_jax.update import optimizer as optimizers

# Fields by section that must be at least 1, and that nothing else checks before compilation.
_AT_LEAST_ONE = {
  "": "max_skipped_in_a_row",
  "evaluation": "every num_samples batch_prompts",
  "checkpoint": "every keep",
  "logging": "print_every rollouts_every rollouts_per_refresh",
}


def check_shapes(config: ml_collections.ConfigDict, mesh: Mesh) -> None:
  """Raises ValueError if batches do not split over a mesh, or a number of a run is out of range.

  It compares sections with the mesh, and checks the ranges of the fields in `_AT_LEAST_ONE`.
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
      f"config.evaluation.ks = {ks}: pass@k needs at least one integer k, 1 ≤ k ≤"
      f" config.evaluation.num_samples = {limit}"
    )
  sharding.check_batch("config.batch.prompts", config.batch.prompts, mesh)
  sharding.check_batch("config.evaluation.batch_prompts", evaluation.batch_prompts, mesh)
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
        f"{field} = {responses} responses of config.max_prompt_length = {config.max_prompt_length}"
        f" and config.max_response_length = {config.max_response_length} are {tokens} tokens, a"
        f" batch may have {MAX_INT32}; lower one of them"
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
      f" allowed: {allowed}. Set config.mesh.tensor to one of them, and config.mesh.fsdp = -1 for"
      " the devices that it leaves"
    )


def check_sampling_heads(owner: str, network: TransformerConfig, tensor: int) -> None:
  """Raises ValueError unless heads, or copies of key/value heads, can be split over `tensor`."""
  if not sampling_splits(network, tensor):
    heads = network.num_heads
    allowed = [size for size in range(1, heads + 1) if sampling_splits(network, size)]
    raise ValueError(
      f"{owner}: tensor = {tensor} does not split {heads} query heads and {_key_heads(network)}"
      f" key/value heads; choose one of {allowed}"
    )


def sampling_splits(network: TransformerConfig, tensor: int) -> bool:
  """Whether heads, or copies of key/value heads, can be split over `tensor` devices."""
  return all(
    heads.queries % tensor == 0 and (heads.keys % tensor == 0 or tensor % heads.keys == 0)
    for heads in network.heads
  )


def _key_heads(network: TransformerConfig) -> str:
  """The numbers of key/value heads of the layers."""
  return " and ".join(map(str, dict.fromkeys(heads.keys for heads in network.heads)))


def check_fleet(
  name: str,
  schedule: staleness.Schedule,
  settings: ml_collections.ConfigDict,
  sources: ml_collections.ConfigDict,
  generation_mesh: ml_collections.ConfigDict,
) -> None:
  """Raises ValueError if this run cannot use a fleet of samplers.

  Args:
    name: `config.schedule`.
    schedule: the schedule of the run.
    settings: `config.fleet`.
    sources: `config.sources`.
    generation_mesh: `config.generation_mesh`.
  """
  check_between("config.fleet", "silent_s", settings.silent_s, low=1.0)
  reasons = {
    f"config.schedule = {name!r} has no real-time bound; set it to"
    " 'asynchronous(max_lag=4)'": not schedule.threaded,
    "config.sources.temperature.recorded = 'raw' needs the policy's parameters where batches are"
    " assembled; set it to 'sampled'": sources.temperature.recorded == "raw",
    "config.sources.recorded.fraction = 1.0 leaves nothing to sample; lower it": (
      sources.recorded.fraction == 1.0
    ),
    f"config.generation_mesh = {generation_mesh.to_dict()} has devices of its own, but a"
    " sampler has all of its program's devices; set config.generation_mesh.same_devices = True, or"
    " its axes to 0": generates_separately(generation_mesh),
  }
  for why, applies in reasons.items():
    if applies:
      raise ValueError(f"config.fleet.samplers = True, but {why}")


def check_real_time(
  name: str,
  schedule: staleness.Schedule,
  mesh: ml_collections.ConfigDict,
  generation_mesh: ml_collections.ConfigDict,
) -> None:
  """Raises ValueError if generation would run beside updates on the same devices of a mesh.

  Args:
    name: `config.schedule`.
    schedule: the schedule of the run.
    mesh, generation_mesh: sections of the configuration.
  """
  if not schedule.threaded:
    return
  if jax.process_count() > 1:
    raise ValueError(
      f"config.schedule = {name!r} needs all devices in one process, this run has"
      f" {jax.process_count()}; choose simulated_asynchronous, or run one process"
    )
  if math.prod(mesh.to_dict().values()) > 1 and not generates_separately(generation_mesh):
    # Two threads could dispatch programs that wait for each other on the same devices.
    raise ValueError(
      f"config.schedule = {name!r} on config.mesh = {mesh.to_dict()} needs separate devices for"
      " generation; set config.generation_mesh, for example config.generation_mesh.data = 1"
    )


def generates_separately(settings: ml_collections.ConfigDict) -> bool:
  """Whether `config.generation_mesh` has devices of its own."""
  return any(settings[axis] for axis in sharding.AXES) and not settings.get("same_devices", False)


def check_new_weights(
  name: str,
  schedule: staleness.Schedule,
  settings: ml_collections.ConfigDict,
  *,
  is_raw: bool,
  routing: str,
) -> None:
  """Raises ValueError if this run cannot use its `config.fleet.new_weights`.

  Args:
    name: `config.schedule`.
    schedule: the schedule of the run.
    settings: `config.fleet`.
    is_raw: whether a source records raw log-probabilities.
    routing: `config.model.routing`.
  """
  setting = settings.new_weights
  check_choice("config.fleet", "new_weights", setting, CHOICES)
  if is_raw and schedule.threaded and not settings.samplers:  # fleets: see `check_fleet`
    raise ValueError(
      "config.sources.temperature.recorded = 'raw' needs one policy per batch, but with"
      f" config.schedule = {name!r} groups of a batch may have several policies; set it to"
      " 'sampled', or choose another schedule"
    )
  if setting == "finish" or schedule.recorded is not None:
    return
  reasons = {
    f"config.schedule = {name!r} gives a response no newer weights; set it to"
    " 'asynchronous(max_lag=4)'": not schedule.threaded,
    "config.model.routing = 'replayed' has the routes of one version, and the cache has those of"
    " several; set new_weights = 'recompute'": setting == "switch" and routing == "replayed",
    "config.sources.temperature.recorded = 'raw' needs one policy per batch; set it to 'sampled'": (
      is_raw
    ),
  }
  for why, applies in reasons.items():
    if applies:
      raise ValueError(f"config.fleet.new_weights = {setting!r}, but {why}")


def check_repeats(
  new_weights: str, schedule: staleness.Schedule, sources: Sequence[Source]
) -> None:
  """Raises ValueError unless a run samples like the recorded run that its schedule repeats.

  Args:
    new_weights: `config.fleet.new_weights`.
    schedule, sources: schedule and sources of the run.
  """
  recorded, engine = schedule.recorded, sources[0].engine
  drawn = recorded.drawn(0) if recorded is not None and recorded.versions else None
  if recorded is None or engine is None or drawn is None:
    return  # without these settings the run was recorded by an earlier version of this package
  settings = engine.settings
  for name, own, theirs in (
    ("fleet.new_weights", new_weights, drawn.new_weights),
    ("sampling.slots", settings.slots, drawn.slots),
    ("max_response_length: tokens of a burst", settings.shape.steps, drawn.burst_steps),
  ):
    if own != theirs:
      raise ValueError(
        f"config.{name} = {own!r}, but {theirs!r} in the run {recorded.name!r} that"
        f" config.schedule repeats; set it to {theirs!r}"
      )


def check_binary(
  advantage: str,
  grading: Grading,
  sources: Sequence[Source],
  *,
  extra: Sequence[object],
  store: str,
  environment: str,
) -> None:
  """Raises ValueError if rewards may be other than 0 and 1, which an advantage needs.

  Args:
    advantage: `config.advantage`.
    grading, sources: grading and sources of the run.
    extra: `config.grading.extra`.
    store: `config.sources.recorded.store`.
    environment: `config.environment.name`.
  """
  shaped = shaped_outcomes(grading.outcome_policy)
  reasons = {
    f"config.overlong.buffer = {grading.overlong_buffer} shapes them; set it to 0, or choose"
    " another advantage": grading.overlong_buffer,
    f"those of config.sources.recorded.store = {store!r} are shaped; choose"
    " another store or another advantage": any(source.shaped for source in sources),
    f"config.grading.extra = {tuple(extra)} adds to them; set it to (), or choose"
    " another advantage": extra,
    f"config.grading.outcomes has {shaped}": shaped,
    f"config.environment.name = {environment!r} may give other scores; set"
    " config.grading.outcomes.correct = 1, or choose another"
    " advantage": scores_partly(environment, grading.outcome_policy),
  }
  for why, applies in reasons.items():
    if applies:
      raise ValueError(f"config.advantage = {advantage!r} needs rewards that are 0 or 1, but {why}")


def check_rewards_by_name(
  advantage: str,
  *,
  extra: Sequence[tuple[str, float]],
  environment: str,
  recorded: float,
  overlong_buffer: int,
) -> None:
  """Raises ValueError unless several graders score every rollout, as some advantages need.

  Args:
    advantage: `config.advantage`.
    extra: `config.grading.extra`.
    environment: `config.environment.name`.
    recorded: `config.sources.recorded.fraction`.
    overlong_buffer: `config.overlong.buffer`.
  """
  reasons = {
    "config.grading.extra = () has no other grader than the main one; name one, such as"
    " (('boxed', 0.5),)": not extra,
    f"config.environment.name = {environment!r} gives one score; set it to ''": environment,
    f"config.sources.recorded.fraction = {recorded} takes rollouts without them; set it to 0": (
      recorded
    ),
    f"config.overlong.buffer = {overlong_buffer} shapes only their sum; set it to 0": (
      overlong_buffer
    ),
  }
  for why, applies in reasons.items():
    if applies:
      raise ValueError(
        f"config.advantage = {advantage!r} needs rewards by name, but {why}. Or choose"
        " another advantage"
      )


def check_advantage_of_tokens(
  advantage: str, reweighting: str, loss: str, *, lacks_turns: bool, of_responses: bool
) -> None:
  """Raises ValueError if this run cannot use coefficients per token, or has no turns to compare.

  Args:
    advantage, reweighting, loss: fields of the configuration.
    lacks_turns: whether the advantage compares turns, but every rollout has one turn.
    of_responses: whether the loss takes one coefficient per response.
  """
  reasons = {
    "config.environment.name = '' has no turns to compare; name an environment": lacks_turns,
    f"config.reweighting = {reweighting!r} needs one number per rollout; set it to 'none'": (
      specs.parse("config.reweighting", reweighting).name != "none"
    ),
    f"config.loss = {loss!r} works on full responses, and needs one number for each; choose"
    " another loss, such as ppo_clip or gspo": of_responses,
  }
  for why, applies in reasons.items():
    if applies:
      raise ValueError(
        f"config.advantage = {advantage!r} gives tokens of a response different coefficients,"
        f" but {why}. Or choose another advantage"
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
      "config.dynamic_sampling.enabled with config.batch.group_size = 1: a group of one is always"
      " all right or all wrong, so nothing would ever be kept; set group_size ≥ 2"
    )


def may_differ(schedule: staleness.Schedule, *, learning_rate: str, optimizer: str) -> list[str]:
  """Names of fields that may change when a run is resumed, since they do not affect its results.

  Fields of the machine change rounding; `restore.find_resumable` then prints what changed.

  Args:
    schedule: the schedule of the run.
    learning_rate, optimizer: fields of the configuration.
  """
  fields = ["checkpoint", "logging", "grading.num_workers", "grading.timeout_s", "diagnostics"]
  fields += ["grading.memory_mib", "grading.unsandboxed_code"]
  fields += ["dynamic_sampling.max_batches", "store", "max_behavior_gap"]
  fields += ["fleet", "generation_deadline_s", "mesh", "generation_mesh", "sampling.slots"]
  fields += ["batch.tokens_per_row", "batch.tokens_per_micro_batch"]
  # A decaying learning rate, and some schedules, depend on num_updates.
  may_end_elsewhere = schedule.open_ended and not any(
    specs.has_parameter(f"config.{field}", package, name, "num_updates")
    for field, package, name in (
      ("learning_rate", learning_rates, learning_rate),
      ("optimizer", optimizers, optimizer),
    )
  )
  return [*fields, "num_updates"] if may_end_elsewhere else fields
