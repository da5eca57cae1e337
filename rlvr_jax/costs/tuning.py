"""Settings of a run for a TPU slice: which exist, how they rank, what their programs cost.

An update is chosen first: its mesh, its rows and micro-batches, what its backward pass recomputes,
and the compiler's options. Then the layout and the slots of generation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh

from rlvr_jax.costs import step_time
from rlvr_jax.costs.chips import Chip
from rlvr_jax.costs.generation_time import Refresh, Seconds, refresh
from rlvr_jax.costs.gpus import is_gpu
from rlvr_jax.costs.workload import Lengths, Packing, Workload, count_packing
from rlvr_jax.models import memory
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.ops.row_attention import longest_row, row_length
from rlvr_jax.rollouts.decoder import slot_bytes
from rlvr_jax.rollouts.packing import RowLayout
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.checks import check_shapes, sampling_splits
from rlvr_jax.train.setup.programs import RowTokens, least_row_length, make_row_layout

Overrides = Mapping[str, Any]  # dotted name of a field of the configuration → value

REMATS = ("full", "dots", "none")
_GATHERS = "xla_tpu_enable_windowed_einsum_for_all_gather=false"
_FUSION = "xla_tpu_enable_async_collective_fusion"
COMPILER_OPTIONS = {  # name → `config.compiler_options.training`
  "defaults": "",
  # Weights are gathered and gradients scattered at once, not in pieces between small products.
  "whole collectives": f"{_GATHERS} xla_tpu_enable_windowed_einsum_for_reduce_scatter=false",
  "fused gathers": f"{_GATHERS} xla_enable_async_all_gather=true {_FUSION}=true"
  f" {_FUSION}_fuse_all_gather=true {_FUSION}_multiple_steps=true",
}
USABLE = 0.92  # of a chip's memory; the rest is for what the compiler does not count
_ROW_LENGTHS = (1, 1.5, 2, 3, 4, 6, 8)  # times the shortest row that is allowed
_ROWS = (1, 2, 4)  # of a micro-batch on a device
_DRAWS = 3  # batches that an estimate packs


def compiler_options(topology: str) -> list[str]:
  """The options to compare, the defaults first: alone on GPUs, since the others are for TPUs."""
  first, *others = COMPILER_OPTIONS.values()
  return [first] if is_gpu(topology) else [first, *others]


class Candidate(NamedTuple):
  """Settings, and an estimate without compilation."""

  overrides: Overrides
  seconds: Seconds
  gib: float  # of a chip's memory, without the compiler's buffers
  refresh: Refresh | None = None  # of generation


# --- updates --------------------------------------------------------------------------------------


def update_candidates(
  parts: Parts, devices: Sequence[jax.Device], lengths: Lengths, chip: Chip
) -> list[Candidate]:
  """Settings of the update, fastest first by their estimate; some are too large for the memory.

  Args:
    parts: of the recipe as it stands, on these devices.
    devices: of the slice.
    lengths: of prompts and responses.
    chip: its peaks.
  """
  found = []
  batches = [lengths.draw(parts.shape, number) for number in range(_DRAWS)]
  pack = functools.cache(lambda layout: [count_packing(batch, layout) for batch in batches])
  for mesh in _meshes(parts, devices):
    for rows, layout in _layouts(parts, mesh).items():
      for remat in REMATS:
        candidate = _estimate_update(parts, mesh, layout, pack(layout), remat, batches, chip)
        overrides: dict[str, Any] = {f"mesh.{axis}": size for axis, size in mesh.shape.items()}
        overrides |= {
          "batch.tokens_per_row": rows[0],
          "batch.tokens_per_micro_batch": rows[1],
          "model.overrides.remat": remat,
        }
        found.append(candidate._replace(overrides=overrides))
  return sorted(found, key=_rank)


def _rank(candidate: Candidate) -> tuple[float, float]:
  """The middle of the seconds, on a scale of one per cent; then memory."""
  return round(math.log(sum(candidate.seconds) / 2), 2), candidate.gib


def best_of_each_mesh(candidates: Sequence[Candidate]) -> list[Candidate]:
  """Of candidates in their order, the first of each mesh."""
  best: dict[tuple[int, ...], Candidate] = {}
  for candidate in candidates:
    mesh = tuple(candidate.overrides[f"mesh.{axis}"] for axis in sharding.AXES)
    best.setdefault(mesh, candidate)
  return list(best.values())


def _meshes(parts: Parts, devices: Sequence[jax.Device]) -> Iterator[Mesh]:
  """All meshes that split batches evenly, no key/value head, and lie along the slice's axes."""
  count = len(devices)
  for tensor in _divisors(math.gcd(count, parts.model.config.num_kv_heads)):
    for data in _divisors(count // tensor):
      fsdp = count // tensor // data
      with contextlib.suppress(ValueError):
        mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=devices)
        check_shapes(parts.config, mesh)
        yield mesh


def _divisors(number: int) -> list[int]:
  return [size for size in range(1, number + 1) if number % size == 0]


def _layouts(parts: Parts, mesh: Mesh) -> dict[tuple[int, int], RowLayout]:
  """Row layouts by (tokens per row, tokens per micro-batch); those without a row per device go."""
  shape = parts.shape
  kind = parts.model.config.attention
  least = least_row_length(kind, shape)
  lengths = {row_length(kind, int(factor * least)) for factor in _ROW_LENGTHS}
  layouts = {}
  for length in sorted(lengths):
    if length > max(longest_row(kind), min(lengths)):
      continue
    for rows in _ROWS:
      try:
        layout = make_row_layout(RowTokens(length, rows * length), shape, kind, mesh)
      except ValueError:  # fewer rows than devices
        continue
      if layout.rows_per_device == rows:
        layouts[length, rows * length] = layout
  return layouts


def _estimate_update(
  parts: Parts,
  mesh: Mesh,
  layout: RowLayout,
  packed: Sequence[Packing],
  remat: str,
  batches: Sequence[Workload],
  chip: Chip,
) -> Candidate:
  """Seconds and memory of an update by arithmetic; overrides are left empty."""
  network = dataclasses.replace(parts.model.config, remat=remat)
  data, fsdp, tensor = mesh.shape.values()
  adapters = parts.placement.state.params if parts.lora is not None else None

  def computed_flops(batch: Workload, packing: Packing) -> float:
    lengths = batch.prompts, batch.responses
    useful = update_flops(network, *lengths, predicted=batch.sampled, adapters=adapters)
    if remat == "full":
      useful += forward_flops(network, *lengths, predicted=batch.sampled)
    return useful * max(packing.places_per_token, 1.0)

  flops = float(np.mean(list(map(computed_flops, batches, packed)))) / mesh.size
  micro_batches = float(np.mean([packing.micro_batches for packing in packed]))
  tokens = layout.rows_per_device * layout.length  # of a micro-batch on a device

  count = sum(math.prod(x.shape) for x in jax.tree.leaves(parts.placement.base))
  trained = sum(math.prod(x.shape) for x in jax.tree.leaves(parts.placement.state.params))
  itemsize = np.dtype(network.compute_dtype).itemsize
  # Weights are gathered twice, gradients are reduced once, in float32.
  of_weights = (2 * itemsize * count + 4 * trained) / tensor * (1 - 1 / fsdp)
  of_gradients = 2 * 4 * trained / (fsdp * tensor) * (1 - 1 / data)
  passes = 3 if remat == "full" else 2
  of_tokens = (
    passes * 2 * 2 * network.num_layers * tokens * network.width * itemsize * (1 - 1 / tensor)
  )
  received = micro_batches * (of_weights + of_tokens) + of_gradients
  needed = flops / chip.flops, received / chip.interconnect_bytes_per_s

  bytes_of = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
  state, placement = parts.placement.state, parts.placement
  shared = bytes_of((state.params, state.opt_state, placement.frozen)) + 4 * trained * (
    2 if layout.max_micro_batches > 1 else 1
  )
  total = shared / (fsdp * tensor)
  total += memory.activation_bytes(network, tokens, tensor)
  total += memory.output_head_bytes(network, tokens, tensor)
  return Candidate({}, Seconds(max(needed), sum(needed)), total / 2**30)


# --- generation -----------------------------------------------------------------------------------


def generation_candidates(parts: Parts, lengths: Lengths, chip: Chip) -> list[Candidate]:
  """Layouts and slots of generation, fastest first; some are too large for the memory.

  Seconds are those of a refresh, see `generation_time.refresh`.

  Args:
    parts: with the mesh of updates that was chosen.
    lengths, chip: as for `update_candidates`.
  """
  network, shape, sizes = parts.model.config, parts.shape, parts.placement.mesh.shape
  batches_per_refresh = parts.schedule.batches_per_refresh(parts.config.num_updates)
  batches = [lengths.draw(shape, number) for number in range(batches_per_refresh)]
  responses = batches_per_refresh * shape.responses
  resident = memory.shard_bytes((parts.placement.state, parts.placement.frozen))
  engine = parts.programs.engine.settings
  cache, pages, cache_format = engine.shape, engine.cache == "pages", engine.cache_format
  found = []
  for tensor in _divisors(parts.placement.mesh.size):
    if not sampling_splits(network, tensor):
      continue
    groups = parts.placement.mesh.size // tensor
    if any(source.prompts % groups for source in parts.sources):
      continue
    mesh, other = parts.placement.mesh, tensor != sizes["tensor"]
    layout = (groups, 1, tensor) if other else (0, 0, 0)
    overrides = {
      f"generation_mesh.{axis}": size for axis, size in zip(sharding.AXES, layout, strict=True)
    } | {"generation_mesh.same_devices": other}
    if other:
      mesh = sharding.rearrange(mesh, data=groups, fsdp=1, tensor=tensor, field="generation_mesh")
    base = sharding.add_shardings(
      jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parts.placement.base), mesh
    )
    weights = memory.decoding_copy_bytes(base, network.compute_dtype)
    slots = -(-responses // groups) * groups
    while slots >= groups:
      on_device = slots // groups
      total = resident + weights + memory.sampling_bytes(network, on_device)
      total += on_device * slot_bytes(network, cache, tensor, cache_format, engine.cache)
      taken = refresh(
        batches,
        parts.model,
        base,
        mesh,
        cache,
        chip,
        slots=slots,
        pages=pages,
        cache_format=cache_format,
      )
      changed = {**overrides, "sampling.slots": slots}
      found.append(Candidate(changed, taken.seconds, total / 2**30, taken))
      slots = slots // 2 // groups * groups
  return sorted(found, key=lambda candidate: candidate.seconds)


def refreshes_per_update(schedule: Schedule, num_updates: int) -> float:
  """Share of the updates before which a policy may sample."""
  return float(np.mean([schedule.refreshes(update) for update in range(num_updates)]))


# --- compiled -------------------------------------------------------------------------------------


def compiled_seconds(cost: step_time.Cost, chip: Chip) -> Seconds:
  """Seconds of a compiled program.

  Computation takes the compiler's cycles, which leave out the kernels other than XLA's; of these,
  the larger of what their FLOPs and their bytes need. For GPUs, whose cycles no compiler estimates,
  it takes what the FLOPs need.

  Args:
    cost: from `step_time.cost`.
    chip: its peaks.
  """
  cycles_per_s = chip.cycles_per_s
  kernels = sum(
    max(row["flops"] / chip.flops, row["hbm_bytes"] / chip.hbm_bytes_per_s)
    for row in cost["custom_calls"]
  )
  if cycles_per_s is None:
    compute = cost["seconds"]["compute"]
  else:
    compute = cost["cycles"] / cycles_per_s + kernels
  needed = compute, cost["seconds"]["HBM"], cost["seconds"]["interconnect"]
  return Seconds(max(needed), sum(needed))


def apply_overrides(
  config: ml_collections.ConfigDict, overrides: Overrides
) -> ml_collections.ConfigDict:
  """A copy of the configuration with fields changed."""
  changed = config.copy_and_resolve_references()
  changed.update_from_flattened_dict(overrides)
  return changed


def pareto(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> list[bool]:
  """Whether no other row is at least as small in every named figure, and smaller in one."""

  def beats(other: Mapping[str, float], row: Mapping[str, float]) -> bool:
    return all(other[n] <= row[n] for n in names) and any(other[n] < row[n] for n in names)

  return [not any(beats(other, row) for other in rows) for row in rows]
