"""Does it fit? Bytes per chip of a configuration, compiled for TPUs or by arithmetic."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from rlvr_jax.data import ByteTokenizer, Task
from rlvr_jax.ops.keys import key_for
from rlvr_jax.ops.logprobs import default_chunk_rows
from rlvr_jax.rollouts.sampler import cache_lengths
from rlvr_jax.train import sharding
from rlvr_jax.train.build import Parts, build
from rlvr_jax.train.metrics import say
from rlvr_jax.train.programs import abstract_batch

# GiB of memory of a chip that XLA may use, by the first part of a topology's name.
# Source: the TPU system architecture pages of Google Cloud.
CHIP_GIB = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192}
COMPILER_FACTOR = 1.5  # about the most that it took of an estimate in docs/models.md
_GIB = 2**30

Table = dict[str, float]  # what → bytes per chip


def report(parts: Parts, topology: str | None) -> dict[str, Table]:
  """Prints what a configuration takes on every chip, and whether it fits.

  With a topology whose compiler is installed (extra `tpu`; no TPU is needed) the update and the
  generation are compiled for it and the compiler's own figures shown. Otherwise, and beside them,
  stands an estimate by arithmetic, labelled as such.

  Args:
    parts: of `shapes_only`, on the mesh of that topology.
    topology: kind and shape of the slice, such as "v5e:4x4"; None for the estimate alone.
  Returns:
    The tables that were printed, by their titles.
  """
  tables = estimated(parts) | (compiled(parts) if topology else {})
  limit = CHIP_GIB.get(topology.partition(":")[0]) if topology else None
  title = f"{topology or 'a mesh'} of {dict(parts.mesh.shape)} ({parts.mesh.size} chips)"
  say(_text(title, tables, limit))
  return tables


def topology_devices(name: str) -> list[Any]:
  """Descriptions of the chips of a TPU slice, which need not be there.

  Raises:
    ValueError: the compiler is not installed, or does not know the slice.
  """
  # Without these libtpu asks a metadata server that is on Cloud TPU machines only.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  try:
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
  except Exception as error:  # libtpu raises what it likes
    raise ValueError(
      f"--topology={name} cannot be compiled for: {str(error)[:300]}. Names are such as v5e:4x4 or"
      ' v5p:2x2x4 (16 chips each); the compiler comes with pip install -e ".[tpu]". Without'
      " --topology an estimate is given"
    ) from error


def mesh_of(config: ml_collections.ConfigDict, topology: str | None) -> Any:
  """The mesh of `config.mesh` over chips that need not be there.

  Raises:
    ValueError: an unknown topology, or a mesh of another size.
  """
  sizes = tuple(config.mesh[axis] for axis in sharding.AXES)
  needed = math.prod(sizes)
  if topology is None:
    return jax.sharding.AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * 3)
  devices = topology_devices(topology)
  if needed != len(devices):
    raise ValueError(
      f"config.mesh = {dict(zip(sharding.AXES, sizes, strict=True))} is {needed} chips, the"
      f" topology has {len(devices)}; choose sizes whose product is {len(devices)}"
    )
  return Mesh(np.array(devices).reshape(sizes), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def shapes_only(config: ml_collections.ConfigDict, mesh: Mesh) -> Parts:
  """The parts of a run on a mesh that need not be there, without its texts."""
  nothing = Task(name="none", train=(), warm_start=(), held_out=(), grader="none:none")
  config = ml_collections.ConfigDict(config)
  config.warm_start.num_steps = 0
  return build(config, task=nothing, tokenizer=ByteTokenizer(), mesh=mesh)


# --- by the compiler ------------------------------------------------------------------------------


def compiled(parts: Parts) -> dict[str, Table]:
  """Bytes per chip of the update and of generation, as XLA compiles them for the mesh."""
  config, mesh, state = parts.config, parts.mesh, parts.abstract_state
  frozen = parts.abstract_frozen
  place = lambda tree, s: jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree
  )
  batch = abstract_batch(config, mesh, needs_proximal=parts.method.loss.needs_proximal)
  key = place(jax.eval_shape(lambda: key_for(0, "rollout", 0)), sharding.replicated(mesh))
  # The optimizer's state stays where it is while rollouts are drawn.
  resident = {"optimizer, resident": _bytes(state.opt_state)}
  programs: dict[str, Callable[[], Table]] = {
    "update, compiled": lambda: _compiled(parts.programs.train_step, state, frozen, batch),
    "generation, compiled": lambda: (
      resident | _compiled(parts.programs.generate, state.params, frozen, batch.prompts, key)
    ),
  }
  tables = {}
  for name, program in programs.items():
    began = time.perf_counter()
    tables[name] = program()
    say(f"{name} in {time.perf_counter() - began:.0f} s")
  return tables


def _compiled(jitted: Any, *shapes: Any) -> Table:
  try:
    used = jitted.lower(*shapes).compile().memory_analysis()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    say(str(error)[:1000])
    return {"more than the compiler has": math.inf}
  return {
    "arguments": used.argument_size_in_bytes,
    "results beside them": used.output_size_in_bytes - used.alias_size_in_bytes,
    "temporary": used.temp_size_in_bytes,
    "program": used.generated_code_size_in_bytes,
  }


# --- by arithmetic --------------------------------------------------------------------------------


def estimated(parts: Parts) -> dict[str, Table]:
  """Bytes per chip by arithmetic: what has to be there, without the compiler's own needs."""
  config, state = parts.config, parts.abstract_state
  of_state = {"parameters": _bytes(state.params), "optimizer": _bytes(state.opt_state)}
  if parts.lora is not None:
    of_state["frozen base"] = _bytes(parts.abstract_frozen)
  accumulated = 2 if parts.row_layout.max_micro_batches > 1 else 1  # the sum and the newest
  return {
    "update, estimated": of_state
    | {
      "gradients": accumulated * _bytes(state.params),
      "activations": _activations(parts),
      "output head": _head(parts),
    },
    "generation, estimated": of_state
    | {
      "parameters to decode with": _decoding_parameters(parts),
      "keys and values": _keys_and_values(parts),
      "logits of a token": _local_prompts(parts)
      * config.batch.group_size
      * parts.model.config.vocab_size
      * 4
      * 2,
    },
  }


def _bytes(tree: Any) -> float:
  """Of every leaf's shard on one chip."""
  return float(
    sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
  )


def _local_prompts(parts: Parts) -> int:
  batch_devices = parts.mesh.shape["data"] * parts.mesh.shape["fsdp"]
  return -(-parts.config.batch.prompts // batch_devices)


def _decoding_parameters(parts: Parts) -> float:
  """The copy that a decoding loop reads: in the compute dtype, whole along fsdp."""
  size = jnp.dtype(parts.model.config.compute_dtype).itemsize

  def leaf(x):
    spec = [None if axis == "fsdp" else axis for axis in x.sharding.spec]
    whole = jax.sharding.NamedSharding(parts.mesh, jax.sharding.PartitionSpec(*spec))
    return math.prod(whole.shard_shape(x.shape)) * size

  return float(sum(map(leaf, jax.tree.leaves(parts.abstract_base))))


def _head(parts: Parts) -> float:
  """Of the output head: a chunk's float32 logits and their gradient, the kernel, its gradient."""
  c, layout = parts.model.config, parts.row_layout
  rows = min(default_chunk_rows(c.vocab_size), layout.rows_per_device * layout.length)
  kernel = c.width * (jnp.dtype(c.compute_dtype).itemsize + 4)
  return float((2 * 4 * rows + kernel) * c.vocab_size / parts.mesh.shape["tensor"])


def _keys_and_values(parts: Parts) -> float:
  """The full cache and, when it grows for the last time, the one before it."""
  config, c = parts.config, parts.model.config
  tensor = parts.mesh.shape["tensor"]  # over which the compiler splits heads, where they divide
  heads = c.num_kv_heads // tensor if c.num_kv_heads % tensor == 0 else c.num_kv_heads
  token = c.num_layers * heads * c.head_dim * 2 * jnp.dtype(c.compute_dtype).itemsize
  lengths = [0, *cache_lengths(config.max_response_length)]
  responses = config.batch.group_size * (lengths[-1] + lengths[-2])
  return float(_local_prompts(parts) * (config.max_prompt_length + responses) * token)


def _activations(parts: Parts) -> float:
  """What the forward pass leaves for the backward pass, and the layer in hand twice over."""
  c = parts.model.config
  tokens = parts.row_layout.rows_per_device * parts.row_layout.length
  heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
  products = heads + 2 * c.width + 2 * c.mlp_width  # q, k, v; output, down; gate, up
  tensor = parts.mesh.shape["tensor"]
  layer = c.width + products / tensor
  kept = {"full": c.width, "dots": layer, "none": 2 * layer}[c.remat]
  size = jnp.dtype(c.compute_dtype).itemsize
  return float(tokens * (c.num_layers * kept + 4 * layer) * size)


# --- for a person ---------------------------------------------------------------------------------


def _text(title: str, tables: dict[str, Table], limit_gib: float | None) -> str:
  lines = [title]
  for name, table in tables.items():
    total = sum(table.values()) / _GIB
    needed = total * (COMPILER_FACTOR if name.endswith("estimated") else 1.0)
    lines.append(f"{name}: {total:.2f} GiB per chip{_verdict(total, needed, limit_gib)}")
    lines += [f"  {what:<28}{size / _GIB:>10.2f} GiB" for what, size in table.items()]
  lines.append(f"The compiler may take about {COMPILER_FACTOR} times what is estimated.")
  return "\n".join(lines)


def _verdict(total: float, needed: float, limit_gib: float | None) -> str:
  if limit_gib is None:
    return ""
  fits = "fits" if needed <= limit_gib else "may fit" if total <= limit_gib else "DOES NOT FIT"
  return f" of {limit_gib}, {fits}"
