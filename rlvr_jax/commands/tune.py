"""The command tune: settings of a run for a TPU slice, chosen by compiling its programs."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import ml_collections

from rlvr_jax.commands.sweep import TimeLimitError
from rlvr_jax.costs import hlo, hlo_text, programs, step_time, tuning, workload
from rlvr_jax.costs.chips import Chip, find_chip
from rlvr_jax.costs.generation_time import Seconds
from rlvr_jax.costs.hlo_text import CostsError
from rlvr_jax.costs.step_time import Cost
from rlvr_jax.costs.tuning import Candidate, Overrides
from rlvr_jax.evaluate.compare import markdown_table
from rlvr_jax.models.memory import shard_bytes
from rlvr_jax.storage.files import replace_file
from rlvr_jax.train.reporting.progress import duration, say
from rlvr_jax.train.setup.build import Parts

_MAX_MESHES = 5  # that are compiled for updates
_MAX_ROWS = 2  # other rows and micro-batches, for the fastest of these
_MAX_LAYOUTS = 3  # of generation
_COMPILE_S = 240  # for a program of 7B on two cores
_KINDS = {"update": "training", "generation": "generation"}  # program → kind of compiler options
_GIB = 2**30

_TRUST = """Seconds go from the largest of three times, if computation, HBM and links overlap, to
their sum, if they do not. Computation is the compiler's cycles, and what the kernels other than
XLA's need by the published peaks. For GPUs, for which no compiler estimates cycles, it is what the
FLOPs of products need by the published peaks. Generation is by roofline. Grading, checkpoints, the
scores of a reference policy, further draws of dynamic sampling and the time of the host are left
out."""


class Target(NamedTuple):
  """What is tuned, and for what."""

  config: ml_collections.ConfigDict
  topology: str  # of the slice
  lengths: str  # component of `costs.workload`
  folder: pathlib.Path  # for costs of compiled programs

  @property
  def chip(self) -> Chip:
    return find_chip(self.topology)

  @property
  def usable_gib(self) -> float:
    return tuning.USABLE * self.chip.hbm_gib

  def fitting(self, candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.gib <= self.usable_gib]

  def build(self, overrides: Overrides) -> Parts:
    config = tuning.apply_overrides(self.config, overrides)
    return programs.build_shapes_only(config, programs.make_topology_mesh(config, self.topology))


class Measured(NamedTuple):
  """A compiled program of some settings."""

  overrides: Overrides
  seconds: Seconds  # of an update, or of the generation of a refresh
  gib: float  # of a chip's memory
  cost: Cost


def tune(
  config: ml_collections.ConfigDict,
  topology: str,
  workdir: pathlib.Path,
  *,
  lengths: str,
  minutes: float | None = None,
) -> Overrides:
  """Finds fast settings for a slice, prints how they compare, and writes them to the workdir.

  Costs of compiled programs are kept in the workdir: the same command continues where an earlier
  one was stopped.

  Args:
    config: the recipe.
    topology: the slice, such as "v5p:2x2x4".
    workdir: folder for tune_TOPOLOGY.json and .md.
    lengths: component of `costs.workload`, of prompts and responses.
    minutes: limit; the program that is being compiled then is finished, and a layout of generation
      is compiled in any case.
  Returns:
    The fastest settings by dotted name of the field.
  Raises:
    CostsError: no setting fits into the memory of a chip.
    TimeLimitError: the time is over; what was found until then has been written.
  """
  count = _MAX_MESHES + len(tuning.compiler_options(topology)) - 1 + _MAX_ROWS + _MAX_LAYOUTS
  say(
    f"compiles about {count} programs for {topology}, {duration(count * _COMPILE_S)} for 7B on two"
    " cores; the same command continues a search that was stopped"
  )
  deadline = time.monotonic() + 60 * (math.inf if minutes is None else minutes)
  target = Target(config, topology, lengths, workdir / "compiled")
  target.folder.mkdir(parents=True, exist_ok=True)
  distribution = workload.parse_lengths(lengths, config.environment)

  parts = target.build({})
  devices = list(parts.placement.mesh.devices.flat)
  candidates = tuning.update_candidates(parts, devices, distribution, target.chip)
  updates, has_all_updates = _compile_updates(target, target.fitting(candidates), deadline)
  if not updates:
    raise _too_large(target, "setting of the update")
  update = updates[0]
  parts = target.build(update.overrides)
  layouts = tuning.generation_candidates(parts, distribution, target.chip)
  generations, has_all_layouts = _compile_generations(
    target, update.overrides, target.fitting(layouts), deadline
  )
  if not generations:
    raise _too_large(target, "layout of generation")
  generation = generations[0]

  refreshes = tuning.refreshes_per_update(parts.schedule, parts.config.num_updates)
  step = Seconds(
    update.seconds.overlapped + refreshes * generation.seconds.overlapped,
    update.seconds.in_turn + refreshes * generation.seconds.in_turn,
  )
  overrides = {**update.overrides, **generation.overrides}
  lines = [
    f"# {config.model.preset} on {topology}, lengths {lengths}",
    "",
    f"A step takes {step.overlapped:.3g} to {step.in_turn:.3g} s with",
    "",
    *(f"    --config.{name}={value!r}" for name, value in overrides.items()),
    "",
    "## Updates",
    "",
    *_format(target, updates, candidates),
    "",
    "## Generation of a refresh",
    "",
    *_format(target, generations, layouts),
    "",
    *(_dialogue_lines(generation, layouts) if distribution.max_turns > 1 else ()),
    _TRUST,
  ]
  text = "\n".join(lines)
  say(text)
  result = {
    "topology": topology,
    "lengths": lengths,
    "overrides": overrides,
    "step_seconds": step._asdict(),
    "jax": jax.__version__,
    "compiler": devices[0].client.platform_version,
  }
  stem = f"tune_{topology.replace(':', '_')}"
  for name, content in ((f"{stem}.json", json.dumps(result, indent=1)), (f"{stem}.md", text)):
    with replace_file(workdir / name) as file:
      file.write((content + "\n").encode())
  if not (has_all_updates and has_all_layouts):
    raise TimeLimitError(f"{minutes:g} minutes are over; the same command continues")
  return overrides


def _too_large(target: Target, what: str) -> CostsError:
  return CostsError(
    f"--topology={target.topology}: no {what} fits into {target.chip.hbm_gib:.4g} GiB per chip;"
    " choose a larger slice, or lower config.max_response_length"
  )


def _by_seconds(measured: Sequence[Measured]) -> list[Measured]:
  return sorted(measured, key=lambda program: program.seconds)


# --- compilation ----------------------------------------------------------------------------------


def _compile_updates(
  target: Target, candidates: Sequence[Candidate], deadline: float
) -> tuple[list[Measured], bool]:
  """The best of each mesh, by estimate; then the fastest of these with other options and rows.

  Returns:
    The programs that fit, fastest first, and whether none was left out for time.
  """
  defaults, *others = tuning.compiler_options(target.topology)
  measured: list[Measured] = []
  complete = True

  def measure(overrides: Overrides, options: str) -> None:
    nonlocal complete
    if measured and time.monotonic() > deadline:
      complete = False
      return
    overrides = {**overrides, "compiler_options.training": options}
    cost = _compile(target, target.build(overrides), "update")
    if cost is not None and (gib := _gib(cost)) <= target.usable_gib:
      seconds = tuning.compiled_seconds(cost, target.chip)
      measured.append(Measured(overrides, seconds, gib, cost))

  for candidate in tuning.best_of_each_mesh(candidates)[:_MAX_MESHES]:
    measure(candidate.overrides, defaults)
  if not measured:
    return [], complete
  fastest = _by_seconds(measured)[0]
  for options in others:
    measure(fastest.overrides, options)
  fastest = _by_seconds(measured)[0]
  for candidate in _with_other_rows(candidates, fastest.overrides)[:_MAX_ROWS]:
    measure(candidate.overrides, fastest.overrides["compiler_options.training"])
  return _by_seconds(measured), complete


def _with_other_rows(candidates: Sequence[Candidate], found: Overrides) -> list[Candidate]:
  """Candidates that differ from `found` in rows and micro-batches only, in their order."""
  rows = ("batch.tokens_per_row", "batch.tokens_per_micro_batch")
  differing = lambda candidate: {n for n, value in candidate.overrides.items() if found[n] != value}
  return [c for c in candidates if differing(c) and differing(c) <= {*rows}]


def _compile_generations(
  target: Target, update: Overrides, candidates: Sequence[Candidate], deadline: float
) -> tuple[list[Measured], bool]:
  """The first candidates that fit beside the trainer, with the seconds of their estimate.

  Returns:
    As `_compile_updates`.
  """
  measured: list[Measured] = []
  for candidate in candidates:
    if measured and time.monotonic() > deadline:
      return _by_seconds(measured), False
    parts = target.build({**update, **candidate.overrides})
    cost = _compile(target, parts, "generation")
    resident = shard_bytes(parts.placement.state.opt_state) / _GIB
    if cost is not None and (gib := _gib(cost) + resident) <= target.usable_gib:
      measured.append(Measured(candidate.overrides, candidate.seconds, gib, cost))
    if len(measured) == _MAX_LAYOUTS:
      break
  return _by_seconds(measured), True


def _compile(target: Target, parts: Parts, name: str) -> Cost | None:
  """Costs of a program, from the workdir if it was compiled before; None if it is too large."""
  counts = step_time.count(parts, target.lengths)
  lowered = programs.program_lowerings(parts, counts.packed)[name]()
  compiler = parts.placement.mesh.devices.flat[0].client.platform_version
  options = getattr(parts.compiler_options, _KINDS[name])
  counting = [inspect.getsource(module) for module in (hlo, hlo_text, step_time)]
  compilation = (target.topology, target.lengths, options, jax.__version__, compiler)
  made_of = (lowered.as_text(), *compilation, *counting)
  path = target.folder / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}.json"
  if not path.exists():
    cost = step_time.program_cost(
      name,
      lambda: lowered,
      target.topology,
      useful_flops=counts.useful_flops[name],
      kernels=counts.kernels,
      loops=counts.loops,
    )
    with replace_file(path) as file:
      file.write((json.dumps(cost) + "\n").encode())
  return json.loads(path.read_text(encoding="utf-8"))


def _gib(cost: Cost) -> float:
  return sum(cost["memory_bytes"].values()) / _GIB


# --- output ---------------------------------------------------------------------------------------


def _format(
  target: Target, measured: Sequence[Measured], candidates: Sequence[Candidate]
) -> list[str]:
  """Lines on the programs that were compiled, and on those that were not."""
  figures = [
    {
      "seconds": program.seconds.overlapped,
      "GiB": program.gib,
      "received GB": program.cost["received_bytes"] / 1e9,
    }
    for program in measured
  ]
  rows = {}
  has_cycles = target.chip.cycles_per_s is not None
  best = tuning.pareto(figures, tuple(figures[0]))
  for program, is_best in zip(measured, best, strict=True):
    cost, seconds = program.cost, program.seconds
    rows[_describe(program.overrides)] = [
      f"{seconds.overlapped:.3g} to {seconds.in_turn:.3g}",
      *([f"{cost['cycles'] / 1e9:.3g}"] if has_cycles else []),
      f"{100 * cost['model_flops_utilization']:.1f} %",
      f"{program.gib:.1f}",
      f"{cost['received_bytes'] / 1e9:,.3g}",
      f"{cost['hbm_bytes'] / 1e12:.3g}",
      "yes" if is_best else "",
    ]
  cycles = ["cycles, 10⁹"] if has_cycles else []
  header = ["s", *cycles, "MFU at most", "GiB", "received GB", "HBM TB", "Pareto set"]
  fitting = target.fitting(candidates)
  compiled = [program.overrides.items() for program in measured]
  left = [c for c in fitting if not any(c.overrides.items() <= found for found in compiled)]
  lines = [markdown_table(header, rows, "settings"), ""]
  lines.append(
    f"Left out: {len(candidates) - len(fitting)} settings that need more than"
    f" {target.usable_gib:.1f} GiB by estimate"
    + (
      f"; {len(left)} others that were too large when compiled, or slower by estimate:"
      f" {left[0].seconds.overlapped:.3g} s and more"
      if left
      else ""
    )
    + "."
  )
  return lines


def _dialogue_lines(generation: Measured, layouts: Sequence[Candidate]) -> list[str]:
  """Lines on what waiting for replies costs with the layout that was chosen."""
  (taken,) = (x.refresh for x in layouts if x.overrides == generation.overrides)
  assert taken is not None  # layouts of generation have it
  return [
    f"With the first of these {taken.slots_busy:.0%} of the slots' steps sample a token, and"
    f" {taken.waiting_share:.0%} have no rollout while dialogues wait. The devices wait"
    f" {taken.waiting_s:.3g} s for replies, and compute the cache of {taken.rebuilt_per_token:.3g}"
    " tokens anew per token sampled.",
    "",
  ]


def _describe(overrides: Overrides) -> str:
  """The settings in short, such as "fsdp 16, remat dots"."""
  options = {text: name for name, text in tuning.COMPILER_OPTIONS.items()}
  values = {name.rpartition(".")[2]: value for name, value in overrides.items()}
  if "training" in values:
    values["compiler"] = options[values.pop("training")]
  return ", ".join(f"{name} {value}" for name, value in values.items())
