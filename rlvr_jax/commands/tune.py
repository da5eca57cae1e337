"""The command `tune`: settings of a run for a slice, found by compiling its programs.

Arithmetic ranks every combination of mesh, row length, micro-batch and remat for an update. The
best setting of each of the best meshes is compiled. The fastest of these settings is then compiled
with other compiler options, and with other row lengths and micro-batches. For the fastest update,
arithmetic ranks layouts of generation and numbers of slots. `tune` takes the best of these settings
whose compiled program fits into memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import heapq
import inspect
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh

from rlvr_jax.commands import ahead_of_time
from rlvr_jax.costs import hlo, memory, programs, report, workload
from rlvr_jax.costs.chips import Chip, find_chip
from rlvr_jax.costs.gpus import is_gpu
from rlvr_jax.costs.hlo import CostsError
from rlvr_jax.costs.report import Cost
from rlvr_jax.costs.workload import Lengths, Packing, Workload, count_packing
from rlvr_jax.evaluate.compare import markdown_table
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.models.memory import decoding_copy_bytes, shard_bytes
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.row_attention import longest_row, row_length
from rlvr_jax.rollouts.decoder import Settings, state_bytes, token_bytes
from rlvr_jax.rollouts.packing import RowLayout
from rlvr_jax.storage.files import replace_file
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.reporting.progress import duration, say
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.checks import check_shapes, sampling_splits
from rlvr_jax.train.setup.programs import RowTokens, least_row_length, make_row_layout
from rlvr_jax.types import BatchShape, Params

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
_USABLE = 0.92  # usable share of a chip's memory; the compiler does not count the rest
_ROW_LENGTHS = (1, 1.5, 2, 3, 4, 6, 8)  # row lengths, as multiples of the shortest allowed row
_ROWS = (1, 2, 4)  # numbers of rows of a micro-batch on a device
_DRAWS = 3  # batches that an estimate packs
_MAX_MESHES = 5  # meshes for which updates are compiled
_MAX_ROWS = 2  # other rows and micro-batches that are compiled for the fastest mesh
_COMPILE_S = 240  # seconds to compile a program of a 7B network on two cores
_GIB = 2**30

_TRUST = """Seconds are a range. Its lower end is the largest of three times, for computation, HBM
and links, as if they overlapped; its upper end is their sum. Computation is the time of the
compiler's cycles, and for kernels other than XLA's the time at the published peaks. On GPUs, for
which no compiler estimates cycles, it is the time of the products' FLOPs at the published peaks.
Generation is estimated from the weights and caches that each step reads. Waits for graders and
environments, checkpoints, the scores of a reference policy, further draws of dynamic sampling and
the time of the host are left out."""


class Seconds(NamedTuple):
  """Bounds on the seconds of a program, from the peak rates of a chip."""

  overlapped: float  # lower bound: computation, HBM and links at the same time
  in_turn: float  # upper bound: one after the other


class Candidate(NamedTuple):
  """Settings of a program, with an estimate made without compilation."""

  overrides: Overrides
  seconds: Seconds
  gib: float  # GiB of a chip's memory, without the compiler's buffers


class Measured(NamedTuple):
  """Settings of a program, with the costs of the compiled program."""

  overrides: Overrides
  seconds: Seconds  # seconds of an update, or of the generation of a refresh
  gib: float  # GiB of a chip's memory
  cost: Cost


class Target(NamedTuple):
  """The recipe and the slice of a search."""

  config: ml_collections.ConfigDict
  topology: str  # kind and shape of the slice
  lengths: str  # component of `costs.workload`
  folder: pathlib.Path  # folder that keeps the costs of compiled programs

  @property
  def chip(self) -> Chip:
    return find_chip(self.topology)

  def fits(self, gib: float) -> bool:
    """Whether a program that needs `gib` GiB of each chip fits into the usable memory."""
    return gib <= _USABLE * self.chip.hbm_gib

  def build(self, overrides: Overrides) -> Parts:
    return programs.build_for(apply_overrides(self.config, overrides), self.topology)

  def too_large(self, what: str) -> CostsError:
    return CostsError(
      f"--topology={self.topology}: no {what} fits into {self.chip.hbm_gib:.4g} GiB per chip;"
      " choose a larger slice, or lower config.max_response_length"
    )


def apply_overrides(
  config: ml_collections.ConfigDict, overrides: Overrides
) -> ml_collections.ConfigDict:
  """A copy of the configuration with fields changed."""
  changed = config.copy_and_resolve_references()
  changed.update_from_flattened_dict(overrides)
  return changed


def tune(
  config: ml_collections.ConfigDict, topology: str, workdir: pathlib.Path, *, lengths: str
) -> Overrides:
  """Finds fast settings for a slice, prints how they compare, and writes them to the workdir.

  Costs of compiled programs are kept in the workdir, so that the same command continues a search
  that was stopped.

  Args:
    config: the recipe.
    topology: the slice, such as "v5p:2x2x4".
    workdir: folder for tune_TOPOLOGY.json and .md.
    lengths: the distribution of prompt and response lengths, see `workload.parse_lengths`.
  Returns:
    The fastest settings by dotted name of the field.
  Raises:
    CostsError: no setting fits into the memory of a chip.
  """
  options = compiler_options(topology)
  count = _MAX_MESHES + len(options) - 1 + _MAX_ROWS + 1
  say(
    f"compiles about {count} programs for {topology}; with 7B parameters and two cores that takes"
    f" {duration(count * _COMPILE_S)}; the same command continues a search that was stopped"
  )
  target = Target(config, topology, lengths, workdir / "compiled")
  target.folder.mkdir(parents=True, exist_ok=True)
  distribution = workload.parse_lengths(lengths, config.environment)

  run = target.build({})
  network, compiler = run.model.config, run.placement.mesh.devices.flat[0].client.platform_version
  rows = update_candidates(config, network, run.shape, run.placement, distribution, target.chip)
  updates = _compile_updates(target, [c for c in rows if target.fits(c.gib)], options)
  if not updates:
    raise target.too_large("setting of the update")
  update = updates[0]
  run = target.build(update.overrides)
  number = run.schedule.batches_per_refresh(run.config.num_updates)
  batches = [distribution.draw(run.shape, index) for index in range(number)]
  prompts = [source.prompts for source in run.sources]
  layouts = generation_candidates(
    run.model.config, batches, prompts, run.placement, run.programs.engine.settings, target.chip
  )
  resident = shard_bytes(run.placement.state.opt_state) / _GIB
  generation = _compile_generation(target, update.overrides, layouts, resident)

  updates_of_run = range(run.config.num_updates)
  refreshes = float(np.mean([run.schedule.refreshes(update) for update in updates_of_run]))
  step = Seconds(
    update.seconds.overlapped + refreshes * generation.seconds.overlapped,
    update.seconds.in_turn + refreshes * generation.seconds.in_turn,
  )
  overrides = {**update.overrides, **generation.overrides}
  text = "\n".join([
    f"# {config.model.preset} on {topology}, lengths {lengths}",
    "",
    f"A step takes {step.overlapped:.3g} to {step.in_turn:.3g} s with",
    "",
    *(f"    --config.{name}={value!r}" for name, value in overrides.items()),
    "",
    f"Updates. {sum(not target.fits(c.gib) for c in rows)} of {len(rows)} settings need too much"
    " memory by estimate. Of the others the best were compiled:",
    "",
    _table(updates),
    "",
    "Generation of a refresh, by estimate the fastest that fits when compiled:",
    "",
    _table([generation]),
    "",
    _TRUST,
  ])  # fmt: skip
  say(text)
  result = {
    "topology": topology,
    "lengths": lengths,
    "overrides": overrides,
    "step_seconds": step._asdict(),
    "jax": jax.__version__,
    "compiler": compiler,
  }
  stem = f"tune_{topology.replace(':', '_')}"
  for name, content in ((f"{stem}.json", json.dumps(result, indent=1)), (f"{stem}.md", text)):
    with replace_file(workdir / name) as file:
      file.write((content + "\n").encode())
  return overrides


def compiler_options(topology: str) -> list[str]:
  """The compiler options that `tune` compares, the defaults first; on GPUs only the defaults."""
  first, *others = COMPILER_OPTIONS.values()
  return [first] if is_gpu(topology) else [first, *others]


# --- updates --------------------------------------------------------------------------------------


def update_candidates(
  config: ml_collections.ConfigDict,
  network: TransformerConfig,
  shape: BatchShape,
  placement: Placement,
  lengths: Lengths,
  chip: Chip,
) -> list[Candidate]:
  """Settings of the update, fastest first by estimate; some do not fit into the memory.

  Args:
    config, network, shape, placement: configuration, network, shape and placement of the unchanged
      recipe, on the devices of the slice.
    lengths: the lengths of prompts and responses.
    chip: the chip, with its peaks.
  """
  found = []
  batches = [lengths.draw(shape, number) for number in range(_DRAWS)]
  pack = functools.cache(lambda layout: [count_packing(batch, layout) for batch in batches])
  for mesh in _meshes(config, network, placement):
    state, frozen = _place((placement.state, placement.frozen), mesh)
    for tokens, layout in _layouts(network.attention, shape, mesh):
      for remat in REMATS:
        changed = dataclasses.replace(network, remat=remat)
        table = memory.update_bytes(changed, layout, mesh.shape["tensor"], state, frozen)
        seconds = _update_seconds(changed, batches, pack(layout), placement, mesh, layout, chip)
        overrides = {
          **{f"mesh.{axis}": size for axis, size in mesh.shape.items()},
          **tokens,
          "model.overrides.remat": remat,
        }
        found.append(Candidate(overrides, seconds, sum(table.values()) / _GIB))
  # Sorted by the middle of the seconds, rounded to one per cent, then by memory.
  return sorted(found, key=lambda c: (round(math.log(sum(c.seconds) / 2), 2), c.gib))


def _meshes(
  config: ml_collections.ConfigDict, network: TransformerConfig, placement: Placement
) -> Iterator[Mesh]:
  """Yields meshes that fit the slice's axes, split batches evenly, and split no key/value head."""
  devices = list(placement.mesh.devices.flat)
  for tensor in _divisors(math.gcd(len(devices), network.split_heads)):
    for data in _divisors(len(devices) // tensor):
      fsdp = len(devices) // tensor // data
      with contextlib.suppress(ValueError):
        mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=devices)
        check_shapes(config, mesh)
        yield mesh


def _divisors(number: int) -> list[int]:
  return [size for size in range(1, number + 1) if number % size == 0]


def _place(tree: Any, mesh: Mesh) -> Any:
  """The shapes of a tree, with shardings on another mesh."""
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  return sharding.add_shardings(shapes, mesh)


def _layouts(kind: str, shape: BatchShape, mesh: Mesh) -> list[tuple[Overrides, RowLayout]]:
  """Pairs (fields, row layout) for each row length and number of rows that suits the mesh."""
  least = least_row_length(kind, shape)
  lengths = {row_length(kind, int(factor * least)) for factor in _ROW_LENGTHS}
  layouts: list[tuple[Overrides, RowLayout]] = []
  for length in sorted(lengths):
    if length > max(longest_row(kind), min(lengths)):
      continue
    for rows in _ROWS:
      try:
        layout = make_row_layout(RowTokens(length, rows * length), shape, kind, mesh)
      except ValueError:  # fewer rows than devices
        continue
      if layout.rows_per_device == rows:
        fields = ("batch.tokens_per_row", length), ("batch.tokens_per_micro_batch", rows * length)
        layouts.append((dict(fields), layout))
  return layouts


def _update_seconds(
  network: TransformerConfig,
  batches: Sequence[Workload],
  packings: Sequence[Packing],
  placement: Placement,
  mesh: Mesh,
  layout: RowLayout,
  chip: Chip,
) -> Seconds:
  """Seconds of an update, from its FLOPs, padding and recomputation included, and its traffic."""
  data, fsdp, tensor = mesh.shape.values()
  adapters = placement.state.params if placement.frozen else None
  flops = 0.0
  for batch, packing in zip(batches, packings, strict=True):
    lengths = batch.prompts, batch.responses
    useful = update_flops(network, *lengths, predicted=batch.sampled, adapters=adapters)
    if network.remat == "full":
      useful += forward_flops(network, *lengths, predicted=batch.sampled)
    flops += useful * max(packing.places_per_token, 1.0) / mesh.size / len(batches)

  count, trained = (
    sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
    for tree in (placement.base, placement.state.params)
  )
  itemsize = np.dtype(network.compute_dtype).itemsize
  # Weights are gathered twice; gradients are reduced once, in float32.
  of_weights = (2 * itemsize * count + 4 * trained) / tensor * (1 - 1 / fsdp)
  of_gradients = 2 * 4 * trained / (fsdp * tensor) * (1 - 1 / data)
  passes = 3 if network.remat == "full" else 2
  tokens = layout.device_places  # token positions of a micro-batch on a device
  of_tokens = passes * 4 * network.num_layers * tokens * network.width * itemsize * (1 - 1 / tensor)
  micro_batches = float(np.mean([packing.micro_batches for packing in packings]))
  received = micro_batches * (of_weights + of_tokens) + of_gradients
  needed = flops / chip.flops, received / chip.interconnect_bytes_per_s
  return Seconds(max(needed), sum(needed))


def _compile_updates(
  target: Target, candidates: Sequence[Candidate], options: Sequence[str]
) -> list[Measured]:
  """Compiles the best setting of each mesh, then the fastest with other options and other rows.

  Args:
    target: the target of the search.
    candidates: the candidates that fit by estimate, fastest first.
    options: the options of the compiler, the defaults first.
  Returns:
    The programs that fit, fastest first.
  """
  measured: list[Measured] = []

  def measure(overrides: Overrides, options: str) -> None:
    overrides = {**overrides, "compiler_options.training": options}
    cost = _compile(target, overrides, "update")
    if cost is not None and target.fits(gib := _gib(cost)):
      measured.append(Measured(overrides, compiled_seconds(cost, target.chip), gib, cost))
      measured.sort(key=lambda program: program.seconds)

  meshes: dict[tuple[int, ...], Candidate] = {}
  for candidate in candidates:
    sizes = tuple(candidate.overrides[f"mesh.{axis}"] for axis in sharding.AXES)
    meshes.setdefault(sizes, candidate)
  for candidate in list(meshes.values())[:_MAX_MESHES]:
    measure(candidate.overrides, options[0])
  if not measured:
    return []
  fastest = measured[0].overrides
  for other in options[1:]:
    measure(fastest, other)
  fastest = measured[0].overrides
  rows = {"batch.tokens_per_row", "batch.tokens_per_micro_batch"}
  differing = lambda c: {name for name, value in c.overrides.items() if fastest[name] != value}
  for candidate in [c for c in candidates if differing(c) and differing(c) <= rows][:_MAX_ROWS]:
    measure(candidate.overrides, fastest["compiler_options.training"])
  return measured


def compiled_seconds(cost: Cost, chip: Chip) -> Seconds:
  """Bounds on the seconds of a compiled program.

  The time of computation is the time of the cycles that the compiler estimates. These cycles omit
  custom kernels, which XLA does not generate. Each custom kernel adds the time of its FLOPs or of
  its bytes, whichever is longer. For GPUs no compiler estimates cycles; on GPUs, the time of
  computation is the time of the FLOPs.
  """
  compute = cost["seconds"]["compute"]
  if chip.cycles_per_s is not None:
    kernels = sum(
      max(row["flops"] / chip.flops, row["hbm_bytes"] / chip.hbm_bytes_per_s)
      for row in cost["custom_calls"]
    )
    compute = cost["cycles"] / chip.cycles_per_s + kernels
  needed = compute, cost["seconds"]["HBM"], cost["seconds"]["interconnect"]
  return Seconds(max(needed), sum(needed))


# --- generation -----------------------------------------------------------------------------------


def generation_candidates(
  network: TransformerConfig,
  batches: Sequence[Workload],
  prompts: Sequence[int],
  placement: Placement,
  settings: Settings,
  chip: Chip,
) -> list[Candidate]:
  """Layouts and slots of generation, fastest first; some do not fit into the memory.

  Args:
    network: the network of the policy.
    batches: lengths of all batches of a refresh, which are sampled with one policy.
    prompts: number of prompts of a batch, for each source of its groups.
    placement: the placement with the chosen mesh of updates.
    settings: the settings of the engine.
    chip: the chip, with its peaks.
  """
  mesh = placement.mesh
  resident = sum(memory.trained_bytes(placement.state, placement.frozen).values())
  found = []
  for tensor in _divisors(mesh.size):
    groups = mesh.size // tensor
    if not sampling_splits(network, tensor) or any(number % groups for number in prompts):
      continue
    generating, overrides = mesh, {f"generation_mesh.{axis}": 0 for axis in sharding.AXES}
    if tensor != mesh.shape["tensor"]:
      sizes = dict(data=groups, fsdp=1, tensor=tensor)
      generating = sharding.rearrange(mesh, **sizes, field="generation_mesh")
      overrides = {f"generation_mesh.{axis}": size for axis, size in sizes.items()}
    overrides["generation_mesh.same_devices"] = generating is not mesh
    base = _place(placement.base, generating)
    slots = -(-sum(batch.responses.size for batch in batches) // groups) * groups
    while slots >= groups:
      table = memory.generation_bytes(network, settings, base, generating, slots)
      seconds = generation_seconds(network, batches, base, generating, settings, slots, chip)
      total = (resident + sum(table.values())) / _GIB
      found.append(Candidate({**overrides, "sampling.slots": slots}, seconds, total))
      slots = slots // 2 // groups * groups
  return sorted(found, key=lambda candidate: candidate.seconds)


def generation_seconds(
  network: TransformerConfig,
  batches: Sequence[Workload],
  base: Params,
  mesh: Mesh,
  settings: Settings,
  slots: int,
  chip: Chip,
) -> Seconds:
  """Seconds of sampling all responses of a refresh, with its weight sync and its prefills.

  Every step computes all slots, idle slots included. A step reads the weights and the caches, and
  reads and writes the states of gated DeltaNets. With `settings.cache` "pages", a step reads the
  mean number of cached tokens; otherwise a step reads the caches' full length. The time of the host
  and of environments is not counted.

  Args:
    network, batches, settings, chip: as for `generation_candidates`.
    base: shapes of all parameters, with shardings on `mesh`.
    mesh: the mesh for generation.
    slots: number of slots on all devices of the mesh.
  """
  tensor, devices = mesh.shape["tensor"], mesh.shape["data"] * mesh.shape["fsdp"]
  on_device = -(-slots // devices)
  ends = [0] * slots  # the step after which each slot is free
  read = prefilled = 0.0  # cached tokens read in all steps; FLOPs of prefills
  for batch in batches:
    for tokens in batch.sampled.ravel():
      heapq.heapreplace(ends, ends[0] + int(tokens))
    read += float(np.sum(batch.sampled * (batch.prompts[:, None] + batch.responses / 2)))
    contexts = batch.prompts[:, None, None] + np.cumsum(batch.turns, axis=-1)[..., 1::2]
    rebuilt = contexts[batch.turns[..., 1::2] > 0]  # the cache is computed again after a reply
    caches = np.concatenate([batch.prompts, rebuilt])
    prefilled += forward_flops(network, caches, np.zeros((len(caches), 1), np.int64))
  steps = max(ends)
  tokens = on_device * settings.shape.tokens
  if settings.cache == "pages":  # the kernel reads only the cached tokens of each slot
    tokens = read / steps / devices
  unread = () if network.tied_head else ("embedding",)  # a tied head reads the embedding
  weights = {name: leaf for name, leaf in base.items() if name not in unread}
  # Bytes of activations that are summed over `tensor`, after attention and MLP of each layer.
  summed = 4 * network.num_layers * network.width * np.dtype(network.compute_dtype).itemsize
  needed = (
    on_device * forward_flops(network, [1], [[1]]) / tensor / chip.flops,
    (
      decoding_copy_bytes(weights, network.compute_dtype)
      + tokens * token_bytes(network, tensor, settings.cache_format)
      + 2 * on_device * state_bytes(network, tensor)
    )
    / chip.hbm_bytes_per_s,
    on_device * summed * (1 - 1 / tensor) / chip.interconnect_bytes_per_s,
  )
  sync = decoding_copy_bytes(base, network.compute_dtype) / chip.interconnect_bytes_per_s
  before = sync + prefilled / mesh.size / chip.flops
  return Seconds(steps * max(needed) + before, steps * sum(needed) + before)


def _compile_generation(
  target: Target, update: Overrides, candidates: Sequence[Candidate], resident: float
) -> Measured:
  """The first candidate that fits beside the trainer, with its estimated seconds.

  Args:
    target: the target of the search.
    update: the settings of updates that were chosen.
    candidates: candidates for generation, fastest first.
    resident: GiB of the optimizer's state, which stays in memory during generation.
  Raises:
    CostsError: no candidate fits.
  """
  for candidate in candidates:
    if target.fits(candidate.gib):
      cost = _compile(target, {**update, **candidate.overrides}, "generation")
      if cost is not None and target.fits(gib := _gib(cost) + resident):
        return Measured(candidate.overrides, candidate.seconds, gib, cost)
  raise target.too_large("layout of generation")


# --- compilation and output -----------------------------------------------------------------------


def _compile(target: Target, overrides: Overrides, name: str) -> Cost | None:
  """Costs of a program, from the workdir if it was compiled before; None if it is too large."""
  run = target.build(overrides)
  packed, counts = ahead_of_time.count(run, target.lengths)
  lowered = ahead_of_time.lowerings(run, packed)[name]()
  compiler = run.placement.mesh.devices.flat[0].client.platform_version
  counting = [inspect.getsource(module) for module in (hlo, report)]
  conditions = (target.topology, target.lengths, run.compiler_options, jax.__version__, compiler)
  made_of = repr((lowered.as_text(), conditions, counting))
  digest = hashlib.sha256(made_of.encode()).hexdigest()
  path = target.folder / f"{digest[:24]}.json"
  if not path.exists():
    cost = report.program_cost(name, lambda: lowered, target.topology, counts)
    with replace_file(path) as file:
      file.write((json.dumps(cost) + "\n").encode())
  return json.loads(path.read_text(encoding="utf-8"))


def _gib(cost: Cost) -> float:
  return sum(cost["memory_bytes"].values()) / _GIB


def _table(measured: Sequence[Measured]) -> str:
  """A table of the costs of compiled programs, with a row for each."""
  rows = {
    _describe(overrides): [
      f"{seconds.overlapped:.3g} to {seconds.in_turn:.3g}",
      f"{cost['cycles'] / 1e9:.3g}" if cost["cycles"] else "–",
      f"{100 * cost['model_flops_utilization']:.1f} %",
      f"{gib:.1f}",
      f"{cost['received_bytes'] / 1e9:,.3g}",
      f"{cost['hbm_bytes'] / 1e12:.3g}",
    ]
    for overrides, seconds, gib, cost in measured
  }
  header = ["s", "cycles, 10⁹", "MFU at most", "GiB", "received GB", "HBM TB"]
  return markdown_table(header, rows, "settings")


def _describe(overrides: Overrides) -> str:
  """The settings in short, such as "fsdp 16, remat dots"."""
  options = {text: name for name, text in COMPILER_OPTIONS.items()}
  values = {name.rpartition(".")[2]: value for name, value in overrides.items()}
  if "training" in values:
    values["compiler"] = options[values.pop("training")]
  return ", ".join(f"{name} {value}" for name, value in values.items())
