"""Costs of an update and of generation per chip, read from the programs that XLA compiles."""

from __future__ import annotations

import collections
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from rlvr_jax.costs import workload
from rlvr_jax.costs.chips import Chip, find_chip
from rlvr_jax.costs.hlo import (
  COLLECTIVES,
  OPEN_LOOP,
  CostsError,
  Item,
  dimensions,
  find_loops,
  walk,
)
from rlvr_jax.costs.launches import read_launches, summarize
from rlvr_jax.costs.programs import Lower, compile_with_text, memory_bytes
from rlvr_jax.geometry import by_rollout
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.logprobs import default_chunk_rows, wanted_chunks, wanted_loop
from rlvr_jax.ops.row_blocks import short_row
from rlvr_jax.ops.splash import SplashCost, splash_cost
from rlvr_jax.rollouts.packing import computed_rows
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.types import Packed

# Part → pattern of `jax.named_scope`s and of parameters' names.
PARTS = {
  "layers": "layers|blocks",
  "attention": "attention",
  "head": "head|head_kernel",
  "gram": "gram",
  "optimizer": "optimizer",
  "embedding": "embedding",
}

# Kernel call → (FLOPs, HBM bytes) of one run, from the shapes of its operands.
KernelCost = Callable[[Item], tuple[float, float]]
Row = dict[str, Any]  # a row of a table: names and numbers
# The fraction of useful FLOPs that may be missing. The compiler computes products with few columns,
# such as those of gates, elementwise, and elementwise work is not counted.
_ELEMENTWISE = 0.01


class Cost(TypedDict):
  """The costs of a program per chip, as sums over its instructions; JSON-serializable."""

  useful_flops: float
  executed_flops: float
  hbm_bytes: float
  received_bytes: float
  cycles: float
  memory_bytes: dict[str, float]
  seconds: dict[str, float]  # resource → the least seconds that its peak allows
  bound_by: str
  model_flops_utilization: float  # an upper bound
  parts: list[Row]
  collectives: list[Row]
  custom_calls: list[Row]
  loops_of_unknown_length: list[Row]
  compile_seconds: NotRequired[float]
  launches: NotRequired[Row]  # GPUs only


_TRUST = """Memory and the kinds and bytes of collectives are those of the compiled program. HBM
bytes are a good estimate: operands and results of every instruction once, slices by their own size,
without fast memory. Executed FLOPs are those of matrix products only, in any precision, against the
bfloat16 peak. Cycles are the compiler's estimate, for comparison with one another only. Seconds are
roofline lower bounds from the published peaks, each resource by itself: a slice whose links do not
form a torus in all dimensions is slower. A conditional counts as its most expensive branch, and a
loop that may end early counts to its limit. Kernels other than XLA's own are listed. They count as
their operands and results once, with no FLOPs, unless an analytic count is given, as for products
of cuBLAS and cuDNN's attention. Launches of a GPU are those of XLA's list of thunks. Products were
not tuned, for which the device is needed: where a run tunes them, its kernels may differ."""


# --- what is known before programs are compiled ---------------------------------------------------


class Counts(NamedTuple):
  """FLOPs, kernel costs and loop iterations that are known before programs are compiled."""

  useful_flops: Mapping[str, float] = {}  # program → FLOPs per chip
  kernels: Mapping[str, KernelCost] = {}  # pattern of a kernel's name → its cost
  loops: Mapping[str, int] = {}  # pattern of a loop's name → its iterations


_NOTHING_KNOWN = Counts()


def count(
  batch: workload.Workload,
  packed: Packed,
  network: TransformerConfig,
  placement: Placement,
  engine: EnginePrograms,
) -> Counts:
  """The `Counts` of a run for given lengths of prompts and responses.

  Args:
    batch: lengths of an update's batch.
    packed: the same batch in rows, from `workload.pack_workload`.
    network, placement, engine: network, placement and engine of the run.
  """
  tensor = placement.mesh.shape["tensor"]
  kernels = attention_kernel_costs(network, packed, tensor) | EXPERT_KERNEL_COSTS
  flops = useful_flops(batch, network, placement, engine)
  return Counts(flops, kernels, loop_lengths(network, packed, placement, engine))


def useful_flops(
  batch: workload.Workload,
  network: TransformerConfig,
  placement: Placement,
  engine: EnginePrograms,
) -> dict[str, float]:
  """The model FLOPs per chip of each program, by the program's name.

  "update" is an update on the batch. "generation" is the last burst of tokens, as if all rollouts
  had the greatest length. With dialogues, "prefill" is the prefill of the longest dialogue after a
  reply.
  """
  lengths = batch.prompts, batch.responses
  adapters = placement.state.params if placement.frozen else None
  prompt, settings = engine.max_prompt_length, engine.settings

  def generated(tokens: int) -> float:
    return forward_flops(network, [prompt] * settings.slots, [[tokens]] * settings.slots)

  end = settings.max_new_tokens
  found = {
    "update": update_flops(network, *lengths, predicted=batch.sampled, adapters=adapters),
    "generation": generated(end) - generated(end - settings.shape.steps),
  }
  if settings.has_replies:
    rows, _ = engine.longest_prefill()
    found["prefill"] = forward_flops(network, [prompt + end] * rows, [[0]] * rows)
  return {name: flops / placement.mesh.size for name, flops in found.items()}


def loop_lengths(
  network: TransformerConfig, packed: Packed, placement: Placement, engine: EnginePrograms
) -> dict[str, int]:
  """Mean iterations of each loop whose length depends on the data, by a pattern of its name.

  The Gram matrix has loops over rollouts and over tiles. With dialogues, the output head has loops
  over the policy's tokens.
  """
  P, G, T = packed.places.shape
  micro_batches = int(packed.num_micro_batches)
  found = {
    rf"{by_rollout.ROLLOUTS}/while$": -(-P * G // micro_batches),
    rf"{by_rollout.TILES}/while$": by_rollout.split_into_tiles(T)[1],
  }
  if engine.settings.has_replies:
    layout, chunk_rows = placement.row_layout, default_chunk_rows(network.vocab_size)
    predicted = math.ceil(np.sum(packed.places >= 0) / (micro_batches * layout.devices))
    for length in (layout.length, short_row(layout.length)):
      places = layout.rows_per_device * length
      chunks = wanted_chunks(places, min(predicted, places), chunk_rows)
      found[rf"{wanted_loop(places)}/while$"] = chunks
  return found


# --- kernels --------------------------------------------------------------------------------------


def attention_kernel_costs(
  network: TransformerConfig, packed: Packed, tensor: int
) -> dict[str, KernelCost]:
  """Analytic costs of the update's and generation's attention kernels, by a pattern of their names.

  Sliding windows are ignored. In an update, a call computes one row of the packed batch; the
  call's cost is the mean over rows and layers. In generation, a call computes one token in every
  slot, which holds one response.

  Args:
    network: the network of the policy.
    packed: a batch of NumPy arrays.
    tensor: devices that share the heads.
  """
  paged: dict[str, KernelCost] = {"paged_attention": _paged_cost}
  if network.attention != "splash" or not network.heads:
    return paged
  parts = computed_rows(packed)
  of_layers = collections.Counter(network.heads)
  least = math.gcd(*of_layers.values())
  costs = [
    splash_cost(
      rows,
      num_heads=heads.queries // tensor,
      num_kv_heads=heads.keys // tensor,
      head_dim=heads.width,
    )
    for heads, layers in of_layers.items()
    for rows in parts * (layers // least)
  ]
  number = sum(len(rows.prompts) for rows in parts) * (len(network.heads) // least)
  mean = SplashCost(*(sum(figures) / number for figures in zip(*costs, strict=True)))
  return paged | {
    "splash_mha_fwd": lambda item: (mean.forward_flops, mean.forward_bytes),
    "splash_mha_dkv": lambda item: (mean.backward_flops, mean.backward_bytes),
  }


def _paged_cost(item: Item) -> tuple[float, float]:
  """FLOPs and HBM bytes of one call of the paged kernel; operands 4 and 5 are queries and pages."""
  from rlvr_jax.ops.paged import paged_flops  # experimental in jax, so imported only on use

  return paged_flops(*map(dimensions, item.shapes[4:6])), item.hbm_bytes / item.times


def _grouped_cost(item: Item) -> tuple[float, float]:
  """FLOPs and HBM bytes of a grouped product, as if every row belonged to a group.

  The last two operands are the rows [M, D] and the weights [E, D, F]; for the gradient of the
  weights, they are the rows [M, D] and [M, F].
  """
  (M, width), other = (dimensions(shape) for shape in item.shapes[-2:])
  matrix = other[1:] if len(other) == 3 else (width, other[1])
  return 2.0 * M * math.prod(matrix), item.hbm_bytes / item.times


EXPERT_KERNEL_COSTS: dict[str, KernelCost] = {r"\bt?gmm\b": _grouped_cost}


def apply_kernel_costs(items: Iterable[Item], kernels: Mapping[str, KernelCost]) -> list[Item]:
  """Returns the items, with analytic costs for the Pallas kernels that `kernels` names."""

  def apply(item: Item) -> Item:
    kernel_costs = [count for name, count in kernels.items() if re.search(name, item.op_name)]
    if not item.target or not kernel_costs:
      return item
    flops, hbm_bytes = kernel_costs[0](item)
    return item._replace(flops=flops * item.times, hbm_bytes=hbm_bytes * item.times)

  return [apply(item) for item in items]


# --- costs of a program ---------------------------------------------------------------------------


def program_cost(
  name: str,
  lower: Lower,
  topology: str,
  counts: Counts = _NOTHING_KNOWN,
) -> Cost | None:
  """The costs of a program that is compiled for a slice; None if it does not fit into memory.

  Args:
    name, lower: an item of `programs.program_lowerings`.
    topology: kind and shape of the slice, such as "v5p:2x2x4".
    counts: the result of `count`.
  Raises:
    CostsError: the compiler's text of the program has a form that this package misreads.
  """
  compiled = compile_with_text(name, lower)
  if compiled.program is None:
    return None
  items = apply_kernel_costs(walk(compiled.text, PARTS, counts.loops), counts.kernels)
  useful_flops = counts.useful_flops.get(name, 0.0)
  chip, memory = find_chip(topology), memory_bytes(compiled.program)
  found = cost(items, chip, useful_flops=useful_flops, memory=memory)
  if found["executed_flops"] < (1 - _ELEMENTWISE) * useful_flops:
    raise CostsError(
      f"the costs of the {name} are not known: {found['executed_flops'] / 1e12:.4g} TFLOPs were"
      f" counted, but the model needs {useful_flops / 1e12:.4g}. The compiler writes this program"
      " in a form that rlvr_jax misreads; libtpu 0.0.42.1 and 0.0.50.1 are known to work"
    )
  found["compile_seconds"] = compiled.seconds
  if compiled.thunks:
    try:
      bodies = read_launches(compiled.thunks, find_loops(compiled.text, counts.loops))
      found["launches"] = summarize(bodies)
    except ValueError as error:  # all other costs are known
      say(f"{name}: its launches are not counted: {error}")
  return found


def cost(
  items: list[Item], chip: Chip, *, useful_flops: float, memory: Mapping[str, float]
) -> Cost:
  """Sums over the instructions of a program, per chip."""
  flops = sum(item.flops for item in items)
  hbm_bytes = sum(item.hbm_bytes for item in items)
  received_bytes = sum(item.received_bytes for item in items)
  seconds = {
    "compute": flops / chip.flops,
    "HBM": hbm_bytes / chip.hbm_bytes_per_s,
    "interconnect": received_bytes / chip.interconnect_bytes_per_s,
  }
  longest = max(seconds, key=lambda name: seconds[name])
  sum_by_part = functools.partial(_sum_by, items, ("part",))
  collectives = [item for item in items if item.opcode in COLLECTIVES or item.received_bytes]
  custom_calls = [item for item in items if item.target]
  open_loops = [item for item in items if item.opcode == OPEN_LOOP]
  return {
    "useful_flops": useful_flops,
    "executed_flops": flops,
    "hbm_bytes": hbm_bytes,
    "received_bytes": received_bytes,
    "cycles": sum(item.cycles for item in items),
    "memory_bytes": dict(memory),
    "seconds": seconds,
    "bound_by": longest,
    "model_flops_utilization": useful_flops / (chip.flops * seconds[longest]),
    "parts": sum_by_part(("flops", "hbm_bytes", "received_bytes", "cycles")),
    "collectives": _sum_by(collectives, ("part", "opcode", "dtype"), ("received_bytes", "times")),
    "custom_calls": _sum_by(custom_calls, ("part", "target"), ("flops", "hbm_bytes", "times")),
    "loops_of_unknown_length": _sum_by(open_loops, ("part", "op_name"), ("times",)),
  }


def _sum_by(items: Iterable[Item], keys: tuple[str, ...], sums: tuple[str, ...]) -> list[Row]:
  """Rows of sums, one for each combination of keys, in descending order of the first sum."""
  sums_by_key: dict[tuple, collections.Counter] = {}
  for item in items:
    row = sums_by_key.setdefault(tuple(getattr(item, key) for key in keys), collections.Counter())
    row.update({name: getattr(item, name) for name in sums})
  rows = [dict(zip(keys, key, strict=True)) | dict(row) for key, row in sums_by_key.items()]
  return sorted(rows, key=lambda row: -row[sums[0]])


# --- reports --------------------------------------------------------------------------------------


def write_report(
  folder: pathlib.Path, conditions: Mapping[str, Any], costs: Mapping[str, Cost]
) -> None:
  """Writes numbers as JSON and tables as Markdown, in files named after the topology."""
  folder.mkdir(parents=True, exist_ok=True)
  stem = f"costs_{conditions['topology'].replace(':', '_')}"
  numbers = json.dumps({"conditions": dict(conditions), "costs": dict(costs)}, indent=1)
  (folder / f"{stem}.json").write_text(numbers + "\n", encoding="utf-8")
  (folder / f"{stem}.md").write_text(format_markdown(conditions, costs) + "\n", encoding="utf-8")


def format_markdown(conditions: Mapping[str, Any], costs: Mapping[str, Cost]) -> str:
  """The tables of a report as Markdown."""
  c = conditions
  mesh = ", ".join(f"{axis} {size}" for axis, size in c["mesh"].items())
  lines = [
    f"# {c['model']} on {c['topology']}, per chip",
    "",
    f"{c['prompts']} prompts of {c['prompt_tokens']} tokens, each with {c['group_size']} responses"
    f" of {c['response_tokens']} tokens at most; their lengths: {c['lengths']}. Mesh {mesh};"
    f" {c['micro_batches']} micro-batches; remat {c['remat']}; {c['layers']} layers;"
    f" jax {c['jax']}.",
    "",
    *_format_table([_format_summary(name, cost) for name, cost in costs.items()]),
  ]
  if c["too_large"]:
    lines += ["", f"Omitted, too large for a chip's memory: {', '.join(c['too_large'])}."]
  for name, cost in costs.items():
    large = [row for row in cost["collectives"] if row["received_bytes"] >= 1e6]
    lines += ["", f"## {name.capitalize()}, by part", "", *_format_rows(cost["parts"])]
    lines += ["", "Collectives:", "", *_format_rows(large)]
    if calls := cost["custom_calls"]:
      lines += ["", "Kernels and calls other than XLA's own:", "", *_format_rows(calls)]
    if "launches" in cost:
      lines += ["", *_launch_lines(cost["launches"])]
    if loops := cost["loops_of_unknown_length"]:
      lines += ["", "Loops whose length depends on the data, counted as one iteration:", ""]
      lines += _format_rows(loops)
  return "\n".join([*lines, "", _TRUST])


def _launch_lines(launches: Mapping[str, Any]) -> list[str]:
  """Lines of text on a program's launches on a GPU."""
  rows = [
    {
      "depth of loops": str(body["depth"]),
      "iterations": "as the data say" if (n := body["iterations"]) is None else str(n),
      "host asks for each": "yes" if body["waits"] else "no",
      "kernels": str(body["kernels"]),
      "launches outside command buffers": str(body["launches"]),
      "command buffers": str(body["command_buffers"]),
      "copies to the host": str(body["copies_to_host"]),
    }
    for body in launches["bodies"]
  ]
  return [
    f"Launches: {launches['launches']:,} of {launches['kernels']:,} kernels. Each iteration of the"
    " program (depth 0) and of its loops, in the order in which they begin, launches:",
    "",
    *_format_table(rows),
  ]


def _format_summary(name: str, cost: Cost) -> dict[str, str]:
  gib = sum(cost["memory_bytes"].values()) / 2**30
  return {
    "program": name,
    "useful TFLOPs": f"{cost['useful_flops'] / 1e12:.4g}",
    "executed TFLOPs": f"{cost['executed_flops'] / 1e12:.4g}",
    "HBM GB": f"{cost['hbm_bytes'] / 1e9:.4g}",
    "received GB": f"{cost['received_bytes'] / 1e9:.4g}",
    "memory GiB": f"{gib:.1f}",
    **({"compiled in s": f"{s:.0f}"} if (s := cost.get("compile_seconds")) is not None else {}),
    **{f"{resource}, s": f"{seconds:.3g}" for resource, seconds in cost["seconds"].items()},
    "bound by": cost["bound_by"],
    "MFU at most": f"{100 * cost['model_flops_utilization']:.1f} %",
  }


_COLUMNS = {  # key of a row → (heading, unit)
  "flops": ("executed TFLOPs", 1e12),
  "hbm_bytes": ("HBM GB", 1e9),
  "received_bytes": ("received GB", 1e9),
  "cycles": ("cycles, 10⁹", 1e9),
  "opcode": ("kind", None),
  "times": ("runs", None),
  "op_name": ("operation", None),
}


def _format_rows(rows: Iterable[Row]) -> list[str]:
  """The lines of a table of sums, in units for readers."""
  return _format_table([_format_row(row) for row in rows])


def _format_row(row: Row) -> dict[str, str]:
  formatted = {}
  for key, value in row.items():
    heading, unit = _COLUMNS.get(key, (key, None))
    formatted[heading] = str(value) if unit is None else f"{value / unit:.4g}"
  return formatted


def _format_table(rows: list[dict[str, str]]) -> list[str]:
  if not rows:
    return ["none"]
  lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
  return ["| " + " | ".join(line) + " |" for line in lines]
