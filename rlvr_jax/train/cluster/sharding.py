"""The sharding of arrays: the mesh, a table of rules, and transfers between host and devices.

Axes: `data` replicates parameters, `fsdp` shards them along one dimension, `tensor` along the
other. Arrays [P, ...] are sharded on prompts over data and fsdp together; the rows that the
network sees are sharded on rows, so there a group may lie on several devices.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rlvr_jax.models.layout import Layout, Residual
from rlvr_jax.train.cluster.process import waiting
from rlvr_jax.types import Array, Params, TrainBatch

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

  With several TPU slices, `data` goes over them, and the other axes stay within a slice.

  Args:
    data, fsdp, tensor: number of devices along each axis, ≥ 1; −1 for one of them: all devices that
      the others leave to it.
    field: of the configuration, for messages.
    skipped: number of devices that belong to another mesh.
    devices: to choose from, which need not be available; None: those of this machine.
  Raises:
    ValueError: sizes that are not allowed, more devices than available, or a `data` that slices do
      not divide.
  """
  devices = (jax.devices() if devices is None else devices)[skipped:]
  data, fsdp, tensor = sizes = _sizes((data, fsdp, tensor), len(devices), field)
  needed, available = math.prod(sizes), len(devices)
  if needed > available or (jax.process_count() > 1 and needed != available):
    others = f" besides the {skipped} of config.mesh" if skipped else ""
    raise ValueError(
      f"config.{field}: data·fsdp·tensor = {data}·{fsdp}·{tensor} = {needed} devices, but there are"
      f" {available}{others}; choose sizes whose product is {available} (on a CPU, more devices"
      f" come from XLA_FLAGS=--xla_force_host_platform_device_count={needed + skipped})"
    )
  # With jax's default, explicit axes, sharded contractions raise an error.
  types, chosen = (AxisType.Auto,) * 3, devices[:needed]
  slices = len({getattr(device, "slice_index", 0) for device in chosen})
  if slices == 1:
    return jax.make_mesh(sizes, AXES, axis_types=types, devices=chosen)
  if data % slices:
    raise ValueError(
      f"config.{field}.data = {data} on {slices} slices: the network between slices is slow, and"
      f" data alone goes over it; set config.{field}.data to a multiple of {slices}"
    )
  within = (data // slices, fsdp, tensor)
  grid = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), chosen)
  return Mesh(grid, AXES, axis_types=types)


def _sizes(given: tuple[int, ...], available: int, field: str) -> tuple[int, ...]:
  """Sizes of a mesh's axes, with a number in the place of −1."""
  named = f"config.{field} = {dict(zip(AXES, given, strict=True))}"
  if given.count(-1) > 1 or any(size < 1 and size != -1 for size in given):
    raise ValueError(
      f"{named}: every axis must be at least 1, or one of them -1 for all devices that the others"
      " leave to it"
    )
  if -1 not in given:
    return given
  others = -math.prod(given)
  if not available or available % others:
    raise ValueError(
      f"{named}: {available} devices are not a multiple of {others}, so there is no size for the"
      f" axis with -1; choose the other sizes so that their product divides {available}"
    )
  return tuple(available // others if size == -1 else size for size in given)


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
  return Layout(mesh, batch_constraint(mesh), residual(mesh), gather_over_fsdp(mesh))


def batch_constraint(mesh: Mesh) -> Callable[[Array], Array]:
  """Keeps activations [P, ...] sharded on prompts, so that weights are communicated instead."""
  if mesh.size == 1:
    return lambda x: x
  return lambda x: jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


def residual(mesh: Mesh) -> Residual:
  """The residual stream sharded on prompts, and on tokens over `tensor` (sequence parallelism).

  Gradients are told to go the opposite way: left to itself, XLA gathers them along features, and
  sums gradients of whole kernels.
  """
  rows = batch_constraint(mesh)
  if mesh.shape["tensor"] == 1:
    return Residual(keep=rows)
  sharded = NamedSharding(mesh, PartitionSpec(*BATCH, "tensor"))

  def tokens(x: Array) -> Array:  # where they do not divide, every device has them all
    divides = x.shape[1] % mesh.shape["tensor"] == 0
    return jax.lax.with_sharding_constraint(x, sharded) if divides else rows(x)

  return Residual(
    keep=tokens, gather=_there_and_back(rows, tokens), scatter=_there_and_back(tokens, rows)
  )


def _there_and_back(
  there: Callable[[Array], Array], back: Callable[[Array], Array]
) -> Callable[[Array], Array]:
  """`there` on a value, `back` on its gradient."""
  move = jax.custom_vjp(there)
  move.defvjp(lambda x: (there(x), None), lambda _, gradient: (back(gradient),))
  return move


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


def check_batch(name: str, prompts: int, mesh: Mesh) -> None:
  """Raises unless `prompts` splits evenly over devices."""
  devices = mesh.shape["data"] * mesh.shape["fsdp"]
  if prompts < 1 or prompts % devices:
    raise ValueError(
      f"{name} = {prompts} prompts do not split evenly over {devices} batch devices"
      f" (config.mesh.data = {mesh.shape['data']} · config.mesh.fsdp = {mesh.shape['fsdp']}); set"
      f" {name} to a multiple of {devices}, for example"
      f" {max(1, round(prompts / devices)) * devices}"
    )


def to_devices(tree: Any, sharding: NamedSharding) -> Any:
  """Host arrays, equal on every process, as global arrays."""
  put = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
  return jax.tree.map(lambda x: put(np.asarray(x)), tree)


def batch_shardings(batch: TrainBatch, mesh: Mesh) -> TrainBatch:
  """A sharding for every leaf: the batch on prompts, each of its micro-batches on rows."""
  of = lambda tree, spec: jax.tree.map(lambda _: NamedSharding(mesh, spec), tree)
  packed = batch.packed
  if packed is not None:
    rows = PartitionSpec(None, *BATCH)
    packed = of(packed, rows)._replace(
      places=of(packed.places, BATCH), num_micro_batches=replicated(mesh)
    )
  return dataclasses.replace(of(dataclasses.replace(batch, packed=None), BATCH), packed=packed)


def batch_to_devices(batch: TrainBatch, mesh: Mesh) -> TrainBatch:
  """A host's batch, the same on every process, as global arrays."""
  return jax.tree.map(to_devices, batch, batch_shardings(batch, mesh))


def to_host(tree: Any) -> Any:
  """Global arrays as NumPy arrays, complete on every process."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  local = lambda x: not isinstance(x, jax.Array) or x.is_fully_replicated or x.is_fully_addressable
  fetch = lambda x: (
    jax.device_get(x) if local(x) else multihost_utils.process_allgather(x, tiled=True)
  )
  with waiting():
    return jax.tree.map(fetch, tree)
