"""Sharding of arrays: the mesh, a table of rules, and transfers between host and devices.

The axis `data` of a mesh replicates parameters. The axis `fsdp` shards parameters along one
dimension, and `tensor` along the other. Arrays [P, ...] of P prompts are sharded on prompts, over
data and fsdp together. Packed rows are sharded on rows. So different devices may compute on the
rollouts of one group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rlvr_jax.models.functional import Model
from rlvr_jax.models.layout import Layout, Residual
from rlvr_jax.train.cluster.process import measure_wait
from rlvr_jax.types import Array, Params, TrainBatch, Tree

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))

# (pattern of a parameter's path, its axes); the first match wins. Kernels of scanned blocks have
# the layer axis first. Matrices quantized to 8 bits have values and a scale.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
  (r"embedding(/values|/scale)?$", PartitionSpec("tensor", "fsdp")),
  (r"head_kernel(/values|/scale)?$", PartitionSpec("fsdp", "tensor")),
  (
    r"blocks/(delta/|full/)?(query|key|value|gate|up|output_gate|strength|decay)(/values|/scale)?$",
    PartitionSpec(None, "fsdp", "tensor"),
  ),
  (r"blocks/(delta/|full/)?(output|down)(/values|/scale)?$", PartitionSpec(None, "tensor", "fsdp")),
  (r"blocks/delta/(\w+_taps|log_rate|decay_bias)$", PartitionSpec(None, "tensor")),
  # Kernels of experts, [layers, E, D, F] and [layers, E, F, D], are sharded like other kernels.
  (r"blocks/experts/router$", PartitionSpec(None, "fsdp")),
  (
    r"blocks/experts/(gate|up)(/values|/scale)?$",
    PartitionSpec(None, None, "fsdp", "tensor"),
  ),
  (r"blocks/experts/down(/values|/scale)?$", PartitionSpec(None, None, "tensor", "fsdp")),
  (
    r"blocks/experts/shared_(gate|up)(/values|/scale)?$",
    PartitionSpec(None, "fsdp", "tensor"),
  ),
  (r"blocks/experts/shared_down(/values|/scale)?$", PartitionSpec(None, "tensor", "fsdp")),
  # Adapters: their ranks are small, so only the other dimension is sharded.
  (r"blocks/(delta/|full/)?(output|down)/a$", PartitionSpec(None, "tensor")),
  (r"blocks/(delta/|full/)?(output|down)/b$", PartitionSpec(None, None, "fsdp")),
  (r"blocks/(delta/|full/)?\w+/a$", PartitionSpec(None, "fsdp")),
  (r"blocks/(delta/|full/)?\w+/b$", PartitionSpec(None, None, "tensor")),
  (r"blocks/(full/)?(output|down)_bias$", PartitionSpec(None, "fsdp")),
  (r"blocks/(full/)?\w+_bias$", PartitionSpec(None, "tensor")),
  (r".*", PartitionSpec()),
)


def make_mesh(
  *,
  data: int = 1,
  fsdp: int = 1,
  tensor: int = 1,
  field: str = "mesh",
  skipped: int = 0,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """A mesh over data·fsdp·tensor devices, without the first `skipped` devices.

  With several TPU slices, `data` spans the slices, and the other axes stay within a slice.

  Args:
    data, fsdp, tensor: number of devices along each axis, ≥ 1; one of the three may be −1 for all
      remaining devices.
    field: name of the configuration field, for messages.
    skipped: number of devices that belong to another mesh.
    devices: devices to choose from, which need not exist; None: this run's devices.
  Raises:
    ValueError: the sizes are not allowed, need more devices than available, do not fit the slice's
      torus, or `data` is not a multiple of the number of slices.
  """
  devices = (jax.devices() if devices is None else devices)[skipped:]
  available = len(devices)
  data, fsdp, tensor = sizes = _resolve_sizes((data, fsdp, tensor), available, field)
  needed = math.prod(sizes)
  if needed > available or (jax.process_count() > 1 and needed != available):
    others = f" besides the {skipped} of config.mesh" if skipped else ""
    raise ValueError(
      f"config.{field}: data·fsdp·tensor = {data}·{fsdp}·{tensor} = {needed} devices, but there are"
      f" {available}{others}; choose sizes whose product is {available} (on a CPU, more devices"
      f" come from XLA_FLAGS=--xla_force_host_platform_device_count={needed + skipped})"
    )
  # With jax's default, explicit axes, sharded contractions raise an error.
  types = (AxisType.Auto,) * 3
  chosen = devices[:needed]
  slices = len({getattr(device, "slice_index", 0) for device in chosen})
  if slices == 1:
    try:
      return jax.make_mesh(sizes, AXES, axis_types=types, devices=chosen)
    except NotImplementedError as error:  # the axes do not fit the slice's torus
      raise ValueError(
        f"config.{field}: data·fsdp·tensor = {data}·{fsdp}·{tensor} does not lie along the axes of"
        f" a slice of {chosen[0].device_kind}, {available} devices; choose other factors of"
        f" {needed}"
      ) from error
  if data % slices:
    raise ValueError(
      f"config.{field}.data = {data} on {slices} slices: only the axis data may span slices, since"
      f" the network between them is slow; set config.{field}.data to a multiple of {slices}"
    )
  slice_sizes = (data // slices, fsdp, tensor)
  grid = mesh_utils.create_hybrid_device_mesh(slice_sizes, (slices, 1, 1), chosen)
  return Mesh(grid, AXES, axis_types=types)


def _resolve_sizes(given: tuple[int, ...], available: int, field: str) -> tuple[int, ...]:
  """Sizes of a mesh's axes, with −1 replaced by a number."""
  setting = f"config.{field} = {dict(zip(AXES, given, strict=True))}"
  if given.count(-1) > 1 or any(size < 1 and size != -1 for size in given):
    raise ValueError(
      f"{setting}: every size must be at least 1; one size may be -1, for all remaining devices"
    )
  if -1 not in given:
    return given
  others = -math.prod(given)
  if not available or available % others:
    raise ValueError(
      f"{setting}: {available} devices are not a multiple of {others}, so there is no size for the"
      f" axis with -1; choose the other sizes so that their product divides {available}"
    )
  return tuple(available // others if size == -1 else size for size in given)


def rearrange(mesh: Mesh, *, data: int, fsdp: int, tensor: int, field: str) -> Mesh:
  """A mesh of other sizes with the same devices, in the same order.

  Raises:
    ValueError: the product of the sizes is not the number of devices.
  """
  sizes = (data, fsdp, tensor)
  if min(sizes) < 1 or math.prod(sizes) != mesh.size:
    raise ValueError(
      f"config.{field}: data·fsdp·tensor = {data}·{fsdp}·{tensor} = {math.prod(sizes)}, but"
      f" with same_devices = True it must be {mesh.size}, the number of devices in"
      f" config.mesh; choose sizes ≥ 1 whose product is {mesh.size}"
    )
  if isinstance(mesh, AbstractMesh):
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3)
  return Mesh(mesh.devices.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def has_same_devices(mesh: Mesh, other: Mesh) -> bool:
  """Whether two meshes have the same devices, in the same order."""
  if isinstance(mesh, AbstractMesh):
    return mesh.size == other.size
  return list(mesh.devices.flat) == list(other.devices.flat)


def is_on_cpu(mesh: Mesh | AbstractMesh) -> bool:
  """Whether a mesh consists of CPUs; a mesh without devices stands for accelerators."""
  return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"


def platform(mesh: Mesh | AbstractMesh | None) -> str:
  """The platform of a mesh: "tpu", "gpu" or "cpu"; jax's default without a mesh of devices."""
  name: str = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()
  return name


def state_shardings(abstract: Tree, mesh: Mesh) -> Tree:
  """A NamedSharding for every leaf, from `RULES` by the leaf's path; also for optimizer moments.

  A dimension that is not divisible by the size of its axis is replicated.
  """

  def sharding(path: tuple[jax.tree_util.KeyEntry, ...], leaf: Array) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    spec = next(spec for pattern, spec in RULES if re.search(pattern, name))
    axes = [
      axis if axis and i < leaf.ndim and leaf.shape[i] % mesh.shape[axis] == 0 else None
      for i, axis in enumerate(spec)
    ]
    return NamedSharding(mesh, PartitionSpec(*axes[: leaf.ndim]))

  shardings: Tree = jax.tree_util.tree_map_with_path(sharding, abstract)
  return shardings


def add_shardings(shapes: Tree, mesh: Mesh) -> Tree:
  """`jax.ShapeDtypeStruct`s with the shardings of `state_shardings`."""
  placed: Tree = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    state_shardings(shapes, mesh),
  )
  return placed


def abstract_params(model: Model, mesh: Mesh) -> Params:
  """Shapes, dtypes and shardings of all parameters of a model's network."""
  return add_shardings(jax.eval_shape(model.init, jax.random.key(0)), mesh)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of arrays [P, ...] over the P prompts: on `data` and `fsdp` together."""
  return NamedSharding(mesh, BATCH)


def rows_of_process(mesh: Mesh, number: int) -> set[int]:
  """The rows that lie on this process's devices, for a micro-batch of `number` rows."""
  parts = batch_sharding(mesh).addressable_devices_indices_map((number,)).values()
  return {row for part in parts if part for row in range(number)[part[0]]}


def replicated_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of arrays that every device has completely."""
  return NamedSharding(mesh, PartitionSpec())


def make_layout(mesh: Mesh | None, parameters: Mesh | None = None) -> Layout:
  """The layout of a network on a mesh.

  Args:
    mesh: the mesh; None for one device.
    parameters: the mesh on which the parameters are sharded, with the same devices; None for
      `mesh`.
  """
  if mesh is None:
    return Layout()
  gather = fsdp_gather(mesh, rearranged=parameters not in (None, mesh))
  decoding = functools.partial(decoding_shardings, mesh=mesh)
  return Layout(mesh, batch_constraint(mesh), make_residual(mesh), gather, decoding)


def batch_constraint(mesh: Mesh) -> Callable[[Array], Array]:
  """A function that shards activations on their first axis, so that fsdp moves only weights."""
  if mesh.size == 1:
    return lambda x: x
  return lambda x: jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


def make_residual(mesh: Mesh) -> Residual:
  """Functions that shard the residual stream: rows over `data` and `fsdp`, tokens over `tensor`.

  Sharding on tokens is sequence parallelism. Gradients get the inverse constraints. Without these
  constraints, XLA gathers gradients along features, and sums the gradients of complete kernels.
  """
  rows = batch_constraint(mesh)
  if mesh.shape["tensor"] == 1:
    return Residual(keep=rows)
  sharded = NamedSharding(mesh, PartitionSpec(*BATCH, "tensor"))

  def tokens(x: Array) -> Array:  # replicated unless `tensor` divides the number of tokens
    divides = x.shape[1] % mesh.shape["tensor"] == 0
    return jax.lax.with_sharding_constraint(x, sharded) if divides else rows(x)

  return Residual(
    keep=tokens, gather=_with_gradient_map(rows, tokens), scatter=_with_gradient_map(tokens, rows)
  )


def _with_gradient_map(
  forward: Callable[[Array], Array], backward: Callable[[Array], Array]
) -> Callable[[Array], Array]:
  """A function that applies `forward` to a value and `backward` to its gradient."""
  function = jax.custom_vjp(forward)
  function.defvjp(lambda x: (forward(x), None), lambda _, gradient: (backward(gradient),))
  return function


def fsdp_gather(mesh: Mesh, *, rearranged: bool = False) -> Callable[[Params], Params]:
  """A function that gathers parameters along fsdp, for loops that use them often.

  The parameters stay sharded along tensor.

  Args:
    mesh: the mesh of the gathered parameters.
    rearranged: whether the parameters come from a mesh of other sizes with the same devices. If
      they do, each device first gets a part of its final shard, and then gathers the rest. So no
      device gathers parameters that only other devices need.
  """
  if mesh.size == 1:
    return lambda params: params

  def gather(params: Params) -> Params:
    keep = jax.lax.with_sharding_constraint
    if rearranged:
      params = keep(params, _replace_fsdp(state_shardings(params, mesh), params, ("data", "fsdp")))
    return keep(params, _replace_fsdp(state_shardings(params, mesh), params, ()))

  return gather


def decoding_shardings(params: Params, mesh: Mesh) -> Params:
  """The shardings of the parameters for decoding; "blocks" has the shardings of a single layer.

  Args:
    params: shapes of the stacked parameters.
    mesh: the mesh for generation.
  """
  gathered = _replace_fsdp(state_shardings(params, mesh), params, ())
  of_layer = lambda stacked: NamedSharding(mesh, PartitionSpec(*stacked.spec[1:]))
  return {**gathered, "blocks": jax.tree.map(of_layer, gathered["blocks"])}


def _replace_fsdp(shardings: Params, arrays: Params, axes: tuple[str, ...]) -> Params:
  """`shardings` with `axes` in place of fsdp, in dimensions that the sizes of `axes` divide."""

  def replace(sharding: NamedSharding, x: Array) -> NamedSharding:
    devices = math.prod(sharding.mesh.shape[axis] for axis in axes)
    spec = [
      (axes if axes and size % devices == 0 else None) if axis == "fsdp" else axis
      for axis, size in zip(sharding.spec, x.shape, strict=False)
    ]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))

  return jax.tree.map(replace, shardings, arrays)


def host_result_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of batch-sized results that the host reads: replicated with several processes.

  So the compiled program that computes the results also gathers them. A separate gather would wait
  in the devices' queue, behind compiled programs that were dispatched in the meantime.
  """
  return batch_sharding(mesh) if jax.process_count() == 1 else replicated_sharding(mesh)


def check_batch(name: str, prompts: int, mesh: Mesh) -> None:
  """Raises ValueError unless `prompts` splits evenly over the devices."""
  devices = mesh.shape["data"] * mesh.shape["fsdp"]
  if prompts < 1 or prompts % devices:
    raise ValueError(
      f"{name} = {prompts} prompts do not split evenly over {devices} devices"
      f" (config.mesh.data = {mesh.shape['data']} · config.mesh.fsdp = {mesh.shape['fsdp']}); set"
      f" {name} to a multiple of {devices}, for example"
      f" {max(1, round(prompts / devices)) * devices}"
    )


def to_devices(tree: Any, sharding: NamedSharding) -> Any:
  """Puts host arrays, equal on every process, on devices as global arrays."""

  def put(x: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return jax.tree.map(lambda x: put(np.asarray(x)), tree)


def batch_shardings(batch: TrainBatch, mesh: Mesh, groups: PartitionSpec = BATCH) -> TrainBatch:
  """A sharding for every leaf: `groups` for arrays [P, ...]; packed arrays are sharded on rows."""

  def shard(tree: Tree, spec: PartitionSpec) -> Tree:
    shardings: Tree = jax.tree.map(lambda _: NamedSharding(mesh, spec), tree)
    return shardings

  packed = batch.packed
  if packed is not None:
    rows = PartitionSpec(None, *BATCH)
    numbers = shard((packed.num_micro_batches, packed.num_short), PartitionSpec())
    packed = shard(packed, rows)._replace(
      places=shard(packed.places, groups), num_micro_batches=numbers[0], num_short=numbers[1]
    )
  return dataclasses.replace(shard(dataclasses.replace(batch, packed=None), groups), packed=packed)


def batch_to_devices(batch: TrainBatch, mesh: Mesh, groups: PartitionSpec = BATCH) -> TrainBatch:
  """Puts a batch of the host, equal on every process, on devices as global arrays.

  Args:
    batch: a batch of NumPy arrays.
    mesh: the mesh of the devices.
    groups: the sharding of arrays [P, ...]: over prompts, or replicated.
  """
  shardings = batch_shardings(batch, mesh, groups)
  on_devices: TrainBatch = jax.tree.map(to_devices, batch, shardings)
  return on_devices


def to_host(tree: Tree) -> Tree:
  """Fetches global arrays as NumPy arrays, complete on every process."""
  if jax.process_count() == 1:
    local: Tree = jax.device_get(tree)
    return local

  def fetch(x: object) -> object:
    if not isinstance(x, jax.Array) or x.is_fully_replicated or x.is_fully_addressable:
      return jax.device_get(x)
    return multihost_utils.process_allgather(x, tiled=True)

  with measure_wait():
    fetched: Tree = jax.tree.map(fetch, tree)
  return fetched
