"""The command fits: bytes per chip of a configuration, compiled for TPUs or estimated."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rlvr_jax.costs import programs
from rlvr_jax.costs.chips import chip_of
from rlvr_jax.costs.programs import device_bytes, memory
from rlvr_jax.ops.logprobs import default_chunk_rows
from rlvr_jax.rollouts.decoder import slot_bytes
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts

COMPILER_FACTOR = 1.5  # compiled bytes to estimated ones, above 5 GiB, in docs/models.md
_GIB = 2**30

Table = dict[str, float]  # what → bytes per chip


def report(parts: Parts, topology: str | None) -> dict[str, Table]:
  """Prints the memory that a configuration needs on every chip, and whether it fits.

  An estimate by arithmetic is always printed. If a topology is given whose compiler is installed
  (extra `tpu`; no TPU is needed), the update and generation are also compiled for it, and the
  compiler's numbers are printed.

  Args:
    parts: from `ahead_of_time.shapes_only`, on the mesh of that topology.
    topology: kind and shape of the slice, such as "v5e:4x4"; None for the estimate only.
  Returns:
    The tables that were printed, by title.
  """
  limit = chip_of(topology).hbm_gib if topology else None
  tables = estimated(parts) | (compiled(parts) if topology else {})
  title = f"{topology or 'a mesh'} of {dict(parts.mesh.shape)} ({parts.mesh.size} chips)"
  say(_text(title, tables, limit))
  return tables


# --- compiled -------------------------------------------------------------------------------------


def compiled(parts: Parts) -> dict[str, Table]:
  """Bytes per chip of the update and of generation, as XLA compiles them for the mesh."""
  # The optimizer's state stays in memory while rollouts are sampled.
  resident = {"generation": {"optimizer, resident": device_bytes(parts.abstract_state.opt_state)}}
  tables = {}
  for name, lower in programs.programs(parts).items():
    program = programs.compiled(name, lower)
    taken = memory(program) if program else {"more than the compiler has": math.inf}
    tables[f"{name}, compiled"] = resident.get(name, {}) | taken
  return tables


# --- estimated ------------------------------------------------------------------------------------


def estimated(parts: Parts) -> dict[str, Table]:
  """Bytes per chip by arithmetic, without the compiler's temporary buffers."""
  state = parts.abstract_state
  of_state = {"parameters": device_bytes(state.params), "optimizer": device_bytes(state.opt_state)}
  if parts.lora is not None:
    of_state["frozen base"] = device_bytes(parts.abstract_frozen)
  accumulated = 2 if parts.row_layout.max_micro_batches > 1 else 1  # the sum and the newest
  return {
    "update, estimated": of_state
    | {
      "gradients": accumulated * device_bytes(state.params),
      "activations": _activations(parts),
      "output head": _head(parts),
    },
    "generation, estimated": of_state
    | {
      "parameters to decode with": _decoding_parameters(parts),
      "keys and values": _keys_and_values(parts),
      "logits of a token": _local_slots(parts) * parts.model.config.vocab_size * 4 * 2,
    },
  }


def _local_slots(parts: Parts) -> int:
  settings = parts.programs.engine.settings
  mesh = settings.model.mesh  # that of config.generation_mesh, if it is set
  return settings.slots // (mesh.shape["data"] * mesh.shape["fsdp"])


def _decoding_parameters(parts: Parts) -> float:
  """Bytes of the copy to sample with: in the compute dtype, not sharded along fsdp."""
  size = jnp.dtype(parts.model.config.compute_dtype).itemsize
  mesh = parts.programs.engine.settings.model.mesh

  def leaf(x, placed):
    spec = [None if axis == "fsdp" else axis for axis in placed.spec]
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return math.prod(whole.shard_shape(x.shape)) * size

  shardings = sharding.state_shardings(parts.abstract_base, mesh)
  return float(sum(jax.tree.leaves(jax.tree.map(leaf, parts.abstract_base, shardings))))


def _head(parts: Parts) -> float:
  """Of the output head: a chunk's float32 logits and their gradient, the kernel, its gradient."""
  c, layout = parts.model.config, parts.row_layout
  rows = min(default_chunk_rows(c.vocab_size), layout.rows_per_device * layout.length)
  kernel = c.width * (jnp.dtype(c.compute_dtype).itemsize + 4)
  return float((2 * 4 * rows + kernel) * c.vocab_size / parts.mesh.shape["tensor"])


def _keys_and_values(parts: Parts) -> float:
  """Bytes of the slots' caches, and of what a burst stages."""
  settings = parts.programs.engine.settings
  tensor = settings.model.mesh.shape["tensor"]
  of_slot = slot_bytes(parts.model.config, settings.shape, tensor)
  return float(_local_slots(parts) * of_slot)


def _activations(parts: Parts) -> float:
  """Bytes that the forward pass saves for the backward pass, and twice those of one layer."""
  c = parts.model.config
  tokens = parts.row_layout.rows_per_device * parts.row_layout.length
  heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
  products = heads + 2 * c.width + 2 * c.mlp_width  # q, k, v; output, down; gate, up
  layer = c.width + products
  kept = {"full": c.width, "dots": layer, "none": 2 * layer}[c.remat]
  size = jnp.dtype(c.compute_dtype).itemsize
  return tokens * (c.num_layers * kept + 4 * layer) * size / parts.mesh.shape["tensor"]


# --- output ---------------------------------------------------------------------------------------


def _text(title: str, tables: dict[str, Table], limit_gib: float | None) -> str:
  lines = [title]
  for name, table in tables.items():
    total = sum(table.values()) / _GIB
    needed = total * (COMPILER_FACTOR if name.endswith("estimated") else 1.0)
    lines.append(f"{name}: {total:.2f} GiB per chip{_verdict(total, needed, limit_gib)}")
    lines += [f"  {what:<28}{size / _GIB:>10.2f} GiB" for what, size in table.items()]
  lines.append(f"The compiler may need about {COMPILER_FACTOR} times the estimate.")
  return "\n".join(lines)


def _verdict(total: float, needed: float, limit_gib: float | None) -> str:
  if limit_gib is None:
    return ""
  fits = "fits" if needed <= limit_gib else "may fit" if total <= limit_gib else "DOES NOT FIT"
  return f" of {limit_gib}, {fits}"
