"""Compiles the programs of a run for chips that this machine does not have."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from rlvr_jax.costs.gpus import gpu_devices, is_gpu
from rlvr_jax.costs.workload import longest, pack_workload
from rlvr_jax.data import ByteTokenizer, Task
from rlvr_jax.models.memory import shard_bytes
from rlvr_jax.rollouts.batch import drop_scores
from rlvr_jax.rollouts.packing import RowLayout
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts, build
from rlvr_jax.train.setup.compiler_options import Options
from rlvr_jax.train.setup.programs import Programs
from rlvr_jax.train.setup.teachers import Teacher
from rlvr_jax.types import BatchShape, Packed, Params, TrainBatch, TrainState

Lower = Callable[[], jax.stages.Lowered]
TEACHER = "teacher"  # name of the program that is a teacher's forward pass


def topology_devices(name: str) -> list[jax.Device]:
  """Descriptions of the devices of a TPU slice or of GPUs, which need not exist here.

  Raises:
    ValueError: the compiler is not installed, or the slice is unknown.
  """
  if is_gpu(name):
    return gpu_devices(name)
  # The first setting prevents libtpu from querying a metadata server, which only Cloud TPU machines
  # have. The second lets several processes compile at the same time.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  try:
    sizes = [int(size) for size in re.findall(r"\d+", name.partition(":")[2])]
    host_bounds = [min(2, size) for size in sizes[:2]] + [1]  # chips; libtpu assumes 2 × 2 × 1
    topology = topologies.get_topology_desc(
      platform="tpu", topology_name=name, chips_per_host_bounds=host_bounds
    )
    return list(topology.devices)
  except Exception as error:  # libtpu's errors have no common class
    raise ValueError(
      f"cannot compile for --topology={name}: {str(error)[:300]}. Examples of names: v5e:4x4,"
      ' v5p:2x2x4 (16 chips each); pip install "rlvr_jax[tpu]" installs the compiler. Without'
      " --topology, --mode=fits gives an estimate"
    ) from error


def make_topology_mesh(sizes: Mapping[str, int], topology: str | None) -> Any:
  """Makes the mesh of a run over the devices of a TPU slice or of GPUs.

  Args:
    sizes: `config.mesh`.
    topology: kind and shape of the slice; None for a mesh without devices.
  Raises:
    ValueError: the topology is unknown, or its number of devices is not the size of the mesh.
  """
  axes = {axis: sizes[axis] for axis in sharding.AXES}
  if topology is None:
    if min(axes.values()) < 1:
      raise ValueError(
        f"config.mesh = {axes}: without --topology the number of devices is not known; give"
        " --topology, such as v5p:2x2x4, or a size of at least 1 for every axis"
      )
    types = (AxisType.Auto,) * 3
    return AbstractMesh(tuple(axes.values()), sharding.AXES, axis_types=types)
  devices = topology_devices(topology)
  data, fsdp, tensor = axes.values()
  mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=devices)
  if mesh.size != len(devices):
    raise ValueError(
      f"config.mesh = {axes} is {mesh.size} devices, but --topology={topology} has {len(devices)};"
      f" choose sizes whose product is {len(devices)}, or -1 for one of them"
    )
  return mesh


def build_shapes_only(config: ml_collections.ConfigDict, mesh: Mesh) -> Parts:
  """Builds a run with an empty task, on a mesh whose devices this machine may not have."""
  empty_task = Task(name="none", train=(), warm_start=(), held_out=(), grader="none:none")
  config = ml_collections.ConfigDict(config)
  config.warm_start.num_steps = 0
  return build(config, task=empty_task, tokenizer=ByteTokenizer(), mesh=mesh)


def build_for(config: ml_collections.ConfigDict, topology: str | None) -> Parts:
  """Builds a run as `build_shapes_only` does, on the mesh of `make_topology_mesh`."""
  return build_shapes_only(config, make_topology_mesh(config.mesh, topology))


def program_lowerings(
  programs: Programs,
  placement: Placement,
  batch: TrainBatch,
  packed: Packed,
  options: Options | None,
  *,
  rebuilds: bool = False,
  teacher: tuple[Params, Params] | None = None,
) -> dict[str, Lower]:
  """The functions that lower a run's programs, by name: "update" and "generation".

  "generation" is one burst: it decodes up to 16 tokens in every slot. With dialogues or `rebuilds`,
  "prefill" is added: a prefill of the longest prompt with its response.

  Args:
    programs, placement: programs and placement of the run.
    batch: shapes of an update's batch, from `abstract_update_batch`.
    packed: a packed batch; only its numbers of micro-batches are used.
    options: the options of the compiler, for the update.
    rebuilds: whether caches are recomputed under new weights.
    teacher: shapes of the teacher's parameters, from `abstract_teacher`.
  """
  state, frozen = placement.state, placement.frozen
  engine = programs.engine
  jitted: Any = programs.train_step
  train_step = jitted.__wrapped__  # compiler options belong to the outermost jit
  shardings = jax.tree.map(lambda x: x.sharding, state)
  counts = {
    name: int(count)
    for name in ("num_micro_batches", "num_short")
    if (count := getattr(packed, name)) is not None
  }

  def update(state: TrainState, frozen: Params, batch: TrainBatch, teacher: Any) -> Any:
    # With constant numbers, the compiled program shows the lengths of its loops.
    constants: Any = {name: jnp.int32(count) for name, count in counts.items()}
    rows = dataclasses.replace(batch, packed=batch.packed and batch.packed._replace(**constants))
    return train_step(state, frozen, rows, teacher)

  lowerings: dict[str, Lower] = {
    "update": lambda: jax.jit(
      update,
      donate_argnums=0,
      out_shardings=(shardings, sharding.replicated_sharding(placement.mesh)),
      compiler_options=options,
    ).lower(state, frozen, batch, teacher),
    "generation": lambda: engine.lower_burst(state.params, frozen),
  }
  if engine.settings.has_replies or rebuilds:
    lowerings["prefill"] = lambda: engine.lower_prefill(state.params, frozen)
  return lowerings


def teacher_lowerings(
  programs: Programs, teachers: Sequence[Teacher], placement: Placement, batch: TrainBatch
) -> dict[str, Lower]:
  """{"teacher": the function that lowers the largest teacher's forward pass}; {} without one.

  Args:
    programs, teachers, placement: as for `program_lowerings`.
    batch: shapes of a batch with the prompts that teachers read, from `abstract_taught_batch`.
  """
  size = lambda pair: shard_bytes(pair[0].params)
  largest = max(zip(teachers, programs.teach, strict=True), key=size, default=None)
  if largest is None:
    return {}
  teacher, teach = largest
  trained = placement.state.params
  policy = teacher.policy(teacher.params, trained, placement.frozen, trained)
  return {TEACHER: lambda: teach.lower(*policy, drop_scores(batch))}


def pack_full_length(shape: BatchShape, layout: RowLayout) -> Packed:
  """Packs a batch whose prompts and responses have maximum length, as NumPy arrays."""
  return pack_workload(longest().draw(shape, 0), shape, layout)


def compile_program(name: str, lower: Lower, **options: str | bool) -> jax.stages.Compiled | None:
  """The compiled program; None if the compiler reports that it does not fit into memory."""
  start = time.perf_counter()
  try:
    program = lower().compile(compiler_options=options)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    say(str(error)[:1000])
    return None
  say(f"{name}, compiled in {time.perf_counter() - start:.0f} s")
  return program


class CompiledText(NamedTuple):
  """A compiled program, and the compiler's own dumps of it."""

  program: jax.stages.Compiled | None  # None if it needs more memory than there is
  text: str  # the text of the optimized program; "" without a program
  thunks: str  # the dump of a GPU's launches, see `launches`; "" for TPUs
  seconds: float  # seconds of compilation


def compile_with_text(name: str, lower: Lower) -> CompiledText:
  """Compiles for a TPU or a GPU as `compile_program` does; also returns the compiler's texts.

  The texts are the compiler's dumps rather than the result of `as_text()`. That method parses a
  program again, and jaxlib cannot parse everything that a newer compiler writes.
  """
  with tempfile.TemporaryDirectory() as folder:
    start = time.perf_counter()
    program = compile_program(name, lower, xla_dump_to=folder, xla_dump_hlo_as_text=True)
    seconds = time.perf_counter() - start

    def read(*endings: str) -> str:
      found = [path for ending in endings for path in pathlib.Path(folder).glob(f"*.{ending}.txt")]
      largest = max(found, key=os.path.getsize, default=None)
      return largest.read_text(encoding="utf-8") if program and largest else ""

    text = read("after_codegen", "*gpu_after_optimizations")
    return CompiledText(program, text, read("thunk_sequence_after_thunk_passes"), seconds)


def memory_bytes(program: jax.stages.Compiled) -> dict[str, float]:
  """Bytes that a compiled program uses on each device, by kind of content."""
  usage: Any = program.memory_analysis()
  return {
    "arguments": usage.argument_size_in_bytes,
    "results": usage.output_size_in_bytes - usage.alias_size_in_bytes,
    "temporary": usage.temp_size_in_bytes,
    "program": usage.generated_code_size_in_bytes,
  }
