"""The jitted functions of a run, and the shapes of their inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import AbstractMesh, Mesh

from rlvr_jax import geometry, specs
from rlvr_jax.models import lora
from rlvr_jax.models.functional import Model, cast_to_decode
from rlvr_jax.models.linear import merge_low_rank
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.checksums import checksums
from rlvr_jax.ops.precision import with_matmul_precision
from rlvr_jax.ops.row_attention import (
  choose_attention,
  longest_row,
  row_alignment,
  row_length,
)
from rlvr_jax.ops.row_blocks import LONGEST_ROW, TILE, short_row
from rlvr_jax.rollouts.packing import RowLayout, min_row_length, row_layout
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.sources import Source
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.setup.behavior_sources import AT_TEMPERATURE_1
from rlvr_jax.train.setup.compiler_options import CompilerOptions, Options
from rlvr_jax.train.setup.engines import Engines
from rlvr_jax.train.setup.teachers import Teacher, TeacherPrompts
from rlvr_jax.types import (
  Array,
  BatchShape,
  Packed,
  Params,
  Prompts,
  Rows,
  Sampling,
  TrainBatch,
  TrainState,
)
from rlvr_jax.update.accumulate import policy_logprobs
from rlvr_jax.update.agreement import Gap, behavior_gap, response_logprobs
from rlvr_jax.update.diagnostics import Diagnostics, mean_entropy, measure
from rlvr_jax.update.objective import Method
from rlvr_jax.update.step import initial_state, train_step
from rlvr_jax.update.supervised import supervised_step

Result = TypeVar("Result")


class Programs(NamedTuple):
  """The jitted functions of a run, none of them compiled yet."""

  # (state, frozen, batch, teacher) → (state, metrics); the state is donated
  train_step: jax.stages.Wrapped
  # trained parameters → state of the supervised phase's optimizer
  supervised_init: jax.stages.Wrapped
  supervised_step: jax.stages.Wrapped  # see `update.supervised.supervised_step`
  engine: EnginePrograms  # samples from the policy as in training, on the trainer's devices
  held_out_engine: EnginePrograms  # samples for evaluations, with their own distribution
  checksums: Callable[[Params], Array]  # params → u32[leaves]
  behavior_gap: Callable[..., Gap]  # see `update.agreement.behavior_gap`; sampling is static
  rerouted_gap: Callable[..., Gap]  # `behavior_gap`, but routers choose experts again
  # `update.agreement.response_logprobs` at temperature 1
  logprobs_at_temperature_1: Callable[..., Array]
  measure: Callable[..., Diagnostics]  # see `update.diagnostics.measure`
  mean_entropy: Callable[[Params, Params, TrainBatch], Array]  # → f32[], nats per token
  # (trained, frozen, batch) → (log-probabilities, entropies) [P, G, T]
  score: Callable[[Params, Params, TrainBatch], tuple[Array, Array]]
  teach: tuple[jax.stages.Wrapped, ...]  # for each teacher, a function like `score`
  merge: Callable[[Params, Params], Params]  # (trained, frozen) → all parameters of the network


class RowTokens(NamedTuple):
  """The sizes of rows and micro-batches from `config.batch`, in tokens on each device; 0: unset."""

  tokens_per_row: int
  tokens_per_micro_batch: int


class PlacedModel(NamedTuple):
  """A mesh, and the policy's functions on it."""

  model: Model
  mesh: Mesh


def make_programs(
  method: Method,
  sources: Sequence[Source],
  teachers: Sequence[Teacher],
  placement: Placement,
  *,
  sampler: PlacedModel,
  compared: PlacedModel,
  engines: Engines,
  sampling: Sampling,
  held_out_sampling: Sampling,
  diagnose: Callable[..., Diagnostics],
  warm_start_optimizer: optax.GradientTransformation,
  compiler_options: CompilerOptions,
) -> Programs:
  """The jitted functions of a run.

  Args:
    method, placement: method and placement of the run.
    sources: the policies that sample.
    teachers: the teachers of the run.
    sampler: model and mesh for generation, the result of `build.make_sampler`.
    compared: model and mesh of the comparison with the sampler, on `Placement.compared_mesh`.
    engines: makes the engines.
    sampling, held_out_sampling: the distributions of training and of evaluation.
    diagnose: the result of `make_measure`.
    warm_start_optimizer: the optimizer of the supervised phase.
    compiler_options: the compiler options by kind of compiled program.
  """
  model, mesh = method.model, placement.mesh
  shardings = jax.tree.map(lambda x: x.sharding, placement.state)
  for_host, replicated = sharding.host_result_sharding(mesh), sharding.replicated_sharding(mesh)
  alike = sharding.has_same_devices(mesh, sampler.mesh)
  # Evaluations sample on the devices of updates.
  evaluated = sampler.model if alike else model
  on_policy = sources[0].name == "policy" and alike
  engine = sources[0].engine if on_policy else engines.make(evaluated, sampling)
  assert engine is not None  # only a recorded source has no engine
  one_sampling = held_out_sampling == sampling
  jit = functools.partial(jax.jit, compiler_options=compiler_options.training)
  compare = lambda method: make_behavior_gap(
    method, compared, compiler_options.training if alike else compiler_options.generation
  )
  return Programs(
    train_step=jit(
      _bound(train_step, model, method=method),
      donate_argnums=0,
      out_shardings=(shardings, replicated),
    ),
    supervised_init=jax.jit(
      warm_start_optimizer.init,
      out_shardings=sharding.state_shardings(
        jax.eval_shape(warm_start_optimizer.init, placement.state.params), mesh
      ),
    ),
    supervised_step=jit(
      _bound(supervised_step, model, model=model, optimizer=warm_start_optimizer),
      donate_argnums=0,
    ),
    engine=engine,
    held_out_engine=engine
    if one_sampling
    else engines.make(evaluated, held_out_sampling, batches=1),
    checksums=checksums,
    behavior_gap=compare(method),
    rerouted_gap=compare(method._replace(replays_routes=False)),
    logprobs_at_temperature_1=make_logprobs_at_temperature_1(sampler, compiler_options.generation),
    measure=jit(with_matmul_precision(diagnose, model.config.precision), out_shardings=replicated),
    mean_entropy=jit(_bound(mean_entropy, model, method=method), out_shardings=replicated),
    score=jit(_bound(policy_logprobs, model, method=method), out_shardings=for_host),
    teach=tuple(
      jit(make_teach(method, teacher.model), out_shardings=for_host) for teacher in teachers
    ),
    merge=jax.jit(lambda trained, frozen: merge_low_rank(model.combine(trained, frozen))),
  )


def _bound(function: Callable[..., Result], network: Model, **bound: Any) -> Callable[..., Result]:
  """`function` with these arguments bound, traced with the network's matmul precision."""
  return with_matmul_precision(
    functools.partial(function, **bound), precision=network.config.precision
  )


def make_teach(method: Method, teacher: Model) -> Callable[..., tuple[Array, Array]]:
  """The function that computes a teacher's log-probabilities, at the teacher's temperature.

  If the teacher is a mixture of experts, its own routers choose the experts.
  """
  assert method.teaching is not None
  of_teacher = method._replace(
    model=teacher,
    temperature=method.teaching.temperature,
    records_routes=False,
    replays_routes=False,
  )
  return _bound(policy_logprobs, teacher, method=of_teacher)


def make_behavior_gap(
  method: Method, compared: PlacedModel, compiler_options: Options | None
) -> Callable[..., Gap]:
  """`update.agreement.behavior_gap` with everything bound but parameters, batch and sampling."""
  method = method._replace(model=compared.model)
  gap = _bound(behavior_gap, compared.model, method=method)
  return jax.jit(gap, static_argnames="sampling", compiler_options=compiler_options)


def make_logprobs_at_temperature_1(
  sampler: PlacedModel, compiler_options: Options | None
) -> Callable[..., Array]:
  """The function that computes log-probabilities at temperature 1, on the sampler's mesh.

  It maps (trained, frozen, prompts, tokens, lengths) to f32[P, G, T], which the host then reads.
  """
  logprobs = _bound(
    response_logprobs, sampler.model, model=sampler.model, sampling=AT_TEMPERATURE_1
  )
  return jax.jit(
    logprobs,
    out_shardings=sharding.host_result_sharding(sampler.mesh),
    compiler_options=compiler_options,
  )


def make_gram(spec: str) -> geometry.GramFn:
  """The function of `config.gram` that computes the Gram matrix."""
  gram: geometry.GramFn = specs.make("config.gram", geometry, spec, geometry.GramFn)
  return gram


def make_measure(
  settings: ml_collections.ConfigDict, method: Method, gram: geometry.GramFn
) -> Callable[..., Diagnostics]:
  """`update.diagnostics.measure` with everything bound but (state, frozen, initial, batch).

  Args:
    settings: `config.diagnostics`.
    method: the method of the run.
    gram: the result of `make_gram`.
  """
  check_between("config.diagnostics", "every", settings.every, low=0)
  if settings.compared:
    geometry.per_rollout(parameters=settings.compared)  # raises unless it is a pattern
  return functools.partial(measure, method=method, gram=gram, compared=settings.compared)


def choose_row_attention(
  network: TransformerConfig, mesh: Mesh, shape: BatchShape, *, tokens_per_row: int
) -> str:
  """The implementation of attention within rows, for the devices of a mesh.

  Args:
    network: the network, whose `attention` is a configured implementation or "auto".
    mesh: the mesh whose devices compute attention.
    shape: the shape of the largest batch.
    tokens_per_row: `config.batch.tokens_per_row`.
  """
  least = max(least_row_length("splash", shape), tokens_per_row)
  return choose_attention(
    network.attention,
    platform=sharding.platform(mesh),
    row_length=row_length("splash", least),
    head_dims=network.head_dims,
    dtype=network.compute_dtype,
    soft_cap=network.attention_soft_cap,
  )


def least_row_length(kind: str, shape: BatchShape) -> int:
  """Tokens in the shortest row with room for the longest rollout, aligned for attention `kind`."""
  sizes = shape.max_prompt_length, shape.max_response_length
  for longest in (2**15, 2**16, LONGEST_ROW):  # longer rows are aligned more coarsely
    least = row_length(kind, min_row_length(*sizes, alignment=row_alignment(kind, longest)))
    if least <= longest:
      break
  return least


def make_row_layout(settings: RowTokens, shape: BatchShape, kind: str, mesh: Mesh) -> RowLayout:
  """The row layout of a training batch for an implementation of attention.

  By default a row has room for eight times as many response tokens as prompt tokens, since a prompt
  is computed once in each row that has rollouts of it. On TPUs the last micro-batches may have
  short rows, see `rollouts.packing`; elsewhere all rows are whole.

  Args:
    settings: the sizes, or `config.batch`. If tokens_per_micro_batch is 0, it becomes the result of
      `most_places`.
    shape: the shape of the largest batch.
    kind: implementation of attention, from `choose_row_attention`.
    mesh: the mesh of updates.
  """
  sizes = shape.max_prompt_length, shape.max_response_length
  finest, longest = row_alignment(kind, 1), least_row_length(kind, shape)
  prompt = min_row_length(shape.max_prompt_length, 0, alignment=finest)
  rollout = min_row_length(*sizes, alignment=finest) - prompt
  devices = mesh.shape["data"] * mesh.shape["fsdp"]
  beside = min(-(-8 * prompt // rollout), shape.group_size)
  beside = max(1, min(beside, shape.responses // devices))  # at least one row for each device
  several = prompt + beside * rollout
  tokens = settings.tokens_per_micro_batch or most_places(mesh)
  several = min(several, tokens, longest_row(kind))
  length = row_length(kind, int(max(longest, settings.tokens_per_row or several)))
  # Longer rows may be aligned more coarsely, and then need more positions for the longest rollout.
  while (least := min_row_length(*sizes, alignment=row_alignment(kind, length))) > length:
    length = row_length(kind, least)
  return row_layout(
    **shape._asdict(),
    length=length,
    alignment=row_alignment(kind, length),
    devices=devices,
    tokens_per_micro_batch=tokens,
    has_short_rows=kind == "splash" and short_row(length) % TILE == 0,
  )


def most_places(mesh: Mesh | AbstractMesh) -> int:
  """Largest number of positions of a micro-batch on a device, unless a rollout needs more.

  Larger micro-batches take more memory, and are slower on a CPU, whose caches are small.
  """
  return 1024 if sharding.is_on_cpu(mesh) else 4096


def abstract_batch(
  shape: BatchShape,
  layout: RowLayout,
  mesh: Mesh,
  *,
  needs_reference: bool = False,
  needs_proximal: bool = False,
  needs_teacher: bool = False,
  has_teachers: bool = False,
  has_turns: bool = False,
  has_turn_scores: bool = False,
  num_rewards: int = 0,
  routes: jax.ShapeDtypeStruct | None = None,
) -> TrainBatch:
  """Shapes, dtypes and shardings of a training batch.

  Args:
    shape, layout, mesh: shape, layout and mesh of the run.
    needs_reference, needs_proximal, needs_teacher: whether the batch has the log-probabilities of
      these policies.
    has_teachers: whether the run has several teachers, of which each group has one.
    has_turns: whether rollouts are dialogues.
    has_turn_scores: whether the batch has the scores of turns.
    num_rewards: K, the number of graders whose scores are in `rewards_by_name`.
    routes: shape and dtype of a token's recorded routes, see `TransformerConfig.routes`; None if
      routes are not recorded.
  """
  P, G, S, T = shape
  of = jax.ShapeDtypeStruct
  rows = of(
    (layout.max_micro_batches, layout.devices * layout.rows_per_device, layout.length), jnp.int32
  )
  shapes = TrainBatch(
    prompts=Prompts(tokens=of((P, S), jnp.int32), lengths=of((P,), jnp.int32)),
    tokens=of((P, G, T), jnp.int32),
    mask=of((P, G, T), jnp.float32),
    behavior_logprobs=of((P, G, T), jnp.float32),
    rewards=of((P, G), jnp.float32),
    correct=of((P, G), jnp.float32),
    valid=of((P, G), jnp.bool_),
    lags=of((P, G, T), jnp.int32),
    turns=of((P, G, T), jnp.int32) if has_turns else None,
    turn_scores=of((P, G, T), jnp.float32) if has_turn_scores else None,
    rewards_by_name=of((P, G, num_rewards), jnp.float32) if num_rewards else None,
    sources=of((P,), jnp.int32),
    reference_logprobs=of((P, G, T), jnp.float32) if needs_reference else None,
    proximal_logprobs=of((P, G, T), jnp.float32) if needs_proximal else None,
    teacher_logprobs=of((P, G, T), jnp.float32) if needs_teacher else None,
    teacher_entropy=of((P, G, T), jnp.float32) if needs_teacher else None,
    teachers=of((P,), jnp.int32) if has_teachers else None,
    solve_rate=of((P,), jnp.float32),
    packed=Packed(
      tokens=rows,
      targets=rows,
      rows=Rows(rows, rows, rows, rows),
      places=of((P, G, T), jnp.int32),
      num_micro_batches=of((), jnp.int32),
      num_short=of((), jnp.int32) if layout.has_short_rows else None,
      routes=None if routes is None else of((*rows.shape, *routes.shape), routes.dtype),
    ),
  )
  place = lambda x, s: of(x.shape, x.dtype, sharding=s)
  placed: TrainBatch = jax.tree.map(place, shapes, sharding.batch_shardings(shapes, mesh))
  return placed


def abstract_update_batch(
  method: Method,
  placement: Placement,
  shape: BatchShape,
  *,
  has_turns: bool = False,
  num_rewards: int = 0,
) -> TrainBatch:
  """The shapes and dtypes of the batch that an update of a method takes.

  Args:
    method, placement: method and placement of the run.
    shape: the shape of a training batch.
    has_turns: whether rollouts are dialogues.
    num_rewards: K, the number of graders whose scores are in `rewards_by_name`.
  """
  needs = method.advantage.needs
  return abstract_batch(
    shape,
    placement.row_layout,
    placement.mesh,
    needs_reference=method.reference_kl > 0,
    needs_proximal=method.loss.needs_proximal,
    needs_teacher=method.teaching is not None and not method.compares,
    has_teachers=method.teaching is not None and len(method.teaching.names) > 1,
    has_turns=has_turns,
    has_turn_scores=has_turns and "turn_scores" in needs,
    num_rewards=num_rewards if "rewards_by_name" in needs else 0,
    routes=method.model.config.routes if method.records_routes else None,
  )


def abstract_taught_batch(
  placement: Placement,
  shape: BatchShape,
  prompts: TeacherPrompts | None,
  *,
  has_turns: bool = False,
) -> TrainBatch:
  """Shapes of the batch that teachers score: it has the teachers' prompts, and no routes.

  Args:
    placement: the run's placement.
    shape: sizes of a training batch.
    prompts: the teachers' prompts; None if the teachers read the policy's prompts.
    has_turns: whether rollouts are dialogues.
  """
  layout = placement.row_layout
  if prompts is not None:
    shape, layout = shape._replace(max_prompt_length=prompts.length), prompts.row_layout
  return abstract_batch(shape, layout, placement.mesh, has_turns=has_turns)


def abstract_teacher(
  method: Method, teachers: Sequence[Teacher], placement: Placement
) -> tuple[Params, Params] | None:
  """Shapes of the teacher's (trained, frozen) parameters if updates need these, else None.

  Updates need the parameters only if the method compares full distributions.
  """
  if not method.compares:
    return None
  (teacher,) = teachers
  trained = placement.state.params
  return teacher.policy(teacher.params, trained, placement.frozen, trained)


def abstract_state(method: Method, trained: Params, mesh: Mesh) -> TrainState:
  """Shapes, dtypes and shardings of the train state; `trained`: from `trained_params`."""

  def build() -> TrainState:
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)
    return initial_state(method, jax.tree.map(zeros, trained), jnp.zeros(()))

  shapes: TrainState = jax.eval_shape(build)
  return sharding.add_shardings(shapes, mesh)


def published_params(trained: Params, network: TransformerConfig, adapters_only: bool) -> Params:
  """Shapes and dtypes of a published policy; `trained`: shapes of the trained parameters."""
  if adapters_only:
    return trained
  return jax.eval_shape(lambda params: cast_to_decode(params, network), trained)


def trained_params(adapters: lora.LoraSettings | None, base: Params) -> Params:
  """Shapes and dtypes of the trained parameters: `base`, or its adapters."""
  if adapters is None:
    return base
  return jax.eval_shape(lambda key: lora.init(key, base, adapters), jax.random.key(0))
