"""Checks of a configuration, all before compilation."""

from __future__ import annotations

import dataclasses
import functools
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import Mesh

import rlvr_jax
from rlvr_jax import specs
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_between, check_choice, check_integer, describe
from rlvr_jax.ops.logprobs import check_sampling, is_truncated
from rlvr_jax.rewards.outcome import Outcome, OutcomePolicy
from rlvr_jax.rollouts import staleness
from rlvr_jax.rollouts.sampler import CHOICES
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.behavior_sources import Source
from rlvr_jax.train.setup.engines import ROUTINGS, records_routes, routing_of
from rlvr_jax.train.setup.placement import Placement
from rlvr_jax.train.setup.programs import abstract_update_batch
from rlvr_jax.types import BatchShape, Metric, Params, Sampling, TrainBatch, TrainState
from rlvr_jax.update import learning_rate as learning_rates
from rlvr_jax.update import optimizer as optimizers
from rlvr_jax.update.objective import Method
from rlvr_jax.update.step import train_step

_MAX_UPDATES = 10_000_000  # schedules are planned for all updates
# Environments whose scores are 0 and 1, or those of the task's grader.
KNOWN_SCORES = ("guess", "python", "retry")
MAX_WORKERS = 1024  # processes of graders, or of environments
_MAX_INT32 = 2**31 - 1  # of indices and counters on the devices
_AT_LEAST_ONE = {
  "": "max_prompt_length max_skipped_in_a_row",
  "batch": "prompts group_size",
  "evaluation": "every num_samples batch_prompts",
  "grading": "memory_mib",
  "checkpoint": "every keep",
  "logging": "print_every rollouts_every rollouts_per_refresh",
}
# Traceback frames in these folders are not in the module of a user's component.
_LIBRARIES = (
  os.path.dirname(rlvr_jax.__file__),
  *(os.path.dirname(str(module.__file__)) for module in (os, jax, chex, optax)),
)
_REMEDIES: dict[type[Exception], str] = {
  jax.errors.TracerBoolConversionError: "use jnp.where in place of if",
  jax.errors.TracerArrayConversionError: "use jax.numpy in place of numpy",
}


def check_shapes(config: ml_collections.ConfigDict, mesh: Mesh) -> None:
  """Raises ValueError if a size is out of range, or sizes do not fit together."""
  for group, names in _AT_LEAST_ONE.items():
    section = config[group] if group else config
    for name in names.split():
      check_integer(f"config.{group}".rstrip("."), name, section[name], low=1, high=_MAX_INT32)
  check_integer("config", "num_updates", config.num_updates, low=0, high=_MAX_UPDATES)
  check_integer("config.sampling", "slots", config.sampling.slots, low=0, high=_MAX_INT32)
  check_between("config", "max_behavior_gap", config.max_behavior_gap, low=0.0)
  check_integer("config", "proximal_every", config.proximal_every, low=0, high=_MAX_INT32)
  deadline = config.generation_deadline_s
  check_between("config", "generation_deadline_s", deadline, low=0.0, open_low=True)
  for owner, section in (("config", config), ("config.evaluation", config.evaluation)):
    check_integer(owner, "seed", section.seed, low=0, high=2**32 - 1)
  warm_start = config.warm_start
  check_integer("config.warm_start", "num_steps", warm_start.num_steps, low=0, high=_MAX_UPDATES)
  workers = config.grading.num_workers
  check_integer("config.grading", "num_workers", workers, low=0, high=MAX_WORKERS)
  check_between("config.grading", "timeout_s", config.grading.timeout_s, low=0, open_low=True)
  # At least 2: a stop token alone is not an answer.
  check_integer("config", "max_response_length", config.max_response_length, low=2, high=_MAX_INT32)
  batch = config.batch
  sharding.check_batch("config.batch.prompts", batch.prompts, mesh)
  sharding.check_batch("config.evaluation.batch_prompts", config.evaluation.batch_prompts, mesh)
  if warm_start.num_steps:
    check_integer("config.warm_start", "batch_size", warm_start.batch_size, low=1, high=_MAX_INT32)
    sharding.check_batch("config.warm_start.batch_size", warm_start.batch_size, mesh)
  for field, responses in {
    "config.batch.prompts · config.batch.group_size": batch.prompts * batch.group_size,
    "config.evaluation.batch_prompts · config.evaluation.num_samples": (
      config.evaluation.batch_prompts * config.evaluation.num_samples
    ),
    "config.warm_start.batch_size": warm_start.batch_size if warm_start.num_steps else 0,
  }.items():
    tokens = responses * (config.max_prompt_length + config.max_response_length)
    if tokens > _MAX_INT32:
      raise ValueError(
        f"{field} = {responses} responses of config.max_prompt_length = {config.max_prompt_length}"
        f" and config.max_response_length = {config.max_response_length} are {tokens} tokens, a"
        f" batch may have {_MAX_INT32}; lower one of them"
      )
  for name in ("tokens_per_row", "tokens_per_micro_batch"):
    check_integer("config.batch", name, batch[name], low=0, high=_MAX_INT32)
  ks, limit = list(config.evaluation.ks), config.evaluation.num_samples
  wrong = [k for k in ks if not isinstance(k, int) or not 1 <= k <= limit]
  if wrong or not ks:
    raise ValueError(
      f"config.evaluation.ks = {ks}: pass@k needs at least one integer k, 1 ≤ k ≤"
      f" config.evaluation.num_samples = {limit}"
    )


def check_heads(network: TransformerConfig, mesh: Mesh) -> None:
  """Raises ValueError if a key/value head would be split over devices.

  Attention would then sum float32 scores over them, in every layer.
  """
  tensor, heads = mesh.shape["tensor"], network.num_kv_heads
  if heads % tensor:
    allowed = [size for size in range(1, heads + 1) if heads % size == 0]
    raise ValueError(
      f"config.mesh.tensor = {tensor} does not divide the network's {heads} key/value heads;"
      f" allowed: {allowed}. Set config.mesh.tensor to one of them, and config.mesh.fsdp = -1 for"
      " the devices that it leaves"
    )


def check_routing(config: ml_collections.ConfigDict, network: TransformerConfig) -> None:
  """Raises ValueError if routes are to be recorded or replayed where that is not possible."""
  routing = routing_of(config.model)
  check_choice("config.model", "routing", routing, ROUTINGS)
  if records_routes(config.model) and not network.num_experts:
    field = "routing = 'replayed'" if routing == "replayed" else "record_routes = True"
    raise ValueError(
      f"config.model.{field} needs a mixture, but num_experts = 0; choose one (docs/experts.md), or"
      " set routing = 'recomputed' and record_routes = False"
    )
  compared = config.diagnostics.compared
  single = config.gram if config.gram.startswith("per_rollout") else ""
  if routing == "replayed" and (single or compared):
    field, other = ("gram", "streaming") if single else ("diagnostics.compared", "")
    raise ValueError(
      f"config.{field} = {single or compared!r} differentiates rollouts one by one, which is not"
      " offered with config.model.routing = 'replayed'; set it to"
      f" {other!r}, or routing = 'recomputed'"
    )


def check_sampling_heads(owner: str, network: TransformerConfig, tensor: int) -> None:
  """Raises ValueError unless the heads, or copies of key/value heads, split over `tensor`."""
  if not sampling_splits(network, tensor):
    heads, of_keys = network.num_heads, network.num_kv_heads
    allowed = [size for size in range(1, heads + 1) if sampling_splits(network, size)]
    raise ValueError(
      f"{owner}: tensor = {tensor} does not split {heads} query heads and {of_keys} key/value"
      f" heads; choose one of {allowed}"
    )


def sampling_splits(network: TransformerConfig, tensor: int) -> bool:
  """Whether the heads, or copies of key/value heads, split over `tensor` devices."""
  heads, of_keys = network.num_heads, network.num_kv_heads
  return heads % tensor == 0 and (of_keys % tensor == 0 or tensor % of_keys == 0)


def check_samplings(
  sampling: Sampling, held_out: Sampling, vocab_size: int, *, allow_truncated: bool
) -> None:
  """Raises ValueError if sampling is greedy, or truncated without being allowed.

  Args:
    sampling, held_out: the distributions of training and of evaluation.
    vocab_size: V.
    allow_truncated: `config.allow_truncated_behavior`.
  """
  check_sampling("config.sampling", sampling, vocab_size)
  check_sampling("config.evaluation.sampling", held_out, vocab_size)
  if sampling.temperature == 0:
    raise ValueError(
      "config.sampling.temperature = 0: greedy rollouts have no density to train on; set it > 0"
    )
  if is_truncated(sampling) and not allow_truncated:
    plain = dataclasses.replace(Sampling(), temperature=sampling.temperature)
    changed = [name for name, value in vars(sampling).items() if value != getattr(plain, name)]
    named = lambda s: ", ".join(f"{name} = {getattr(s, name)}" for name in changed)
    raise ValueError(
      f"config.sampling.{named(sampling)}: training on truncated sampling biases the ratio (its"
      f" mean is the kept mass). Set {named(plain)}, or config.allow_truncated_behavior = True"
      " to allow it"
    )


def check_fleet(config: ml_collections.ConfigDict, schedule: staleness.Schedule) -> None:
  """Raises ValueError unless a run with `config.fleet.samplers` can have them."""
  settings = config.fleet
  check_between("config.fleet", "silent_s", settings.silent_s, low=1.0)
  reasons = {
    f"config.schedule = {config.schedule!r} has no real-time bound; set it to"
    " 'asynchronous(max_lag=4)'": not schedule.threaded,
    "config.sources.temperature.recorded = 'raw' needs the policy's parameters where batches are"
    " assembled; set it to 'sampled'": config.sources.temperature.recorded == "raw",
    "config.sources.recorded.fraction = 1.0 leaves nothing to sample; lower it": (
      config.sources.recorded.fraction == 1.0
    ),
    f"config.generation_mesh = {config.generation_mesh.to_dict()} has devices of its own, but a"
    " sampler has all of its program's; set config.generation_mesh.same_devices = True, or its axes"
    " to 0": any(config.generation_mesh[axis] for axis in sharding.AXES)
    and not config.generation_mesh.get("same_devices", False),
  }
  for why, applies in reasons.items():
    if applies:
      raise ValueError(f"config.fleet.samplers = True, but {why}")


def check_new_weights(config: ml_collections.ConfigDict, schedule: staleness.Schedule) -> None:
  """Raises ValueError unless responses can have what `config.fleet.new_weights` says."""
  setting = config.fleet.new_weights
  check_choice("config.fleet", "new_weights", setting, CHOICES)
  is_raw = config.sources.temperature.recorded == "raw"
  if is_raw and schedule.threaded and not config.fleet.samplers:  # fleets have their own reason
    raise ValueError(
      "config.sources.temperature.recorded = 'raw' needs one policy per batch, but with"
      f" config.schedule = {config.schedule!r} groups of a batch may have several; set it to"
      " 'sampled', or choose another schedule"
    )
  if setting == "finish" or schedule.recorded is not None:
    return
  reasons = {
    f"config.schedule = {config.schedule!r} has no policies that come meanwhile; set it to"
    " 'asynchronous(max_lag=4)'": not schedule.threaded,
    "config.model.routing = 'replayed' has the routes of one version, and the cache has those of"
    " several; set new_weights = 'recompute'": (
      setting == "switch" and routing_of(config.model) == "replayed"
    ),
    "config.sources.temperature.recorded = 'raw' needs one policy per batch; set it to 'sampled'": (
      config.sources.temperature.recorded == "raw"
    ),
  }
  for why, applies in reasons.items():
    if applies:
      raise ValueError(f"config.fleet.new_weights = {setting!r}, but {why}")


def check_repeats(
  config: ml_collections.ConfigDict, schedule: staleness.Schedule, sources: Sequence[Source]
) -> None:
  """Raises ValueError unless a run samples as the recorded one that its schedule repeats."""
  recorded, engine = schedule.recorded, sources[0].engine
  drawn = recorded.drawn(0) if recorded is not None and recorded.versions else None
  if recorded is None or engine is None or drawn is None:
    return  # an earlier version of this package did not record more than versions
  settings = engine.settings
  for name, own, theirs in (
    ("fleet.new_weights", config.fleet.new_weights, drawn.new_weights),
    ("sampling.slots", settings.slots, drawn.slots),
    ("max_response_length: tokens of a burst", settings.shape.steps, drawn.burst_steps),
  ):
    if own != theirs:
      raise ValueError(
        f"config.{name} = {own!r}, but {theirs!r} in the run {recorded.name!r} that"
        f" config.schedule repeats; set it to {theirs!r}"
      )


def check_rewards(
  config: ml_collections.ConfigDict,
  method: Method,
  outcome_policy: OutcomePolicy,
  sources: Sequence[Source],
) -> None:
  """Raises ValueError if advantage, loss, filters and rewards are incompatible."""
  check_between("config.overlong", "buffer", config.overlong.buffer, low=0)
  if config.overlong.buffer > config.max_response_length:
    raise ValueError(
      f"config.overlong.buffer = {config.overlong.buffer} tokens is more than"
      f" config.max_response_length = {config.max_response_length}; lower it"
    )
  if config.proximal_every and not method.loss.needs_proximal:
    raise ValueError(
      f"config.proximal_every = {config.proximal_every}, but config.loss = {config.loss!r} has no"
      " proximal policy; set it to 0, or choose decoupled_ppo or a correction, such as"
      " config.correction = 'tis'"
    )
  shaped = shaped_outcomes(outcome_policy)
  not_binary = {
    f"config.overlong.buffer = {config.overlong.buffer} shapes them; set it to 0, or choose another"
    " advantage": config.overlong.buffer,
    f"those of config.sources.recorded.store = {config.sources.recorded.store!r} are shaped; choose"
    " another store or another advantage": any(source.shaped for source in sources),
    f"config.grading.extra = {tuple(config.grading.extra)} adds to them; set it to (), or choose"
    " another advantage": config.grading.extra,
    f"config.grading.outcomes has {shaped}": shaped,
    f"config.environment.name = {config.environment.name!r} may give other scores; set"
    " config.grading.outcomes.correct = 1, or choose another"
    " advantage": scores_partly(config.environment.name, outcome_policy),
  }
  for why, applies in not_binary.items():
    if method.advantage.needs_binary and applies:
      raise ValueError(
        f"config.advantage = {config.advantage!r} needs rewards that are 0 or 1, but {why}"
      )
  if method.advantage.per_token is not None:
    _check_advantage_of_turns(config, method)
  if config.dynamic_sampling.enabled:
    limit = config.dynamic_sampling.max_batches
    check_between("config.dynamic_sampling", "max_batches", limit, low=1)
    if config.batch.group_size < 2:
      raise ValueError(
        "config.dynamic_sampling.enabled with config.batch.group_size = 1: a group of one is always"
        " all right or all wrong, so nothing would ever be kept; set group_size ≥ 2"
      )


def _check_advantage_of_turns(config: ml_collections.ConfigDict, method: Method) -> None:
  """Raises ValueError unless an advantage of turns has turns, and coefficients may be of tokens."""
  reasons = {
    "config.environment.name = '' has none; name an environment": (
      not config.environment.name and not config.sources.recorded.fraction
    ),
    f"config.reweighting = {config.reweighting!r} needs one number per rollout; set it to 'none'": (
      specs.parse("config.reweighting", config.reweighting).name != "none"
    ),
    f"config.loss = {config.loss!r} is of full responses, and needs one number for each; choose"
    " another loss, such as ppo_clip or gspo": method.loss.of_responses,
  }
  for why, applies in reasons.items():
    if applies:
      raise ValueError(
        f"config.advantage = {config.advantage!r} compares the turns of dialogues, but {why}. Or"
        " choose another advantage"
      )


def shaped_outcomes(outcome_policy: OutcomePolicy) -> dict[str, Any]:
  """Outcomes whose reward may be other than 0 or 1; only the score of a correct answer is 1."""
  plain = ("mask", "stop", 0.0, 1.0)
  binary = lambda outcome, reward: reward in plain or (outcome, reward) == ("correct", "score")
  return {o.value: reward for o, reward in outcome_policy.items() if not binary(o.value, reward)}


def scores_partly(environment: str, outcome_policy: OutcomePolicy) -> bool:
  """Whether the reward of a correct dialogue may be other than 1.

  Args:
    environment: `config.environment.name`.
    outcome_policy: the rewards of outcomes.
  """
  if not environment or outcome_policy[Outcome.CORRECT] != "score":
    return False
  spec = specs.parse("config.environment.name", environment)
  discounts = spec.arguments.get("discount", 1.0) != 1.0
  return spec.name not in KNOWN_SCORES or discounts


def check_optimizer(
  owner: str, name: str, transformation: optax.GradientTransformation, params: Params
) -> None:
  """Raises ValueError if an optimizer fails on shapes: many of optax's are checked when traced.

  Args:
    owner: group of fields of the configuration, such as "config.warm_start".
    name: its `optimizer`.
    transformation: from `build.make_optimizer`.
    params: shapes and dtypes of the trained parameters.
  """
  owner = f"{owner}.optimizer = {name!r}"

  def updates(params: Params) -> Params:
    return transformation.update(params, transformation.init(params), params)[0]

  changes = _trace(owner, updates, params)
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  if shapes(changes) != shapes(params):
    raise ValueError(
      f"{owner}: its updates do not have the shapes of the parameters; it must map gradients to"
      " updates of the same shapes"
    )


def check_update(
  method: Method,
  placement: Placement,
  shape: BatchShape,
  *,
  advantage: str,
  loss: str,
  diagnose: Callable[..., Any] | None,
  has_turns: bool = False,
) -> None:
  """Traces one update on shapes, so that errors in components are raised before compilation.

  Args:
    method, placement: of the run.
    shape: of a training batch.
    advantage, loss: `config.advantage` and `config.loss`, for messages.
    diagnose: `programs.make_measure`, if the run measures its gradient geometry.
    has_turns: whether rollouts are dialogues.
  """
  state, frozen = placement.state, placement.frozen
  batch = abstract_update_batch(method, placement, shape, has_turns=has_turns)
  coefficients = _check_advantage(advantage, method, state, batch)
  _check_loss(loss, method, batch, coefficients)
  jax.eval_shape(functools.partial(train_step, method=method), state, frozen, batch)
  if diagnose is not None:
    jax.eval_shape(diagnose, state, frozen, state.params, batch)


def _check_advantage(
  name: str, method: Method, state: TrainState, batch: TrainBatch
) -> jax.ShapeDtypeStruct:
  """Raises ValueError if `config.advantage` fails, or its coefficients are not [P, G].

  Returns:
    The coefficients that the loss gets, [P, G] or [P, G, T].
  """
  owner = f"config.advantage = {name!r}"
  coefficients = _trace(owner, method.advantage.apply, state.advantage_state, batch)
  if getattr(coefficients, "shape", None) != batch.rewards.shape:
    raise ValueError(
      f"{owner}: the advantage returns {describe(coefficients)}; it must return coefficients"
      f" [P, G], here {list(batch.rewards.shape)}"
    )
  in_loss = _trace(owner, method.advantage.in_loss, state.advantage_state, batch, coefficients)
  if getattr(in_loss, "shape", None) not in (batch.rewards.shape, batch.tokens.shape):
    raise ValueError(
      f"{owner}: per_token of the advantage returns {describe(in_loss)}; it must return"
      f" coefficients [P, G, T], here {list(batch.tokens.shape)}"
    )
  return in_loss


def _check_loss(
  name: str, method: Method, batch: TrainBatch, coefficients: jax.ShapeDtypeStruct
) -> None:
  """Raises ValueError if `config.loss` fails, or does not return (losses [P, G, T], metrics)."""
  owner, loss = f"config.loss = {name!r}", method.loss

  def losses_of(logprobs, batch, coefficients):
    statistics = loss.statistics and loss.statistics(logprobs, batch, coefficients)
    return loss.per_token(logprobs, batch, coefficients, statistics)

  shape = batch.tokens.shape
  logprobs = jax.ShapeDtypeStruct(shape, jnp.float32)
  returned = _trace(owner, losses_of, logprobs, batch, coefficients)
  pair = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
  if getattr(pair[0], "shape", None) != shape or not isinstance(pair[1], dict):
    raise ValueError(
      f"{owner}: per_token returns {describe(returned)}; it must return (losses f32[P, G, T],"
      f" metrics), here [P, G, T] = {list(shape)}"
    )
  for name, metric in pair[1].items():
    if not isinstance(metric, Metric):
      raise ValueError(
        f"{owner}: its metric {name!r} is {describe(metric)}; it must be a Mean, Max, Min or Sum"
        " of rlvr_jax.types"
      )


def _trace(owner: str, function: Callable[..., Any], *shapes: Any) -> Any:
  """Shapes of what a component returns; an error in it is a ValueError of one line."""
  try:
    return jax.eval_shape(function, *shapes)
  except Exception as error:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    position = f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""
    remedy = next((f"; {do}" for cls, do in _REMEDIES.items() if isinstance(error, cls)), "")
    raise ValueError(f"{owner}: {kind}{text}{position}{remedy}") from error


def may_differ(schedule: staleness.Schedule, *, learning_rate: str, optimizer: str) -> list[str]:
  """Names of fields that may change when a run is resumed, since they do not affect its results.

  Those of the machine change rounding, which `restore.find_resumable` says.

  Args:
    schedule: of the run.
    learning_rate, optimizer: those fields of the configuration.
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
