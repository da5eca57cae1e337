"""The sharding of arrays: the mesh, a table of rules, and transfers between host and devices.

Axes: `data` replicates parameters, `fsdp` shards them along one dimension, `tensor` along the
other. The batch is sharded on prompts over data and fsdp together, so a group is never split.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rlvr_jax.models.functional import Layout
from rlvr_jax.train.host import deadline
from rlvr_jax.types import Array, Params

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))

# First match wins; kernels of the scanned blocks carry the layer axis first.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
  (r"embedding$", PartitionSpec("tensor", "fsdp")),
  (r"head_kernel$", PartitionSpec("fsdp", "tensor")),
  (r"blocks/(query|key|value|gate|up)$", PartitionSpec(None, "fsdp", "tensor")),
  (r"blocks/(output|down)$", PartitionSpec(None, "tensor", "fsdp")),
  (r"blocks/(query|key|value|gate|up)/a$", PartitionSpec(None, "fsdp")),  # of LoRA; ranks are small
  (r"blocks/(query|key|value|gate|up)/b$", PartitionSpec(None, None, "tensor")),
  (r"blocks/(output|down)/a$", PartitionSpec(None, "tensor")),
  (r"blocks/(output|down)/b$", PartitionSpec(None, None, "fsdp")),
  (r"blocks/(output|down)_bias$", PartitionSpec(None, "fsdp")),
  (r"blocks/\w+_bias$", PartitionSpec(None, "tensor")),
  (r".*", PartitionSpec()),
)


def make_mesh(
  *,
  data: int = 1,
  fsdp: int = 1,
  tensor: int = 1,
  field: str = "mesh",
  skipped: int = 0,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """A mesh over data·fsdp·tensor devices, after the first `skipped` ones.

  Args:
    data, fsdp, tensor: number of devices along each axis, ≥ 1.
    field: of the configuration, for messages.
    skipped: number of devices that belong to another mesh.
    devices: to choose from, which need not be available; None: those of this machine.
  Raises:
    ValueError: sizes below 1, or more devices than available.
  """
  sizes = (data, fsdp, tensor)
  if any(size < 1 for size in sizes):
    given = dict(zip(AXES, sizes, strict=True))
    raise ValueError(f"config.{field} = {given}: every axis must be at least 1")
  devices = (jax.devices() if devices is None else devices)[skipped:]
  needed, available = math.prod(sizes), len(devices)
  if needed > available or (jax.process_count() > 1 and needed != available):
    others = f" besides the {skipped} of config.mesh" if skipped else ""
    raise ValueError(
      f"config.{field}: data·fsdp·tensor = {data}·{fsdp}·{tensor} = {needed} devices, but there are"
      f" {available}{others}; choose sizes whose product is {available} (on a CPU, more devices"
      f" come from XLA_FLAGS=--xla_force_host_platform_device_count={needed + skipped})"
    )
  # With jax's default, explicit axes, sharded contractions raise an error.
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:needed])


def rearranged(mesh: Mesh, *, data: int, fsdp: int, tensor: int, field: str) -> Mesh:
  """The same devices, in the same order, along other axes.

  Raises:
    ValueError: the sizes do not need all devices, or more.
  """
  sizes = (data, fsdp, tensor)
  if min(sizes) < 1 or math.prod(sizes) != mesh.size:
    raise ValueError(
      f"config.{field}: data·fsdp·tensor = {data}·{fsdp}·{tensor} = {math.prod(sizes)} with"
      f" same_devices, but config.mesh has {mesh.size} devices; choose sizes ≥ 1 whose product is"
      f" {mesh.size}"
    )
  if isinstance(mesh, AbstractMesh):
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3)
  return Mesh(mesh.devices.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def same_devices(mesh: Mesh, other: Mesh) -> bool:
  """Whether two meshes have the same devices, in the same order."""
  if isinstance(mesh, AbstractMesh):
    return mesh.size == other.size
  return list(mesh.devices.flat) == list(other.devices.flat)


def state_shardings(abstract: Any, mesh: Mesh) -> Any:
  """A NamedSharding for every leaf, from `RULES` by its path, optimizer moments included.

  A dimension that is not divisible by the size of its axis is replicated.
  """

  def sharding(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    spec = next(spec for pattern, spec in RULES if re.search(pattern, name))
    fits = [
      axis if axis and i < leaf.ndim and leaf.shape[i] % mesh.shape[axis] == 0 else None
      for i, axis in enumerate(spec)
    ]
    return NamedSharding(mesh, PartitionSpec(*fits[: leaf.ndim]))

  return jax.tree_util.tree_map_with_path(sharding, abstract)


def placed(shapes: Any, mesh: Mesh) -> Any:
  """`jax.ShapeDtypeStruct`s with the shardings of `state_shardings`."""
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
  return jax.tree.map(place, shapes, state_shardings(shapes, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def layout(mesh: Mesh | None) -> Layout:
  """How a network lies on a mesh; None: on one device."""
  if mesh is None:
    return Layout()
  return Layout(mesh, batch_constraint(mesh), gather_over_fsdp(mesh))


def batch_constraint(mesh: Mesh) -> Callable[[Array], Array]:
  """Keeps activations [P, ...] sharded on prompts, so that weights are communicated instead."""
  if mesh.size == 1:
    return lambda x: x
  return lambda x: jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


def gather_over_fsdp(mesh: Mesh) -> Callable[[Params], Params]:
  """Gathers parameters along fsdp, still sharded along tensor; for loops that use them often.

  They may come from another layout of the same devices.
  """
  if mesh.size == 1:
    return lambda params: params

  def gathered(sharding: NamedSharding) -> NamedSharding:
    kept = [None if axis == "fsdp" else axis for axis in sharding.spec]
    return NamedSharding(mesh, PartitionSpec(*kept))

  def gather(params: Params) -> Params:
    shardings = jax.tree.map(gathered, state_shardings(params, mesh))
    return jax.lax.with_sharding_constraint(params, shardings)

  return gather


def host_result_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of batch-sized results that the host reads: replicated with several processes.

  So the program that computes them gathers them. A separate gather would wait in the devices' queue
  behind programs dispatched in the meantime.
  """
  return batch_sharding(mesh) if jax.process_count() == 1 else replicated(mesh)


def check_batch(name: str, prompts: int, mesh: Mesh, num_micro_batches: int = 1) -> None:
  """Raises unless `prompts` splits evenly over micro-batches and devices."""
  devices = mesh.shape["data"] * mesh.shape["fsdp"]
  unit = devices * num_micro_batches
  parts = f"{num_micro_batches} micro-batches (config.batch.micro_batches) times "
  if prompts < 1 or prompts % unit:
    raise ValueError(
      f"{name} = {prompts} prompts do not split evenly over"
      f" {parts if num_micro_batches > 1 else ''}{devices} batch devices (config.mesh.data ="
      f" {mesh.shape['data']} · config.mesh.fsdp = {mesh.shape['fsdp']}); set {name} to a multiple"
      f" of {unit}, for example {max(1, round(prompts / unit)) * unit}"
    )


def to_devices(tree: Any, sharding: NamedSharding) -> Any:
  """Host arrays, equal on every process, as global arrays."""
  put = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
  return jax.tree.map(lambda x: put(np.asarray(x)), tree)


def to_host(tree: Any) -> Any:
  """Global arrays as NumPy arrays, complete on every process."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  local = lambda x: not isinstance(x, jax.Array) or x.is_fully_replicated or x.is_fully_addressable
  fetch = lambda x: (
    jax.device_get(x) if local(x) else multihost_utils.process_allgather(x, tiled=True)
  )
  with deadline():
    return jax.tree.map(fetch, tree)
