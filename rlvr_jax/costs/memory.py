"""Memory per chip of a configuration, compiled for TPUs or estimated: `--mode=fits`."""

from __future__ import annotations

import math

import jax

from rlvr_jax.costs import programs
from rlvr_jax.costs.chips import find_chip
from rlvr_jax.models import memory
from rlvr_jax.rollouts.decoder import slot_bytes, token_bytes
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.cluster.process import MUCH_FREED
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.programs import published_params
from rlvr_jax.workers.pool import default_workers

COMPILER_FACTOR = 1.5  # compiled bytes over estimated bytes, above 5 GiB, in docs/costs.md
_GIB = 2**30
_PROGRAM = 0.8 * _GIB  # Python, jax, and what XLA takes to compile an update, on a CPU
_WORKER = 2**26  # bytes of a grading process, or an environment's

Table = dict[str, float]  # kind of memory → bytes per chip


def report(parts: Parts, topology: str | None) -> dict[str, Table]:
  """Prints the memory that a configuration needs on every chip, and whether it fits.

  Always prints an estimate by arithmetic. Given a topology, also compiles the update and generation
  for it and prints the compiler's numbers; this needs the compiler (extra `tpu`), but no TPU.

  Args:
    parts: result of `programs.build_shapes_only` on the mesh of that topology.
    topology: kind and shape of the slice, such as "v5e:4x4"; None for the estimate only.
  Returns:
    The tables that were printed, by title.
  """
  limit = find_chip(topology).hbm_gib if topology else None
  tables = estimated_bytes(parts) | (compiled_bytes(parts) if topology else {})
  mesh = parts.placement.mesh
  title = f"{topology or 'a mesh'} of {dict(mesh.shape)} ({mesh.size} chips)"
  say(_format_tables(title, tables, limit))
  return tables


# --- compiled -------------------------------------------------------------------------------------


def compiled_bytes(parts: Parts) -> dict[str, Table]:
  """Bytes per chip of the update and of generation, as XLA compiles them for the mesh.

  Of dialogues also those of a prefill after a reply, beside the slots.
  """
  # The optimizer's state stays in memory while rollouts are sampled.
  optimizer = {"optimizer, resident": memory.shard_bytes(parts.placement.state.opt_state)}
  resident = {"generation": optimizer | _copied_caches(parts), "prefill": optimizer}
  tables = {}
  lowerings = programs.program_lowerings(parts, programs.pack_full_length(parts))
  for name, lower in lowerings.items():
    program = programs.compile_program(name, lower)
    table = {"more than the compiler has": math.inf}
    if program:
      table = programs.memory_bytes(program)
    tables[f"{name}, compiled"] = resident.get(name, {}) | table
  return tables


def _copied_caches(parts: Parts) -> Table:
  """What a burst that reads a half of the caches takes more than the one of everything."""
  engine = parts.programs.engine.settings
  mesh = engine.model.mesh
  if engine.cache == "pages" or not engine.shape.copied_tokens:
    return {}
  slots = engine.slots // (mesh.shape["data"] * mesh.shape["fsdp"])
  token = token_bytes(parts.model.config, mesh.shape["tensor"], engine.cache_format)
  return {"keys and values, read in part": float(slots * engine.shape.copied_tokens * token)}


# --- estimated ------------------------------------------------------------------------------------


def estimated_bytes(parts: Parts) -> dict[str, Table]:
  """Bytes per chip by arithmetic, without the compiler's temporary buffers."""
  state = parts.placement.state
  network = parts.model.config
  layout = parts.placement.row_layout
  in_memory = {
    "parameters": memory.shard_bytes(state.params),
    "optimizer": memory.shard_bytes(state.opt_state),
  }
  if parts.lora is not None:
    in_memory["frozen base"] = memory.shard_bytes(parts.placement.frozen)
  num_gradients = 2 if layout.max_micro_batches > 1 else 1  # sum and newest micro-batch
  tokens = layout.device_places
  tensor = parts.placement.mesh.shape["tensor"]
  engine = parts.programs.engine.settings
  mesh = engine.model.mesh  # of config.generation_mesh, if set
  slots = engine.slots // (mesh.shape["data"] * mesh.shape["fsdp"])
  generating = sharding.add_shardings(parts.placement.base, mesh)
  of_cache = network, engine.shape, mesh.shape["tensor"], engine.cache_format, engine.cache
  per_slot = slot_bytes(*of_cache)
  prefilled = {}
  rebuilds = parts.config.fleet.new_weights == "recompute"
  if engine.has_replies or rebuilds:  # any slot may take a row, so every device has all of them
    rows, _ = parts.programs.engine.longest_prefill()
    kind = "prefill after a reply" if engine.has_replies else "prefill under new weights"
    prefilled = {kind: float(rows * per_slot)}
  routes = network.routes if parts.method.records_routes else None
  per_token = 0 if routes is None else routes.size * routes.dtype.itemsize
  trained, adapters_only = parts.placement.state.params, parts.lora is not None
  is_fleet = parts.config.fleet.samplers
  published = published_params(trained, network, adapters_only) if is_fleet else trained
  policy = memory.shard_bytes(sharding.add_shardings(published, mesh))
  kept = {}  # where newer policies take over responses
  if parts.config.fleet.new_weights != "finish":
    updates = range(parts.config.num_updates)
    in_use = [update - parts.schedule.oldest_sampling(update) + 1 for update in updates]
    kept = {"policies to be compared": max(in_use, default=1) * policy}
  sampler = {}
  if is_fleet:  # two copies while it restores a policy
    sampler = {"policy that samples": policy, "policy being restored": policy}
    if adapters_only:
      sampler["frozen base"] = memory.shard_bytes(parts.placement.frozen)
  name = f"routes, {per_token} B per token"
  routes_of = lambda tokens: {name: float(tokens * per_token)} if per_token else {}
  generation = (
    routes_of(slots * engine.shape.steps)
    | {
      "parameters to decode with": memory.decoding_copy_bytes(generating, network.compute_dtype),
      "keys and values": float(slots * per_slot),
    }
    | prefilled
    | {"logits of a token": memory.sampling_bytes(network, slots)}
  )
  return {
    "update, estimated": in_memory
    | routes_of(layout.max_micro_batches * tokens)
    | {
      "gradients": num_gradients * memory.shard_bytes(state.params),
      "activations": memory.activation_bytes(network, tokens, tensor),
      "output head": memory.output_head_bytes(network, tokens, tensor),
    },
    "generation, estimated": in_memory | generation | ({} if is_fleet else kept),
  } | ({"a sampler, estimated": sampler | generation | kept} if is_fleet else {})


def resident_bytes(parts: Parts) -> dict[str, Table]:
  """Bytes of the processes of a run on a host whose devices are its CPUs, in each of its phases.

  The largest phase is what the run takes at its peak, within 1.3 times of what was measured.
  """
  state, network, layout = parts.placement.state, parts.model.config, parts.placement.row_layout
  tables = {name.removesuffix(", estimated"): x for name, x in estimated_bytes(parts).items()}
  kept = {
    "parameters": memory.shard_bytes(state.params),
    "optimizer": memory.shard_bytes(state.opt_state),
  }
  written = sum(kept.values())
  if parts.lora is not None:
    kept["frozen base"] = memory.shard_bytes(parts.placement.frozen)
  if parts.config.reference.kl_coefficient or parts.config.diagnostics.every:
    kept["first policy"] = kept["parameters"]
  tables["checkpoint"] = {"copy that is written": written}
  tokens, length = layout.device_places, layout.length
  tables["update"]["other activations"] = memory.unfused_bytes(network, tokens, length)
  if parts.config.warm_start.num_steps:
    length = parts.shape.max_prompt_length + parts.shape.max_response_length
    tokens = parts.config.warm_start.batch_size * length / layout.devices
    tables["warm start"] = {
      "gradients": kept["parameters"],
      "activations": memory.activation_bytes(network, tokens, 1),
      "other activations": memory.unfused_bytes(network, tokens, length),
      "output head": memory.output_head_bytes(network, tokens, 1),
    }
  devices = parts.placement.mesh.size // jax.process_count()
  settings = parts.config.grading, parts.config.environment
  workers = settings[0].num_workers or default_workers()
  if settings[1].name:
    workers += settings[1].processes or default_workers()
  for name, table in tables.items():
    temporary = devices * sum(size for kind, size in table.items() if kind not in kept)
    tables[name] = {kind: devices * size for kind, size in (kept | table).items()} | {
      "program and compiler": _PROGRAM,
      "freed, not yet returned": min(MUCH_FREED, temporary / 4),
      "graders and environments": float(workers * _WORKER),
    }
  return tables


# --- output ---------------------------------------------------------------------------------------


def _format_tables(title: str, tables: dict[str, Table], limit_gib: float | None) -> str:
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
