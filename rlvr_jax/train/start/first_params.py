"""Parameters before the first update, taken from another run or from a warm start."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeVar, TypeVarTuple

import jax
import ml_collections
import numpy as np

from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.cluster import multihost, sharding
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.cluster.process import return_freed_memory
from rlvr_jax.train.reporting.progress import progress, say
from rlvr_jax.train.reporting.writer import MetricWriter
from rlvr_jax.train.setup.initial_params import InitialParams
from rlvr_jax.train.setup.programs import Programs
from rlvr_jax.train.start import parameters
from rlvr_jax.types import Params, Prompts
from rlvr_jax.update import supervised

Inputs = TypeVarTuple("Inputs")
Result = TypeVar("Result")


def load_from_other_run(
  start: ml_collections.ConfigDict,
  initial: InitialParams,
  writer: MetricWriter,
  checkpointer: Checkpointer,
) -> tuple[Params, int]:
  """Loads and saves the policy of another run; returns it and the number of its updates there.

  A resumed run no longer needs the other run, except for the optimizer's moments.

  Args:
    start: `config.start`.
    initial: the initial parameters of this run.
    writer: the writer of the run's records.
    checkpointer: the checkpointer of policies before the first update.
  """
  folder = parameters.start_folder(start.checkpoint)
  params, step = parameters.load_policy(initial, folder)
  moments = " and its optimizer's moments" if start.optimizer else ""
  say(f"starts with the policy of {folder}, after {step} updates there{moments}")
  checkpointer.save(step, params, host={"written": writer.written(0)})
  checkpointer.wait()
  return params, step


def warm_start(
  params: Params,
  frozen: Params,
  batches: Iterator[tuple[Prompts, np.ndarray, np.ndarray]],
  num_steps: int,
  programs: Programs,
  placement: Placement,
  writer: MetricWriter,
  checkpointer: Checkpointer,
) -> Params:
  """The parameters after the supervised phase, saved as a separate checkpoint.

  Args:
    params: the trained parameters; donated.
    frozen: the parameters that are not trained.
    batches: the result of `parameters.supervised_batches`.
    num_steps: number of the phase's updates.
    programs, placement: programs and placement of the run.
    writer: the writer of the run's records.
    checkpointer: the checkpointer of policies before the first update.
  Raises:
    EndRequestedError: shutdown was requested meanwhile; the phase starts again in the next process.
  """
  step = programs.supervised_step
  if sharding.is_on_cpu(placement.mesh):
    step = functools.partial(_step_by_step, step)
  with (
    multihost.phase("the warm start"),
    progress(num_steps, "warm start", unit="steps") as bar,
  ):

    def report(index: int, loss: float) -> None:
      bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
      bar.update(index - bar.n)
      writer.write(index, "warm_start", {"warm_start/loss": loss})
      multihost.raise_if_shutdown_requested()

    params = supervised.warm_start(
      (params, programs.supervised_init(params)),
      frozen,
      map(placement.to_devices, batches),
      step,
      num_steps=num_steps,
      report=report,
    )
  checkpointer.save(num_steps, params, host={"written": writer.written(0)})
  checkpointer.wait()
  return params


def _step_by_step(step: Callable[[*Inputs], Result], *arguments: *Inputs) -> Result:
  """Runs a step and waits for it, so that its buffers are free before the next step."""
  return_freed_memory()
  result: Result = jax.block_until_ready(step(*arguments))
  return result
