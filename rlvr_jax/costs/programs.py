"""A run's programs, compiled for chips that this machine does not have."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import tempfile
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
from rlvr_jax.rollouts.packing import pack
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts, build
from rlvr_jax.train.setup.programs import abstract_batch
from rlvr_jax.types import Packed


def topology_devices(name: str) -> list[Any]:
  """Descriptions of the devices of a TPU slice, which this machine does not need to have.

  Raises:
    ValueError: the compiler is not installed, or the slice is unknown.
  """
  # Without the first, libtpu queries a metadata server that exists on Cloud TPU machines only;
  # without the second, processes that only compile block one another.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  try:
    sizes = [int(size) for size in re.findall(r"\d+", name.partition(":")[2])]
    of_host = [min(2, size) for size in sizes[:2]] + [1]  # chips; libtpu assumes 2 × 2 × 1
    topology = topologies.get_topology_desc(
      platform="tpu", topology_name=name, chips_per_host_bounds=of_host
    )
    return list(topology.devices)
  except Exception as error:  # libtpu has no common class of errors
    raise ValueError(
      f"cannot compile for --topology={name}: {str(error)[:300]}. Examples of names: v5e:4x4,"
      ' v5p:2x2x4 (16 chips each); pip install -e ".[tpu]" installs the compiler. Without'
      " --topology --mode=fits gives an estimate"
    ) from error


def mesh_of(config: ml_collections.ConfigDict, topology: str | None) -> Any:
  """The mesh of `config.mesh` over the devices of a TPU slice, as a run on them builds it.

  Args:
    topology: of the slice; None for a mesh without devices.
  Raises:
    ValueError: the topology is unknown, or the mesh has another size.
  """
  sizes: dict[str, Any] = {axis: config.mesh[axis] for axis in sharding.AXES}
  if topology is None:
    if min(sizes.values()) < 1:
      raise ValueError(
        f"config.mesh = {sizes}: without --topology the number of devices is not known; give"
        " --topology, such as v5p:2x2x4, or a size of at least 1 for every axis"
      )
    types = (AxisType.Auto,) * 3
    return jax.sharding.AbstractMesh(tuple(sizes.values()), sharding.AXES, axis_types=types)
  devices = topology_devices(topology)
  mesh = sharding.make_mesh(**sizes, devices=devices)
  if mesh.size != len(devices):
    raise ValueError(
      f"config.mesh = {sizes} is {mesh.size} devices, --topology={topology} has {len(devices)};"
      f" choose sizes whose product is {len(devices)}, or -1 for one of them"
    )
  return mesh


def shapes_only(config: ml_collections.ConfigDict, mesh: Mesh) -> Parts:
  """The parts of a run without problems, on a mesh whose devices this machine may not have."""
  nothing = Task(name="none", train=(), warm_start=(), held_out=(), grader="none:none")
  config = ml_collections.ConfigDict(config)
  config.warm_start.num_steps = 0
  return build(config, task=nothing, tokenizer=ByteTokenizer(), mesh=mesh)


def programs(parts: Parts) -> dict[str, Any]:
  """The update of a run and a burst of its generation, by name, lowered for the shapes they take.

  Returns:
    Functions without arguments that return a `jax.stages.Lowered`; see `compiled`.
  """
  config, mesh, state = parts.config, parts.placement.mesh, parts.placement.state
  frozen = parts.placement.frozen
  needs_proximal = parts.method.loss.needs_proximal
  batch = abstract_batch(config, parts.placement.row_layout, mesh, needs_proximal=needs_proximal)
  jitted: Any = parts.programs
  number = int(packed_at_full_length(parts).num_micro_batches)

  def update(state, frozen, batch):  # a constant, which the compiled program shows
    packed = batch.packed._replace(num_micro_batches=jnp.int32(number))
    return jitted.train_step(state, frozen, dataclasses.replace(batch, packed=packed))

  return {
    "update": lambda: jax.jit(update, donate_argnums=0).lower(state, frozen, batch),
    "generation": lambda: jitted.engine.lowered(state.params, frozen),
  }


def packed_at_full_length(parts: Parts) -> Packed:
  """The rows of a batch whose prompts and responses are as long as they may be; NumPy."""
  config = parts.config
  shape, longest = (config.batch.prompts, config.batch.group_size), config.max_response_length
  zeros = lambda *sizes: np.zeros(sizes, np.int32)
  prompts = zeros(shape[0], config.max_prompt_length), np.full(shape[0], config.max_prompt_length)
  return pack(*prompts, zeros(*shape, longest), np.full(shape, longest), parts.placement.row_layout)


def compiled(name: str, lower: Callable[[], Any], **options: Any) -> Any:
  """A `jax.stages.Compiled`; None if the compiler finds that memory does not suffice."""
  began = time.perf_counter()
  try:
    program = lower().compile(compiler_options=options)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    say(str(error)[:1000])
    return None
  say(f"{name}, compiled in {time.perf_counter() - began:.0f} s")
  return program


def compiled_with_text(name: str, lower: Callable[[], Any]) -> tuple[Any, str]:
  """Compiles for a TPU as `compiled` does; also returns the text of the optimized program.

  The text is the compiler's own, "" if the program is None: `as_text()` parses a program again, and
  jaxlib cannot parse all that a newer compiler writes.
  """
  with tempfile.TemporaryDirectory() as folder:
    program = compiled(name, lower, xla_dump_to=folder, xla_dump_hlo_as_text=True)
    written = sorted(pathlib.Path(folder).glob("*.after_codegen.txt"), key=os.path.getsize)
    return program, written[-1].read_text(encoding="utf-8") if program else ""


def memory(compiled: Any) -> dict[str, float]:
  """Bytes that a compiled program takes on every device."""
  used = compiled.memory_analysis()
  return {
    "arguments": used.argument_size_in_bytes,
    "results": used.output_size_in_bytes - used.alias_size_in_bytes,
    "temporary": used.temp_size_in_bytes,
    "program": used.generated_code_size_in_bytes,
  }
