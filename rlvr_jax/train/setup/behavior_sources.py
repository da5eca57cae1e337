"""Makes the policies that sample a batch, as `config.sources` describes them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence

import jax
import ml_collections
from jax.sharding import Mesh

from rlvr_jax.data import Tokenizer
from rlvr_jax.models import quantized
from rlvr_jax.models.functional import Model, transformer
from rlvr_jax.models.linear import merge_low_rank
from rlvr_jax.models.presets import model_settings
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_between, check_choice, check_integer
from rlvr_jax.ops.logprobs import check_sampling, is_truncated
from rlvr_jax.rollouts.recorded import RecordedGroups
from rlvr_jax.rollouts.sources import OfAnotherRun, Source, Sources
from rlvr_jax.rollouts.store import StoreError
from rlvr_jax.sampling import LEAST_TEMPERATURE, sampling_of
from rlvr_jax.storage.files import JsonObject
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.checkpointing.checkpoint_files import read_params, saved_steps
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.engines import Engines
from rlvr_jax.types import BatchShape, Params, Sampling

RECORDED = ("sampled", "raw")
AT_TEMPERATURE_1 = Sampling()  # the distribution of raw log-probabilities

# Largest mean |Δ log p|, in nats per token at temperature 1, between the two computations of a
# log-probability (cached decoding, one forward pass), by the precision of products. For networks of
# up to four layers of width 128, `agreement/policy_mean` is 3e-7 in float32, 2e-3 in bfloat16, and
# 5e-4 in float32 with a KV cache in int8, which has the bound of bfloat16.
MAX_GAP = {"highest": 1e-4, "default": 5e-2}


def make_sampling(
  settings: ml_collections.ConfigDict, vocab_size: int, *, allow_truncated: bool
) -> Sampling:
  """The distribution from which training rollouts are sampled.

  Args:
    settings: `config.sampling`.
    vocab_size: V.
    allow_truncated: `config.allow_truncated_behavior`.
  Raises:
    ValueError: sampling is greedy; or top_k, top_p or min_p truncates the distribution although
      `allow_truncated` is False.
  """
  sampling = sampling_of(settings)
  check_sampling("config.sampling", sampling, vocab_size)
  if sampling.temperature == 0:
    raise ValueError(
      "config.sampling.temperature = 0 is greedy decoding, which gives no probabilities to train"
      " on; set config.sampling.temperature > 0"
    )
  if is_truncated(sampling) and not allow_truncated:
    plain = dataclasses.replace(Sampling(), temperature=sampling.temperature)
    changed = [name for name, value in vars(sampling).items() if value != getattr(plain, name)]
    named = lambda s: ", ".join(f"{name} = {getattr(s, name)}" for name in changed)
    raise ValueError(
      f"config.sampling.{named(sampling)}: training on truncated sampling biases the importance"
      " ratio (its mean is the probability of the kept tokens, not 1). Set"
      f" {named(plain)}, or allow this by config.allow_truncated_behavior = True"
    )
  return sampling


def make_held_out_sampling(settings: ml_collections.ConfigDict, vocab_size: int) -> Sampling:
  """The distribution from which responses of evaluations are sampled.

  Args:
    settings: `config.evaluation.sampling`.
    vocab_size: V.
  """
  sampling = sampling_of(settings)
  check_sampling("config.evaluation.sampling", sampling, vocab_size)
  return sampling


def groups_by_source(fractions: Mapping[str, float], num_prompts: int) -> dict[str, int]:
  """Number of groups in a batch by source, the trained policy first; omits sources with 0 groups.

  Args:
    fractions: the other sources' fractions of the groups of a batch, by name.
    num_prompts: P.
  Raises:
    ValueError: a fraction times P is not an integer, or the fractions sum to more than 1.
  """
  groups = {}
  for name, fraction in fractions.items():
    check_between(f"config.sources.{name}", "fraction", fraction, low=0.0, high=1.0)
    groups[name] = round(fraction * num_prompts)
    if abs(fraction * num_prompts - groups[name]) > 1e-6:
      raise ValueError(
        f"config.sources.{name}.fraction · config.batch.prompts = {fraction} · {num_prompts} ="
        f" {fraction * num_prompts:g} is not a whole number of groups; set the fraction to a"
        f" multiple of 1/{num_prompts}, for example {groups[name] / num_prompts:g}"
      )
  rest = num_prompts - sum(groups.values())
  if rest < 0:
    raise ValueError(
      f"config.sources: the fractions {dict(fractions)} sum to more than 1; lower one of them"
    )
  return {name: number for name, number in {"policy": rest, **groups}.items() if number}


def make_sources(
  config: ml_collections.ConfigDict,
  model: Model,
  mesh: Mesh,
  tokenizer: Tokenizer,
  shape: BatchShape,
  engines: Engines,
  pins: JsonObject,
) -> Sources:
  """The sources that `config.sources` describes; all errors are found before compilation.

  Args:
    config: the config of the run.
    model: the model of the trained policy, as functions on `mesh`.
    mesh: the mesh of generation.
    tokenizer: the tokenizer of the run.
    shape: the shape of a training batch.
    engines: makes the engines of the sources.
    pins: name of a source → the checkpoint step or batch numbers (`Source.pin`) that the run began
      with; empty for a new run.
  Raises:
    ValueError: a setting is invalid; the message has the field, its value, what is allowed and how
      to fix it.
  """
  settings, sampling = config.sources, sampling_of(config.sampling)
  check_between("config", "max_behavior_gap", config.max_behavior_gap, low=0.0)
  check_choice("config.sources.quantized", "format", settings.quantized.format, quantized.FORMATS)
  shifted = dataclasses.replace(sampling, temperature=settings.temperature.temperature)
  _check_recorded_temperature(settings.temperature, config.policy_temperature)
  owner = "config.sources.temperature"
  check_sampling(owner, shifted, model.config.vocab_size)
  check_between(owner, "temperature", shifted.temperature, low=LEAST_TEMPERATURE)
  raw = settings.temperature.recorded == "raw"

  def exact(name: str, prompts: int, sampling: Sampling, *, raw: bool = False) -> Source:
    engine = engines.make(model, sampling, prompts=prompts)
    gap = max_gap(
      config.max_behavior_gap, model.config, sampling, rounded=bool(config.sampling.cache_format)
    )
    return Source(name, prompts, sampling, engine, max_gap=gap, raw=raw)

  def rounded(name: str, prompts: int) -> Source:
    @jax.jit
    def copy(trained: Params, frozen: Params) -> tuple[Params, Params]:
      merged = merge_low_rank(model.combine(trained, frozen))
      return quantized.quantize(merged, settings.quantized.format), {}

    decoded = quantized.adapt_to_quantized(
      model, settings.quantized.format, decode_rounded=sharding.platform(model.mesh) != "cpu"
    )
    engine = engines.make(decoded, sampling, prompts=prompts)
    return Source(name, prompts, sampling, engine, params_of=copy)

  def checkpoint(name: str, prompts: int) -> Source:
    other, step, read = other_policy(
      settings.checkpoint, config.tokenizer, model, mesh, pins.get(name)
    )
    if engines.records_routes and other.config.mixture != model.config.mixture:
      raise ValueError(
        "config.sources.checkpoint.workdir ="
        f" {settings.checkpoint.workdir!r}: that run's (layers, experts, experts per token) are"
        f" {other.config.mixture}, but this run's are {model.config.mixture}, so that its routes do"
        " not fit this run; choose another run, or set config.model.routing = 'recomputed' and"
        " config.model.record_routes = False"
      )
    engine = engines.make(other, sampling, prompts=prompts)
    return Source(
      name, prompts, sampling, engine, params_of=OfAnotherRun(read), pin=step, of_this_run=False
    )

  def recorded(name: str, prompts: int) -> Source:
    # The distribution of the other run is not known here: the gap is measured to this run's policy.
    target = Sampling(temperature=config.policy_temperature)
    groups = recorded_groups(
      settings.recorded.store,
      (config.tokenizer, tokenizer.pad_id),
      shape,
      allow_truncated=config.allow_truncated_behavior,
      numbers=pins.get(name),
      routes=model.config.mixture if engines.records_routes else None,
    )
    return Source(name, prompts, target, None, groups, pin=groups.numbers, of_this_run=False)

  make: dict[str, Callable[..., Source]] = dict(
    policy=functools.partial(exact, sampling=sampling),
    temperature=functools.partial(exact, sampling=shifted, raw=raw),
    quantized=rounded,
    checkpoint=checkpoint,
    recorded=recorded,
  )
  fractions = {name: settings[name].fraction for name in make if name != "policy"}
  groups = groups_by_source(fractions, shape.prompts)
  for name, prompts in groups.items():
    sharding.check_batch(f"groups of config.sources.{name}", prompts, mesh)
  return Sources(make[name](name, prompts) for name, prompts in groups.items())


def _check_recorded_temperature(
  settings: ml_collections.ConfigDict, policy_temperature: float
) -> None:
  """Raises ValueError if the source cannot record the configured kind of log-probabilities.

  Args:
    settings: `config.sources.temperature`.
    policy_temperature: `config.policy_temperature`.
  """
  owner = "config.sources.temperature"
  check_choice(owner, "recorded", settings.recorded, RECORDED)
  if settings.recorded == "raw" and not settings.fraction:
    raise ValueError(
      f"{owner}: recorded = 'raw' has no effect with fraction = 0; set {owner}.fraction > 0, or"
      " recorded = 'sampled'"
    )
  if settings.recorded == "raw" and policy_temperature != AT_TEMPERATURE_1.temperature:
    raise ValueError(
      f"{owner}.recorded = 'raw' records log-probabilities at temperature 1, but the policy is"
      f" trained at config.policy_temperature = {policy_temperature}, so that all importance ratios"
      " would be wrong; set config.policy_temperature = 1.0, or recorded = 'sampled'"
    )


def recorded_groups(
  store: str,
  tokenizer: tuple[str, int],
  shape: BatchShape,
  *,
  allow_truncated: bool,
  numbers: Sequence[int] | None = None,
  routes: tuple[int, ...] | None = None,
) -> RecordedGroups:
  """The groups of another run's store.

  Args:
    store: `config.sources.recorded.store`.
    tokenizer: `config.tokenizer`, and the padding token.
    shape: the shape of this run's largest batch.
    allow_truncated: `config.allow_truncated_behavior`.
    numbers: the numbers of the batches to use; None for all batches that are in the store at
      present.
    routes: see `RecordedGroups`.
  Raises:
    ValueError: there is no store, or its rollouts do not fit this run.
  """
  if not store:
    raise ValueError("config.sources.recorded.store is empty; set it to WORKDIR/rollouts of a run")
  name, pad_token = tokenizer
  try:
    groups = RecordedGroups(
      parse_path("config.sources.recorded.store", store),
      numbers=numbers,
      tokenizer=name,
      pad_token=pad_token,
      group_size=shape.group_size,
      max_prompt_length=shape.max_prompt_length,
      max_response_length=shape.max_response_length,
      routes=routes,
    )
  except StoreError as error:
    raise ValueError(f"config.sources.recorded.store: {error}") from error
  if groups.truncated and not allow_truncated:
    raise ValueError(
      f"config.sources.recorded.store = {store!r} has rollouts from truncated sampling, and"
      " training on them biases the importance ratio; choose another store, or allow this by"
      " config.allow_truncated_behavior = True"
    )
  return groups


def other_policy(
  settings: ml_collections.ConfigDict, tokenizer: str, model: Model, mesh: Mesh, step: int | None
) -> tuple[Model, int, Callable[[], Params]]:
  """(another run's model, the step of its checkpoint, a function that reads its parameters).

  Args:
    settings: `config.sources.checkpoint`: the `workdir` of the other run and the `step` of its
      checkpoint, −1 for the last checkpoint.
    tokenizer: `config.tokenizer`, which must be the same in both runs.
    model: the model of this run.
    mesh: the mesh of generation.
    step: the step of the other run's checkpoint that this run began with; None for a new run.
  Raises:
    ValueError: the folder has no run, the run has adapters or no checkpoint of this step, or
      tokenizers differ.
  """
  workdir = parse_path("config.sources.checkpoint.workdir", settings.workdir)
  try:
    theirs = json.loads((workdir / "config.json").read_text())
    model_config = model_settings(theirs["model"])
    tokens = (theirs["tokenizer"], model_config.vocab_size)
    rank = theirs["lora"]["rank"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"config.sources.checkpoint.workdir = {settings.workdir!r} has no valid config.json of a run"
      f" ({error}); set it to the --workdir of a run"
    ) from error
  if tokens != (tokenizer, model.config.vocab_size):
    raise ValueError(
      f"config.sources.checkpoint.workdir = {settings.workdir!r}: that run's tokenizer and"
      f" vocab_size are {tokens}, but this run's are {(tokenizer, model.config.vocab_size)}; choose"
      " a run with the same tokenizer and vocab_size"
    )
  if rank:
    raise ValueError(
      f"config.sources.checkpoint.workdir = {settings.workdir!r}: the checkpoints of that run have"
      f" only adapters (config.lora.rank = {rank}); choose a run without adapters"
    )
  check_integer("config.sources.checkpoint", "step", settings.step, low=-1)
  steps = saved_steps(workdir / "checkpoints")
  if step is None and steps:
    step = steps[-1] if settings.step == -1 else settings.step
  if step not in steps:
    raise ValueError(
      f"config.sources.checkpoint: {workdir} has no checkpoint of step {step}; it has checkpoints"
      f" of the steps {steps}"
    )
  model_config = dataclasses.replace(model_config, expert_products=model.config.expert_products)
  other = transformer(model_config, sharding.make_layout(mesh))
  abstract = sharding.abstract_params(other, mesh)
  return other, step, functools.partial(read_params, workdir / "checkpoints" / str(step), abstract)


def max_gap(
  configured: float,
  network: TransformerConfig,
  sampling: Sampling,
  *,
  rounded: bool = False,
) -> float:
  """The `Source.max_gap` of a source that samples with the policy's own parameters.

  Below temperature 1 the result is larger: dividing logits by the temperature also divides their
  differences by it.

  Args:
    configured: `config.max_behavior_gap`, at temperature 1; 0 for the default.
    network: settings of the policy's network.
    sampling: the source's distribution.
    rounded: whether the sampler's cache has 8 bits, so that the sampler differs from the trainer's
      network.
  """
  bound = configured or MAX_GAP["default" if rounded else network.precision]
  return bound / min(1.0, sampling.temperature)
