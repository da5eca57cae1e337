"""Memory per chip of a run: estimated by arithmetic, and as the compiler states it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import ml_collections
from jax.sharding import AbstractMesh, Mesh

from rlvr_jax.costs import programs
from rlvr_jax.models import memory
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts.decoder import Settings, slot_bytes, state_bytes, token_bytes
from rlvr_jax.rollouts.packing import RowLayout
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.cluster.process import MUCH_FREED
from rlvr_jax.train.setup.programs import published_params
from rlvr_jax.types import Params, TrainState

COMPILER_FACTOR = 1.5  # compiled bytes over estimated bytes, above 5 GiB, in docs/costs.md
_GIB = 2**30
_PROGRAM = 0.8 * _GIB  # Python, jax, and what XLA takes to compile an update, on a CPU
_WORKER = 2**26  # bytes of a grading process, or an environment's
_STATES = "states of gated DeltaNets"

Table = dict[str, float]  # kind of memory → bytes per chip


# --- compiled -------------------------------------------------------------------------------------


def compiled_bytes(
  lowerings: Mapping[str, programs.Lower], placement: Placement, engine: EnginePrograms
) -> dict[str, Table]:
  """Bytes per chip of a run's compiled programs, as XLA states them when it compiles for the mesh.

  Args:
    lowerings: the result of `programs.program_lowerings`.
    placement, engine: placement and engine of the run.
  """
  # The optimizer's state stays in memory while rollouts are sampled.
  optimizer = {"optimizer, resident": memory.shard_bytes(placement.state.opt_state)}
  teachers = {}
  if placement.teachers:
    teachers = {"teachers, resident": memory.shard_bytes(placement.teachers)}
  resident = {
    "update": teachers if programs.TEACHER in lowerings else {},  # else they are arguments
    "generation": optimizer | teachers | _copied_caches(engine.settings),
    "prefill": optimizer | teachers,
    programs.TEACHER: trained_bytes(placement.state, placement.frozen),
  }
  tables = {}
  for name, lower in lowerings.items():
    program = programs.compile_program(name, lower)
    table = {"more than the compiler has": math.inf}
    if program:
      table = programs.memory_bytes(program)
    tables[f"{name}, compiled"] = resident.get(name, {}) | table
  return tables


def _copied_caches(engine: Settings) -> Table:
  """Extra bytes of a burst that reads half of the caches, compared to one that reads all blocks."""
  mesh = engine.model.mesh
  if engine.cache == "pages" or not engine.shape.copied_tokens:
    return {}
  assert mesh is not None  # the engine is of a run
  slots = engine.slots // (mesh.shape["data"] * mesh.shape["fsdp"])
  token = token_bytes(engine.model.config, mesh.shape["tensor"], engine.cache_format)
  return {"keys and values, read in part": float(slots * engine.shape.copied_tokens * token)}


# --- estimated ------------------------------------------------------------------------------------


def estimated_bytes(
  network: TransformerConfig,
  placement: Placement,
  engine: EnginePrograms,
  fleet: ml_collections.ConfigDict,
  schedule: Schedule,
  num_updates: int,
) -> dict[str, Table]:
  """Estimated bytes per chip of a run, by arithmetic, without the compiler's temporary buffers.

  Args:
    network, placement, engine, schedule, num_updates: parts of the run.
    fleet: `config.fleet`.
  """
  state, frozen, settings = placement.state, placement.frozen, engine.settings
  # The mesh is that of config.generation_mesh, if set.
  layout, mesh = placement.row_layout, settings.model.mesh
  assert mesh is not None  # the engine is of a run
  tensor = placement.mesh.shape["tensor"]
  places = layout.max_micro_batches * layout.device_places
  teachers = {"teachers": memory.shard_bytes(placement.teachers)} if placement.teachers else {}
  update = update_bytes(network, layout, tensor, state, frozen) | _routes_bytes(settings, places)
  base = sharding.add_shardings(placement.base, mesh)
  generation = generation_bytes(network, settings, base, mesh, settings.slots)
  on_device = settings.slots // (mesh.shape["data"] * mesh.shape["fsdp"])
  generation |= _routes_bytes(settings, on_device * settings.shape.steps)
  rebuilds = fleet.new_weights == "recompute"
  if settings.has_replies or rebuilds:  # any slot may take a row, so every device has all rows
    rows, _ = engine.longest_prefill()
    kind = "prefill after a reply" if settings.has_replies else "prefill under new weights"
    of_slots = generation["keys and values"] + generation.get(_STATES, 0.0)
    generation[kind] = rows * of_slots / on_device
  published = state.params
  if fleet.samplers:
    published = published_params(state.params, network, adapters_only=bool(frozen))
  policy = memory.shard_bytes(sharding.add_shardings(published, mesh))
  compared = {}
  if fleet.new_weights != "finish":  # newer policies take over responses
    updates = range(num_updates)
    in_use = (update - schedule.oldest_sampling(update) + 1 for update in updates)
    compared = {"policies to be compared": max(in_use, default=1) * policy}
  elif schedule.threaded and not fleet.samplers:
    # An update donates the trainer's parameters, so the sampler has a copy of the policy. An older
    # copy stays until agreement with it is checked.
    compared = {"policies to sample with": 2 * policy}
  shares_devices = sharding.has_same_devices(placement.mesh, placement.generation_mesh)
  if schedule.threaded and shares_devices and not fleet.samplers:  # sampling goes on meanwhile
    for kind, size in (generation | compared).items():
      update[kind] = update.get(kind, 0.0) + size
  tables = {
    "update, estimated": update | teachers,
    "generation, estimated": trained_bytes(state, frozen)
    | teachers
    | generation
    | ({} if fleet.samplers else compared),
  }
  if fleet.samplers:  # which have two copies while they restore a policy
    sampler = {"policy that samples": policy, "policy being restored": policy}
    if frozen:
      sampler["frozen base"] = memory.shard_bytes(frozen)
    tables["a sampler, estimated"] = sampler | generation | compared
  return tables


def teaching_bytes(
  networks: Sequence[TransformerConfig], placement: Placement, layout: RowLayout
) -> dict[str, Table]:
  """Estimated bytes per chip of the forward pass in which teachers score a batch before updates.

  Args:
    networks: the teachers' networks; only the network that takes most bytes counts.
    placement: the run's placement.
    layout: the layout of the rows that teachers read.
  """
  tensor, tokens = placement.mesh.shape["tensor"], layout.device_places
  of_pass = lambda network: {
    "activations": memory.forward_bytes(network, tokens, tensor),
    "output head": memory.output_head_bytes(network, tokens, tensor, backward=False),
  }
  table = trained_bytes(placement.state, placement.frozen)
  if placement.teachers:
    table["teachers"] = memory.shard_bytes(placement.teachers)
  largest = max(map(of_pass, networks), key=lambda found: sum(found.values()))
  return {f"{programs.TEACHER}, estimated": table | largest}


def trained_bytes(state: TrainState, frozen: Params) -> Table:
  """Bytes of parameters and of the optimizer's state, which stay in memory between updates.

  Args:
    state: the train state, as arrays or as shapes with shardings.
    frozen: the parameters that are not trained, in the same form; {} if all are trained.
  """
  table = {
    "parameters": memory.shard_bytes(state.params),
    "optimizer": memory.shard_bytes(state.opt_state),
  }
  return table | ({"frozen base": memory.shard_bytes(frozen)} if frozen else {})


def update_bytes(
  network: TransformerConfig, layout: RowLayout, tensor: int, state: TrainState, frozen: Params
) -> Table:
  """Bytes of an update, without the compiler's temporary buffers.

  Args:
    network: the network of the policy.
    layout: the layout of the rows of a batch.
    tensor: number of devices that share a layer.
    state, frozen: as for `trained_bytes`.
  """
  num_gradients = 2 if layout.max_micro_batches > 1 else 1  # their sum, and the newest ones
  tokens = layout.device_places
  return trained_bytes(state, frozen) | {
    "gradients": num_gradients * memory.shard_bytes(state.params),
    "activations": memory.activation_bytes(network, tokens, tensor),
    "output head": memory.output_head_bytes(network, tokens, tensor),
  }


def generation_bytes(
  network: TransformerConfig,
  settings: Settings,
  base: Params,
  mesh: Mesh | AbstractMesh,
  slots: int,
) -> Table:
  """Bytes that generation adds to the trainer's bytes, without the compiler's temporary buffers.

  Args:
    network: the network of the policy.
    settings: the settings of an engine, for its caches.
    base: shapes of all parameters, with shardings on `mesh`.
    mesh: the mesh for generation.
    slots: number of slots on all devices of the mesh.
  """
  on_device = slots // (mesh.shape["data"] * mesh.shape["fsdp"])
  of_cache = settings.shape, mesh.shape["tensor"], settings.cache_format, settings.cache
  states = float(on_device * state_bytes(network, mesh.shape["tensor"]))
  return {
    "parameters to decode with": memory.decoding_copy_bytes(base, network.compute_dtype),
    "keys and values": on_device * slot_bytes(network, *of_cache) - states,
    **({_STATES: states} if states else {}),
    "logits of a token": memory.sampling_bytes(network, on_device),
  }


def _routes_bytes(settings: Settings, tokens: int) -> Table:
  """Bytes of the expert routes of `tokens` tokens on a device; {} if the run records no routes."""
  if settings.routes is None:
    return {}
  of_token = settings.routes.size * settings.routes.dtype.itemsize
  return {f"routes, {of_token} B per token": float(tokens * of_token)}


# --- a host whose devices are its CPUs ------------------------------------------------------------


def resident_bytes(
  estimated: Mapping[str, Table],
  network: TransformerConfig,
  placement: Placement,
  *,
  keeps_first_policy: bool,
  warm_start: tuple[int, int] | None,
  workers: int,
) -> dict[str, Table]:
  """Bytes of a run's processes on a host with CPU devices, in each phase of the run.

  The total of the largest phase is an estimate of the run's peak. It is within a factor of 1.3 of
  measured peaks.

  Args:
    estimated: the result of `estimated_bytes`.
    network, placement: network and placement of the run.
    keeps_first_policy: whether a copy of the policy before the first update is kept, for a KL term
      or diagnostics.
    warm_start: (sequences per batch, tokens per sequence); None without a warm start.
    workers: number of processes of graders and environments.
  """
  layout = placement.row_layout
  tables = {name.removesuffix(", estimated"): dict(table) for name, table in estimated.items()}
  kept = trained_bytes(placement.state, placement.frozen)
  if placement.teachers:
    kept["teachers"] = memory.shard_bytes(placement.teachers)
  written = kept["parameters"] + kept["optimizer"]
  if keeps_first_policy:
    kept["first policy"] = kept["parameters"]
  tables["checkpoint"] = {"copy that is written": written}
  unfused = memory.unfused_bytes(network, layout.device_places, layout.length)
  tables["update"]["other activations"] = unfused
  if warm_start is not None:
    size, length = warm_start
    tokens = size * length / layout.devices
    tables["warm start"] = {
      "gradients": kept["parameters"],
      "activations": memory.activation_bytes(network, tokens, 1),
      "other activations": memory.unfused_bytes(network, tokens, length),
      "output head": memory.output_head_bytes(network, tokens, 1),
    }
  devices = placement.mesh.size // jax.process_count()
  for name, table in tables.items():
    temporary = devices * sum(size for kind, size in table.items() if kind not in kept)
    tables[name] = {kind: devices * size for kind, size in (kept | table).items()} | {
      "program and compiler": _PROGRAM,
      "freed, not yet returned": min(MUCH_FREED, temporary / 4),
      "graders and environments": float(workers * _WORKER),
    }
  return tables


# --- output ---------------------------------------------------------------------------------------


def format_tables(title: str, tables: Mapping[str, Table], limit_gib: float | None) -> str:
  """Lines of text on the memory of each phase, and on whether it fits into the limit."""
  lines = [title]
  for name, table in tables.items():
    total = sum(table.values()) / _GIB
    needed = total * (COMPILER_FACTOR if name.endswith("estimated") else 1.0)
    lines.append(f"{name}: {total:.2f} GiB per chip{_verdict(total, needed, limit_gib)}")
    lines += [f"  {kind:<28}{size / _GIB:>10.2f} GiB" for kind, size in table.items()]
  lines.append(f"The compiler may need about {COMPILER_FACTOR} times the estimate.")
  return "\n".join(lines)


def _verdict(total: float, needed: float, limit_gib: float | None) -> str:
  if limit_gib is None:
    return ""
  fits = "fits" if needed <= limit_gib else "may fit" if total <= limit_gib else "DOES NOT FIT"
  return f" of {limit_gib}, {fits}"
