"""The parameters before the first update: fresh, from another run, or after a warm start."""

from __future__ import annotations

from typing import Any

import jax

from rlvr_jax.train.checkpointing.checkpoint import Checkpointer, Restored
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import return_freed_memory
from rlvr_jax.train.reporting.progress import progress, say
from rlvr_jax.train.reporting.writer import MetricWriter
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.programs import is_on_cpu
from rlvr_jax.train.start import parameters
from rlvr_jax.types import Params
from rlvr_jax.update import supervised


def make_first_params(
  parts: Parts, warm: Restored | None, writer: MetricWriter, warm_starts: Checkpointer
) -> tuple[Params | tuple[Params, Any], bool]:
  """The trained parameters before the first update, and whether a warm start is still to be done.

  In that case they come with the state of its optimizer. `warm` are those of an earlier process.
  """
  if warm:
    return warm.state, False
  if parts.config.start.checkpoint:
    return load_from_other_run(parts, writer, warm_starts), False
  if parts.config.warm_start.num_steps:
    return parameters.supervised_state(parts), True
  return parameters.initial_params(parts), False  # cheap to recompute, so they are not saved


def load_from_other_run(parts: Parts, writer: MetricWriter, checkpointer: Checkpointer) -> Params:
  """The policy of `config.start`, saved: a resumed run does not need the other run any more."""
  folder = parameters.start_folder(parts.config.start.checkpoint)
  params, step = parameters.load_policy(parts, folder)
  moments = " and its optimizer's moments" if parts.config.start.optimizer else ""
  say(f"starts with the policy of {folder}, after {step} updates there{moments}")
  checkpointer.save(step, params, host={"written": writer.written(0)})
  checkpointer.wait()
  return params


def warm_start(
  parts: Parts,
  state: tuple[Params, Any],
  frozen: Params,
  writer: MetricWriter,
  checkpointer: Checkpointer,
) -> Params:
  """The initial parameters after the supervised phase, saved as a separate checkpoint.

  Args:
    state: from `parameters.supervised_state`.
  Raises:
    EndRequestedError: shutdown was requested meanwhile; the phase starts again in the next process.
  """
  with multihost.phase("the warm start"):
    params = train_on_demonstrations(parts, state, frozen, writer)
  steps = parts.config.warm_start.num_steps
  checkpointer.save(steps, params, host={"written": writer.written(0)})
  checkpointer.wait()
  return params


def train_on_demonstrations(
  parts: Parts, state: tuple[Params, Any], frozen: Params, writer: MetricWriter
) -> Params:
  """The supervised phase; arguments as of `warm_start`."""
  num_steps = parts.config.warm_start.num_steps
  with progress(num_steps, "warm start", unit="steps") as bar:

    def report(index: int, loss: float) -> None:
      bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
      bar.update(index - bar.n)
      writer.write(index, "warm_start", {"warm_start/loss": loss})
      multihost.raise_if_shutdown_requested()

    def step(state: Any, *arguments: Any) -> Any:
      if not is_on_cpu(parts.placement.mesh):
        return parts.programs.supervised_step(state, *arguments)
      # A step's buffer is free before the next batch is made, and the next step takes one.
      return_freed_memory()
      return jax.block_until_ready(parts.programs.supervised_step(state, *arguments))

    return supervised.warm_start(
      state,
      frozen,
      map(parts.placement.to_devices, parameters.supervised_batches(parts)),
      step,
      num_steps=num_steps,
      report=report,
    )
