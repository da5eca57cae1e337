"""Costs of an update and of generation per chip, read from the programs that XLA compiles."""

from __future__ import annotations

import collections
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.costs import workload
from rlvr_jax.costs.chips import Chip, find_chip
from rlvr_jax.costs.hlo import COLLECTIVES, OPEN_LOOP, Item, find_loops, walk
from rlvr_jax.costs.hlo_text import CostsError, dimensions
from rlvr_jax.costs.launches import read_launches, summarize
from rlvr_jax.costs.programs import compile_with_text, memory_bytes, program_lowerings
from rlvr_jax.geometry import by_rollout
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.ops.logprobs import default_chunk_rows, wanted_chunks, wanted_loop
from rlvr_jax.ops.row_blocks import short_row
from rlvr_jax.ops.splash import SplashCost, splash_cost
from rlvr_jax.rollouts.packing import computed_rows
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts
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
Cost = dict[str, Any]  # result of `cost`

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


def report(
  parts: Parts,
  topology: str,
  workdir: str | None,
  *,
  lengths: str = "longest",
  kernels: Mapping[str, KernelCost] | None = None,
) -> dict[str, Cost]:
  """Compiles the update and the generation, prints their costs, and writes them to files.

  Generation is the last burst of the longest responses. Dialogues have a prefill after each reply.

  Args:
    parts: result of `programs.build_shapes_only` on the mesh of that topology.
    topology: kind and shape of the slice, such as "v5p:2x2x4".
    workdir: folder for costs_TOPOLOGY.json and .md; None writes nothing.
    lengths: component of `costs.workload`: lengths of the prompts and responses of an update.
    kernels: pattern of an operation's name → analytic cost of that Pallas kernel; None for those of
      attention and of experts.
  Returns:
    `cost` of each program that fits into memory, by name.
  Raises:
    CostsError: a program was not understood, see `check_counts`.
  """
  costs = {}
  counts = count(parts, lengths)
  batch = counts.batch
  for name, lower in program_lowerings(parts, counts.packed).items():
    measured = program_cost(
      name,
      lower,
      topology,
      useful_flops=counts.useful_flops[name],
      kernels=counts.kernels if kernels is None else kernels,
      loops=counts.loops,
    )
    if measured:
      costs[name] = measured
  conditions = _conditions(parts, topology) | {
    "lengths": lengths,
    "micro_batches": int(counts.packed.num_micro_batches),
    **(dialogue_conditions(parts, batch, counts.packed) if batch.turns.shape[-1] > 1 else {}),
    "too_large": sorted(counts.useful_flops.keys() - costs.keys()),
  }
  say(format_markdown(conditions, costs))
  if workdir is not None:
    write_report(parse_path("--workdir", workdir, must_be_on_disk=True), conditions, costs)
  return costs


class Counts(NamedTuple):
  """What is known of a run's programs before they are compiled."""

  batch: workload.Workload  # of an update
  packed: Packed  # the same
  useful_flops: dict[str, float]  # per chip, by program
  kernels: dict[str, KernelCost]  # by pattern of the name
  loops: dict[str, int]  # iterations, by pattern of the name


def count(parts: Parts, lengths: str) -> Counts:
  """Counts what depends on the lengths of prompts and responses.

  Args:
    parts: result of `programs.build_shapes_only`.
    lengths: component of `costs.workload`.
  """
  distribution = workload.parse_lengths(lengths, parts.config.environment)
  layout = parts.placement.row_layout
  batch = workload.typical_batch(distribution, parts.shape, layout)
  packed = workload.pack_workload(batch, parts.shape, layout)
  return Counts(
    batch,
    packed,
    useful_flops(parts, batch),
    attention_kernel_costs(parts, packed) | EXPERT_KERNEL_COSTS,
    loop_lengths(parts, packed) | head_loops(parts, packed),
  )


def program_cost(
  name: str,
  lower: Callable[[], Any],
  topology: str,
  *,
  useful_flops: float,
  kernels: Mapping[str, KernelCost] | None = None,
  loops: Mapping[str, int] | None = None,
) -> Cost | None:
  """`cost` of one of `programs.program_lowerings`; None if it does not fit into memory.

  Raises:
    CostsError: the program was not understood, see `check_counts`.
  """
  compiled = compile_with_text(name, lower)
  if compiled.program is None:
    return None
  items = apply_kernel_costs(walk(compiled.text, PARTS, loops), kernels or {})
  chip, memory = find_chip(topology), memory_bytes(compiled.program)
  found = cost(items, chip, useful_flops=useful_flops, memory=memory)
  check_counts(name, items, found)
  found["compile_seconds"] = compiled.seconds
  if compiled.thunks:
    try:
      bodies = read_launches(compiled.thunks, find_loops(compiled.text, loops))
      found["launches"] = summarize(bodies)
    except ValueError as error:  # all other costs are known
      say(f"{name}: its launches are not counted: {error}")
  return found


def write_report(
  folder: pathlib.Path, conditions: Mapping[str, Any], costs: Mapping[str, Cost]
) -> None:
  """Writes numbers as JSON and tables as Markdown, in files named after the topology."""
  folder.mkdir(parents=True, exist_ok=True)
  stem = f"costs_{conditions['topology'].replace(':', '_')}"
  numbers = json.dumps({"conditions": dict(conditions), "costs": dict(costs)}, indent=1)
  (folder / f"{stem}.json").write_text(numbers + "\n", encoding="utf-8")
  (folder / f"{stem}.md").write_text(format_markdown(conditions, costs) + "\n", encoding="utf-8")


def useful_flops(parts: Parts, batch: workload.Workload) -> dict[str, float]:
  """Model FLOPs per chip by program: an update on a batch, and the last burst of the longest.

  Of dialogues also the prefill of the longest of them, after a reply.
  """
  network, adapters = parts.model.config, None
  if parts.lora is not None:
    adapters = parts.placement.state.params
  lengths = batch.prompts, batch.responses
  found = {
    "update": update_flops(network, *lengths, predicted=batch.sampled, adapters=adapters),
    "generation": _burst_flops(parts),
  }
  engine = parts.programs.engine
  if engine.settings.has_replies:
    rows, _ = engine.longest_prefill()
    tokens = parts.shape.max_prompt_length + parts.shape.max_response_length
    found["prefill"] = forward_flops(network, [tokens] * rows, [[0]] * rows)
  return {name: flops / parts.placement.mesh.size for name, flops in found.items()}


def _burst_flops(parts: Parts) -> float:
  """FLOPs of the last burst of a generation of maximum length, over all devices."""
  settings = parts.programs.engine.settings
  network = parts.model.config
  prompts = np.full(settings.slots, parts.config.max_prompt_length)

  def flops_until(length: int) -> float:
    return forward_flops(network, prompts, np.full((settings.slots, 1), length))

  end = settings.max_new_tokens
  return flops_until(end) - flops_until(end - settings.shape.steps)


def loop_lengths(parts: Parts, packed: Packed) -> dict[str, int]:
  """Iterations of the Gram matrix's loops over rollouts and tiles, by pattern of their name."""
  shape = parts.shape
  return {
    rf"{by_rollout.ROLLOUTS}/while$": -(-shape.responses // int(packed.num_micro_batches)),
    rf"{by_rollout.TILES}/while$": by_rollout.split_into_tiles(shape.max_response_length)[1],
  }


def head_loops(parts: Parts, packed: Packed) -> dict[str, int]:
  """Iterations of the head's loops over the policy's tokens of dialogues, by pattern of their name.

  Those of the mean micro-batch, rounded up.
  """
  if not parts.config.environment.name:
    return {}
  found = {}
  chunk_rows = default_chunk_rows(parts.model.config.vocab_size)
  for places, predicted in _predicted_tokens(parts, packed):
    chunks = [wanted_chunks(places, count, chunk_rows) for count in predicted]
    found[rf"{wanted_loop(places)}/while$"] = math.ceil(np.mean(chunks))
  return found


def head_places(parts: Parts, packed: Packed) -> float:
  """Places that the head computes per token of the policy, over an update on dialogues."""
  chunk_rows = default_chunk_rows(parts.model.config.vocab_size)
  computed = 0.0
  for places, predicted in _predicted_tokens(parts, packed):
    share = places / -(-places // min(chunk_rows, places))  # tokens of a chunk
    computed += sum(share * wanted_chunks(places, count, chunk_rows) for count in predicted)
  return computed * parts.placement.row_layout.devices / float(np.sum(packed.places >= 0))


def _predicted_tokens(parts: Parts, packed: Packed) -> Iterator[tuple[int, list[int]]]:
  """Yields (places of a device, the most tokens that a device predicts in each micro-batch).

  First of the micro-batches with whole rows, then of those with short rows, if there are any.
  """
  M, R, L = packed.tokens.shape
  predicts = np.zeros(M * R * L, bool)
  predicts[packed.places[packed.places >= 0]] = True
  by_device = predicts.reshape(M, parts.placement.row_layout.devices, -1, L)
  short, count = int(packed.num_short or 0), int(packed.num_micro_batches)
  for some, length in (
    (by_device[: count - short], L),
    (by_device[count - short : count], short_row(L)),
  ):
    if len(some):
      places = some.shape[2] * length
      yield places, some[..., :length].sum((2, 3)).max(1).tolist()


def attention_kernel_costs(parts: Parts, packed: Packed) -> dict[str, KernelCost]:
  """Analytic costs of the attention kernels of the update and of generation, by name pattern.

  Without a sliding window. A call computes one row of the packed batch, counted as the mean over
  its rows, or one token of every slot.
  """
  network = parts.model.config
  tensor = parts.placement.mesh.shape["tensor"]
  paged: dict[str, KernelCost] = {"paged_attention": _paged_cost}
  if network.attention != "splash":
    return paged
  parts_of_rows = computed_rows(packed)
  costs = [
    splash_cost(
      rows,
      num_heads=network.num_heads // tensor,
      num_kv_heads=network.num_kv_heads // tensor,
      head_dim=network.head_dim,
    )
    for rows in parts_of_rows
  ]
  total = SplashCost(*map(sum, zip(*costs, strict=True)))
  num_rows = sum(len(rows.prompts) for rows in parts_of_rows)

  def mean_row_cost(flops: float, hbm_bytes: float) -> KernelCost:
    return lambda item: (flops / num_rows, hbm_bytes / num_rows)

  return paged | {
    "splash_mha_fwd": mean_row_cost(total.forward_flops, total.forward_bytes),
    "splash_mha_dkv": mean_row_cost(total.backward_flops, total.backward_bytes),
  }


def _paged_cost(item: Item) -> tuple[float, float]:
  """FLOPs and HBM bytes of one call; operands 4 and 5 of the kernel are queries and pages."""
  from rlvr_jax.ops.paged import paged_flops  # experimental in jax, so imported only on use

  return paged_flops(*map(dimensions, item.shapes[4:6])), item.hbm_bytes / item.times


def _grouped_cost(item: Item) -> tuple[float, float]:
  """FLOPs and HBM bytes of a grouped product, as if every row belonged to a group.

  The last two operands are the rows [M, D] and the kernels [E, D, F], or, of the kernels' gradient,
  the rows [M, D] and [M, F].
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


def cost(
  items: list[Item], chip: Chip, *, useful_flops: float, memory: Mapping[str, float]
) -> Cost:
  """Costs of a program per chip: sums over its instructions, JSON-serializable."""
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


def check_counts(name: str, items: Sequence[Item], found: Cost) -> None:
  """Raises if the costs of a program cannot be: its text is in a form that is not known.

  Raises:
    CostsError: a loop around layers has no length, or fewer FLOPs are executed than are useful. So
      no share of the peaks is above 100 %.
  """
  unknown = {
    loop.op_name
    for loop in items
    if loop.opcode == OPEN_LOOP
    and any(i.part == "layers" and i.op_name.startswith(f"{loop.op_name}/") for i in items)
  }
  executed, useful = found["executed_flops"], found["useful_flops"]
  if unknown:
    wrong = f"the length of {min(unknown)}, a loop around layers, was not found"
  elif executed < useful:
    wrong = f"{executed / 1e12:.4g} TFLOPs were counted, of which {useful / 1e12:.4g} are useful"
  else:
    return
  raise CostsError(
    f"the costs of the {name} are not known: {wrong}. The compiler writes this program in a form"
    " that is not read rightly; of libtpu, versions 0.0.42.1 and 0.0.50.1 are known to be"
  )


def _sum_by(items: Iterable[Item], keys: tuple[str, ...], sums: tuple[str, ...]) -> list[dict]:
  """Rows of sums, one for each combination of keys, in descending order of the first sum."""
  sums_by_key: dict[tuple, collections.Counter] = {}
  for item in items:
    row = sums_by_key.setdefault(tuple(getattr(item, key) for key in keys), collections.Counter())
    row.update({name: getattr(item, name) for name in sums})
  rows = [dict(zip(keys, key, strict=True)) | dict(row) for key, row in sums_by_key.items()]
  return sorted(rows, key=lambda row: -row[sums[0]])


# --- reports --------------------------------------------------------------------------------------


def _conditions(parts: Parts, topology: str) -> dict[str, Any]:
  config = parts.config
  devices = parts.placement.mesh.devices.flat
  return {
    "topology": topology,
    "peaks of a chip": find_chip(topology)._asdict(),
    "mesh": dict(parts.placement.mesh.shape),
    "model": config.model.checkpoint or config.model.preset,
    "layers": parts.model.config.num_layers,
    "remat": parts.model.config.remat,
    "prompts": config.batch.prompts,
    "group_size": config.batch.group_size,
    "prompt_tokens": config.max_prompt_length,
    "response_tokens": config.max_response_length,
    "jax": jax.__version__,
    "compiler": next((device.client.platform_version for device in devices[:1]), ""),
  }


def dialogue_conditions(parts: Parts, batch: workload.Workload, packed: Packed) -> dict[str, float]:
  """Means over the rollouts of a batch of dialogues, and what the head computes."""
  return {
    "turns": float(np.mean(np.sum(batch.turns[..., ::2] > 0, axis=-1))),
    "policy_tokens": float(batch.sampled.mean()),
    "environment_tokens": float((batch.responses - batch.sampled).mean()),
    "head_places_per_policy_token": head_places(parts, packed),
  }


def format_markdown(conditions: Mapping[str, Any], costs: Mapping[str, Cost]) -> str:
  """Returns the tables of a report as Markdown."""
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
    *(_dialogue_lines(c) if "turns" in c else ()),
    *_format_table([_format_summary(name, cost) for name, cost in costs.items()]),
  ]
  if c["too_large"]:
    lines += ["", f"Omitted, too large for a chip's memory: {', '.join(c['too_large'])}."]
  for name, cost in costs.items():
    lines += ["", f"## {name.capitalize()}, by part", ""]
    lines += _format_table([_format_row(row) for row in cost["parts"]])
    lines += ["", "Collectives:", ""]
    lines += _format_table(
      [_format_row(row) for row in cost["collectives"] if row["received_bytes"] >= 1e6]
    )
    if cost["custom_calls"]:
      lines += ["", "Kernels and calls other than XLA's own:", ""]
      lines += _format_table([_format_row(row) for row in cost["custom_calls"]])
    if "launches" in cost:
      lines += ["", *_launch_lines(cost["launches"])]
    if cost["loops_of_unknown_length"]:
      lines += ["", "Loops whose length depends on the data, counted as one iteration:", ""]
      lines += _format_table([_format_row(row) for row in cost["loops_of_unknown_length"]])
  return "\n".join([*lines, "", _TRUST])


def _launch_lines(launches: Mapping[str, Any]) -> list[str]:
  """Lines on what a GPU is asked to launch."""
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


def _dialogue_lines(c: Mapping[str, Any]) -> list[str]:
  return [
    f"Dialogues of {c['turns']:.2f} turns: {c['policy_tokens']:.0f} tokens of the policy and"
    f" {c['environment_tokens']:.0f} of the environment per response, in the mean. The head"
    f" computes {c['head_places_per_policy_token']:.2f} places per token of the policy. The prefill"
    " is that of the longest dialogues, after a reply.",
    "",
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


def _format_row(row: Mapping[str, Any]) -> dict[str, str]:
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
