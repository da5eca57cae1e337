"""Costs of an update and of generation on every chip, read from the programs that XLA compiles."""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from rlvr_jax.costs.chips import Chip, chip_of
from rlvr_jax.costs.hlo import COLLECTIVES, OPEN_LOOP, Item, walk
from rlvr_jax.costs.hlo_text import dimensions
from rlvr_jax.costs.programs import (
  compiled_with_text,
  memory,
  packed_at_full_length,
  programs,
)
from rlvr_jax.geometry import by_rollout
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.ops.splash import splash_cost
from rlvr_jax.storage.places import place
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts

# Patterns of `jax.named_scope`s (network, head, Gram matrix, step) and of parameters' names.
PARTS = {
  "layers": "layers|blocks",
  "attention": "attention",
  "head": "head|head_kernel",
  "gram": "gram",
  "optimizer": "optimizer",
  "embedding": "embedding",
}

# (FLOPs, HBM bytes) of one run of a Pallas kernel, from the shapes of its operands.
KernelCost = Callable[[Item], tuple[float, float]]
Cost = dict[str, Any]  # see `cost`

_TRUST = """Memory, kinds and bytes of collectives are what the compiled program says. HBM bytes are
good: operands and results of every instruction once, slices by what is cut out, without fast
memory. Executed FLOPs are those of matrix products alone, of any precision, against the peak of
bfloat16. Cycles are the compiler's estimate, to compare with one another only. Seconds are what the
published peaks allow, each by itself: a slice whose links do not close to a torus in all dimensions
is slower. Of a conditional the most expensive branch counts, and a loop that may end early counts
to its limit. Kernels that are not XLA's own are listed. They count as their operands and results
once, and no FLOPs, unless an analytic count is given."""


def report(
  parts: Parts,
  topology: str,
  workdir: str | None,
  kernels: Mapping[str, KernelCost] | None = None,
) -> dict[str, Cost]:
  """Compiles the update and the generation, prints their costs, and writes them to files.

  Args:
    parts: from `programs.shapes_only`, on the mesh of that topology.
    topology: kind and shape of the slice, such as "v5p:2x2x4".
    workdir: folder for costs_TOPOLOGY.json and .md; None writes nothing.
    kernels: pattern of an operation's name → analytic count of the Pallas kernel it names; None:
      those of attention.
  Returns:
    `cost` of each program that the compiler has memory for, by its name.
  """
  costs, useful = {}, useful_flops(parts)
  kernels = attention_kernels(parts) if kernels is None else kernels
  for name, lower in programs(parts).items():
    found = program_cost(
      name,
      lower,
      topology,
      useful_flops=useful[name],
      kernels=kernels,
      lengths=loops_at_full_length(parts),
    )
    if found:
      costs[name] = found
  conditions = _conditions(parts, topology) | {"too_large": sorted(useful.keys() - costs.keys())}
  say(markdown(conditions, costs))
  if workdir is not None:
    write(place("--workdir", workdir, must_be_on_disk=True), conditions, costs)
  return costs


def program_cost(
  name: str,
  lower: Callable[[], Any],
  topology: str,
  *,
  useful_flops: float,
  kernels: Mapping[str, KernelCost] | None = None,
  lengths: Mapping[str, int] | None = None,
) -> Cost | None:
  """Computes `cost` of one of `programs.programs`; None if it does not fit into the memory."""
  program, text = compiled_with_text(name, lower)
  if program is None:
    return None
  items = with_kernels(walk(text, PARTS, lengths), kernels or {})
  return cost(items, chip_of(topology), useful_flops=useful_flops, memory=memory(program))


def write(folder: pathlib.Path, conditions: Mapping[str, Any], costs: Mapping[str, Cost]) -> None:
  """Numbers as JSON and tables as Markdown, named by the topology."""
  folder.mkdir(parents=True, exist_ok=True)
  stem = f"costs_{conditions['topology'].replace(':', '_')}"
  numbers = json.dumps({"conditions": dict(conditions), "costs": dict(costs)}, indent=1)
  (folder / f"{stem}.json").write_text(numbers + "\n", encoding="utf-8")
  (folder / f"{stem}.md").write_text(markdown(conditions, costs) + "\n", encoding="utf-8")


def useful_flops(parts: Parts) -> dict[str, float]:
  """Model FLOPs per chip, of prompts and responses of maximum length."""
  config, network = parts.config, parts.model.config
  prompts = np.full(config.batch.prompts, config.max_prompt_length)
  responses = np.full((len(prompts), config.batch.group_size), config.max_response_length)
  adapters = parts.placement.state.params if parts.lora is not None else None
  update = update_flops(network, prompts, responses, adapters=adapters)
  return {
    "update": update / parts.placement.mesh.size,
    "generation": _burst_flops(parts) / parts.placement.mesh.size,
  }


def _burst_flops(parts: Parts) -> float:
  """FLOPs of the last burst of responses of maximum length."""
  settings, network = parts.programs.engine.settings, parts.model.config
  prompts = np.full(settings.slots, parts.config.max_prompt_length)
  until = lambda length: forward_flops(network, prompts, np.full((settings.slots, 1), length))
  return until(settings.max_new_tokens) - until(settings.max_new_tokens - settings.shape.steps)


def loops_at_full_length(parts: Parts) -> dict[str, int]:
  """Iterations of the Gram matrix's loops over a micro-batch's rollouts and a rollout's places.

  By pattern of their name; responses are as long as they may be.
  """
  config, micro_batches = parts.config, int(packed_at_full_length(parts).num_micro_batches)
  rollouts = config.batch.prompts * config.batch.group_size
  return {
    rf"{by_rollout.ROLLOUTS}/while$": -(-rollouts // micro_batches),
    rf"{by_rollout.TILES}/while$": by_rollout.tiles_of(config.max_response_length)[1],
  }


def attention_kernels(parts: Parts) -> dict[str, KernelCost]:
  """Analytic counts of attention's kernels: in rows of an update, over pages in generation.

  Prompts and responses have maximum length, and there is no sliding window. A call computes
  a row of an update, counted as the mean of its rows, or one token of every slot.
  """
  network, tensor = parts.model.config, parts.placement.mesh.shape["tensor"]
  paged: dict[str, KernelCost] = {"paged_attention": _paged_cost}
  if network.attention != "splash":
    return paged
  packed = packed_at_full_length(parts)
  computed = lambda x: x[: int(packed.num_micro_batches)].reshape(-1, x.shape[-1])
  rows = jax.tree.map(computed, packed.rows)
  found = splash_cost(
    rows,
    num_heads=network.num_heads // tensor,
    num_kv_heads=network.num_kv_heads // tensor,
    head_dim=network.head_dim,
  )
  share = lambda *counts: lambda item: tuple(count / len(rows.prompts) for count in counts)
  return paged | {
    "splash_mha_fwd": share(found.forward_flops, found.forward_bytes),
    "splash_mha_dkv": share(found.backward_flops, found.backward_bytes),
  }


def _paged_cost(item: Item) -> tuple[float, float]:
  """FLOPs and bytes of a call; operands 4 and 5 of the kernel are its queries and its pages."""
  from rlvr_jax.ops.paged import paged_flops  # experimental in jax: only where it is used

  return paged_flops(*map(dimensions, item.shapes[4:6])), item.hbm_bytes / item.times


def with_kernels(items: Iterable[Item], kernels: Mapping[str, KernelCost]) -> list[Item]:
  """The items, with an analytic count in the place of what is known of a Pallas kernel."""

  def counted(item: Item) -> Item:
    found = [count for pattern, count in kernels.items() if re.search(pattern, item.op_name)]
    if not item.target or not found:
      return item
    flops, hbm_bytes = found[0](item)
    return item._replace(flops=flops * item.times, hbm_bytes=hbm_bytes * item.times)

  return [counted(item) for item in items]


def cost(
  items: list[Item], chip: Chip, *, useful_flops: float, memory: Mapping[str, float]
) -> Cost:
  """Sums over a program's instructions, per chip, as numbers and texts alone."""
  flops = sum(item.flops for item in items)
  hbm_bytes = sum(item.hbm_bytes for item in items)
  received_bytes = sum(item.received_bytes for item in items)
  seconds = {
    "compute": flops / chip.flops,
    "HBM": hbm_bytes / chip.hbm_bytes_per_s,
    "interconnect": received_bytes / chip.interconnect_bytes_per_s,
  }
  longest = max(seconds, key=lambda name: seconds[name])
  by_part = functools.partial(_by, items, ("part",))
  moved = [item for item in items if item.opcode in COLLECTIVES or item.received_bytes]
  foreign = [item for item in items if item.target]
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
    "parts": by_part(("flops", "hbm_bytes", "received_bytes", "cycles")),
    "collectives": _by(moved, ("part", "opcode", "dtype"), ("received_bytes", "times")),
    "custom_calls": _by(foreign, ("part", "target"), ("flops", "hbm_bytes", "times")),
    "loops_of_unknown_length": _by(open_loops, ("part", "op_name"), ("times",)),
  }


def _by(items: Iterable[Item], keys: tuple[str, ...], sums: tuple[str, ...]) -> list[dict]:
  """Rows of sums, one for every value of the keys, in descending order of the first sum."""
  found: dict[tuple, collections.Counter] = {}
  for item in items:
    row = found.setdefault(tuple(getattr(item, key) for key in keys), collections.Counter())
    row.update({name: getattr(item, name) for name in sums})
  rows = [dict(zip(keys, key, strict=True)) | dict(row) for key, row in found.items()]
  return sorted(rows, key=lambda row: -row[sums[0]])


# --- for a person ---------------------------------------------------------------------------------


def _conditions(parts: Parts, topology: str) -> dict[str, Any]:
  config = parts.config
  devices = parts.placement.mesh.devices.flat
  return {
    "topology": topology,
    "peaks of a chip": chip_of(topology)._asdict(),
    "mesh": dict(parts.placement.mesh.shape),
    "model": config.model.checkpoint or config.model.preset,
    "layers": parts.model.config.num_layers,
    "remat": parts.model.config.remat,
    "prompts": config.batch.prompts,
    "group_size": config.batch.group_size,
    "micro_batches": int(packed_at_full_length(parts).num_micro_batches),
    "prompt_tokens": config.max_prompt_length,
    "response_tokens": config.max_response_length,
    "jax": jax.__version__,
    "compiler": next((device.client.platform_version for device in devices[:1]), ""),
  }


def markdown(conditions: Mapping[str, Any], costs: Mapping[str, Cost]) -> str:
  """Tables of a report."""
  c = conditions
  mesh = ", ".join(f"{axis} {size}" for axis, size in c["mesh"].items())
  lines = [
    f"# {c['model']} on {c['topology']}, per chip",
    "",
    f"{c['prompts']} prompts of {c['prompt_tokens']} tokens, each with {c['group_size']} responses"
    f" of {c['response_tokens']} tokens: all are taken to be as long as they may be. Mesh {mesh};"
    f" {c['micro_batches']} micro-batches; remat {c['remat']}; {c['layers']} layers;"
    f" jax {c['jax']}.",
    "",
    *_table([_summary(name, cost) for name, cost in costs.items()]),
  ]
  if c["too_large"]:
    lines += ["", f"Left out, since a chip has too little memory: {', '.join(c['too_large'])}."]
  for name, cost in costs.items():
    lines += ["", f"## {name.capitalize()}, by part", ""]
    lines += _table([_readable(row) for row in cost["parts"]])
    lines += ["", "Collectives:", ""]
    lines += _table([_readable(row) for row in cost["collectives"] if row["received_bytes"] >= 1e6])
    if cost["custom_calls"]:
      lines += ["", "Kernels and calls that are not XLA's own:", ""]
      lines += _table([_readable(row) for row in cost["custom_calls"]])
    if cost["loops_of_unknown_length"]:
      lines += ["", "Loops whose length only the data tell, counted as one iteration:", ""]
      lines += _table([_readable(row) for row in cost["loops_of_unknown_length"]])
  return "\n".join([*lines, "", _TRUST])


def _summary(name: str, cost: Cost) -> dict[str, str]:
  gib = sum(cost["memory_bytes"].values()) / 2**30
  return {
    "program": name,
    "useful TFLOPs": f"{cost['useful_flops'] / 1e12:.4g}",
    "executed TFLOPs": f"{cost['executed_flops'] / 1e12:.4g}",
    "HBM GB": f"{cost['hbm_bytes'] / 1e9:.4g}",
    "received GB": f"{cost['received_bytes'] / 1e9:.4g}",
    "memory GiB": f"{gib:.1f}",
    **{f"{what}, s": f"{seconds:.3g}" for what, seconds in cost["seconds"].items()},
    "bound by": cost["bound_by"],
    "MFU at most": f"{100 * cost['model_flops_utilization']:.1f} %",
  }


_COLUMNS = {  # of a row: its name and its unit
  "flops": ("executed TFLOPs", 1e12),
  "hbm_bytes": ("HBM GB", 1e9),
  "received_bytes": ("received GB", 1e9),
  "cycles": ("cycles, 10⁹", 1e9),
  "opcode": ("kind", None),
  "times": ("runs", None),
  "op_name": ("operation", None),
}


def _readable(row: Mapping[str, Any]) -> dict[str, str]:
  readable = {}
  for key, value in row.items():
    name, unit = _COLUMNS.get(key, (key, None))
    readable[name] = str(value) if unit is None else f"{value / unit:.4g}"
  return readable


def _table(rows: list[dict[str, str]]) -> list[str]:
  if not rows:
    return ["none"]
  lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
  return ["| " + " | ".join(line) + " |" for line in lines]
