"""The commands `fits` and `costs`: memory and costs of a run on chips that this machine lacks."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import jax
import ml_collections

from rlvr_jax.costs import memory, programs, report, workload
from rlvr_jax.costs.chips import find_chip
from rlvr_jax.costs.memory import Table
from rlvr_jax.costs.programs import Lower
from rlvr_jax.costs.report import Cost, Counts
from rlvr_jax.models.memory import shard_bytes
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.programs import (
  abstract_taught_batch,
  abstract_teacher,
  abstract_update_batch,
)
from rlvr_jax.train.setup.teachers import INITIAL
from rlvr_jax.types import Packed
from rlvr_jax.workers.pool import default_workers


def lowerings(run: Parts, packed: Packed | None = None) -> dict[str, Lower]:
  """Functions that lower a run's programs, by the program's name: see `programs.program_lowerings`.

  Lowering a program does not compile it.

  Args:
    run: result of `build`.
    packed: the packed batch of an update; None for a batch of the greatest lengths.
  """
  placement, has_turns = run.placement, run.programs.engine.settings.has_replies
  return programs.program_lowerings(
    run.programs,
    placement,
    abstract_update_batch(
      run.method,
      placement,
      run.shape,
      has_turns=has_turns,
      num_rewards=run.grading.num_rewards,
    ),
    packed or programs.pack_full_length(run.shape, placement.row_layout),
    run.compiler_options.training,
    rebuilds=run.config.fleet.new_weights == "recompute",
    teacher=abstract_teacher(run.method, run.teachers, placement),
  )


def count(run: Parts, lengths: str) -> tuple[Packed, Counts]:
  """A packed batch of typical lengths, and the `report.Counts` of the run's programs for it.

  Args:
    run: result of `build`.
    lengths: the distribution of prompt and response lengths, see `workload.parse_lengths`.
  """
  placement, distribution = run.placement, workload.parse_lengths(lengths, run.config.environment)
  batch = workload.typical_batch(distribution, run.shape, placement.row_layout)
  packed = workload.pack_workload(batch, run.shape, placement.row_layout)
  return packed, report.count(batch, packed, run.model.config, placement, run.programs.engine)


def memory_tables(run: Parts, *, compiled: bool) -> dict[str, Table]:
  """Title → table of the memory that each chip needs for a phase, estimated by arithmetic.

  With `compiled`, the programs are also compiled, and tables of the compiler's numbers are added.
  """
  engine, placement = run.programs.engine, run.placement
  # Whether teachers score in programs of their own, not within the update.
  scores_apart = run.teachers and not run.method.compares
  tables = memory.estimated_bytes(
    run.model.config,
    placement,
    engine,
    run.config.fleet,
    run.schedule,
    run.config.num_updates,
  )
  if scores_apart:
    prompts = run.teacher_prompts
    tables |= memory.teaching_bytes(
      [teacher.model.config for teacher in run.teachers],
      placement,
      placement.row_layout if prompts is None else prompts.row_layout,
    )
  if compiled:
    lowered = lowerings(run)
    if scores_apart:
      batch = abstract_taught_batch(
        run.placement, run.shape, run.teacher_prompts, has_turns=engine.settings.has_replies
      )
      lowered |= programs.teacher_lowerings(run.programs, run.teachers, run.placement, batch)
    tables |= memory.compiled_bytes(lowered, run.placement, engine)
  if not keeps_first_policy(run):
    return tables
  first = {"first policy": shard_bytes(run.placement.state.params)}
  names = ("update", "generation", "prefill", programs.TEACHER)
  of_trainer = lambda title: title.partition(",")[0] in names
  return {title: table | (first if of_trainer(title) else {}) for title, table in tables.items()}


def keeps_first_policy(run: Parts) -> bool:
  """Whether a run keeps a separate copy of its first policy, for a KL term or for diagnostics.

  A teacher that is the first policy makes this copy unnecessary.
  """
  is_teacher = any(teacher.checkpoint == INITIAL for teacher in run.teachers)
  needed = run.config.reference.kl_coefficient or run.config.diagnostics.every
  return bool(needed) and not is_teacher


def host_memory_tables(run: Parts) -> dict[str, Table]:
  """Memory of all processes of a run on a host with CPU devices, by phase."""
  config, shape = run.config, run.shape
  warm_start, environment = config.warm_start, config.environment
  workers = config.grading.num_workers or default_workers()
  if environment.name:
    workers += environment.processes or default_workers()
  demonstrations = warm_start.batch_size, shape.max_prompt_length + shape.max_response_length
  return memory.resident_bytes(
    memory_tables(run, compiled=False),
    run.model.config,
    run.placement,
    keeps_first_policy=keeps_first_policy(run),
    warm_start=demonstrations if warm_start.num_steps else None,
    workers=workers,
  )


def fits(config: ml_collections.ConfigDict, topology: str | None) -> Callable[[], dict[str, Table]]:
  """Builds a run from shapes; returns a function that prints the memory that each chip needs.

  The function always prints an estimate by arithmetic. Given a topology, the function also compiles
  the run's programs, prints the compiler's numbers, and says whether each program fits into a
  chip's memory. Compiling for TPUs needs the extra `tpu` of the package, but no TPU.

  Args:
    config: the config of the run.
    topology: kind and shape of the slice, such as "v5e:4x4"; None for the estimate only.
  Returns:
    A function that returns the tables that it printed, by title.
  """
  run = programs.build_for(config, topology)

  def action() -> dict[str, Table]:
    tables, mesh = memory_tables(run, compiled=topology is not None), run.placement.mesh
    title = f"{topology or 'a mesh'} of {dict(mesh.shape)} ({mesh.size} chips)"
    say(memory.format_tables(title, tables, find_chip(topology).hbm_gib if topology else None))
    return tables

  return action


def costs(
  config: ml_collections.ConfigDict,
  topology: str,
  folder: pathlib.Path | None,
  *,
  lengths: str = "longest",
) -> Callable[[], dict[str, Cost]]:
  """Builds a run from shapes; returns a function that prints the costs of its programs per chip.

  The function compiles two programs for the topology: the update, and a burst of decoding steps.
  The burst reads full caches, as at the end of the longest responses. A third program, the prefill,
  is compiled if `config.fleet.new_weights` is "recompute", or if the run has dialogues: in a
  dialogue, a prefill follows each reply of the environment.

  Args:
    config: the config of the run.
    topology: kind and shape of the slice, such as "v5p:2x2x4".
    folder: the folder for costs_TOPOLOGY.json and costs_TOPOLOGY.md; None: no files are written.
    lengths: the distribution of prompt and response lengths, see `workload.parse_lengths`.
  Returns:
    A function that returns the costs of each program that fits into memory, by name. The function
    raises CostsError if it cannot read a compiled program.
  """
  run = programs.build_for(config, topology)
  placement, network, shape = run.placement, run.model.config, run.shape
  packed, counts = count(run, lengths)
  lowered = lowerings(run, packed)

  def action() -> dict[str, Cost]:
    measured = {
      name: report.program_cost(name, lower, topology, counts) for name, lower in lowered.items()
    }
    found = {name: cost for name, cost in measured.items() if cost is not None}
    conditions = {
      "topology": topology,
      "peaks of a chip": find_chip(topology)._asdict(),
      "mesh": dict(placement.mesh.shape),
      "model": config.model.checkpoint or config.model.preset,
      "layers": network.num_layers,
      "remat": network.remat,
      "prompts": shape.prompts,
      "group_size": shape.group_size,
      "prompt_tokens": shape.max_prompt_length,
      "response_tokens": shape.max_response_length,
      "lengths": lengths,
      "micro_batches": int(packed.num_micro_batches),
      "too_large": sorted(lowered.keys() - found.keys()),
      "jax": jax.__version__,
      "compiler": placement.mesh.devices.flat[0].client.platform_version,
    }
    say(report.format_markdown(conditions, found))
    if folder is not None:
      report.write_report(folder, conditions, found)
    return found

  return action
