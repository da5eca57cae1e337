"""Tiny runs for notebook readers without a run, and their configurations."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import ml_collections

from rlvr_jax.configs import quickstart, quickstart_dialogue, steps
from rlvr_jax.train import loop
from rlvr_jax.train.reporting.report import write_report
from rlvr_jax.train.session import open_session
from rlvr_jax.train.setup.build import build


def train(config: ml_collections.ConfigDict, workdir: str = "") -> str:
  """Trains, and returns the folder of the run.

  Args:
    config: configuration, see `configs/base.py`.
    workdir: folder of the run; a finished run is not trained again, an interrupted run continues.
      "" for a new temporary folder.
  Raises:
    ValueError: see `train.setup.build.build`.
    WorkdirError: the folder belongs to another configuration.
  """
  folder = workdir or tempfile.mkdtemp(prefix="rlvr_jax_")
  with open_session(build(config), pathlib.Path(folder)) as run:
    loop.train(run.run, run.now)
    write_report(run.workdir.local, run.workdir.path)
  return folder


def train_fleet(*, samplers: int = 2) -> pathlib.Path:
  """Trains `fleet_config` with a trainer and samplers, all on CPUs; returns the run's folder.

  Args:
    samplers: number of processes that sample.
  Raises:
    RuntimeError: a process has failed; the message has the end of its output.
  """
  folder = pathlib.Path(tempfile.mkdtemp(prefix="rlvr_jax_"))
  config_file, workdir = folder / "config.py", folder / "run"
  config_file.write_text(f"from {__name__} import fleet_config as get_config\n")
  flags = [[f"--config={config_file}"], *[["--mode=sample"]] * samplers]
  logs = [folder / f"{number}.log" for number in range(len(flags))]
  with contextlib.ExitStack() as stack:
    programs = []
    for own, log in zip(flags, logs, strict=True):
      command = [sys.executable, "-m", "rlvr_jax.main", f"--workdir={workdir}", *own]
      environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
      output = stack.enter_context(open(log, "wb"))
      program = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
      stack.callback(program.wait)
      stack.callback(program.terminate)
      programs.append(program)
    while any(program.poll() is None for program in programs):
      time.sleep(0.2)
      for program, log in zip(programs, logs, strict=True):
        if program.poll():
          raise RuntimeError(f"a process of the fleet has failed: {log.read_text()[-2000:]}")
  return workdir


def sums_config(*, updates: int, seed: int = 0) -> ml_collections.ConfigDict:
  """Configuration of the quickstart's task, "7 - 4 + 9 = ", for a policy of 0.1 M parameters."""
  c = quickstart.get_config()
  c.seed, c.num_updates = seed, updates
  c.model.overrides = dict(num_layers=2, width=64, mlp_width=128, unroll_layers=1)
  c.warm_start.num_steps = 300
  c.warm_start.learning_rate = "constant(peak=4e-3)"
  c.batch.prompts = 16
  c.learning_rate = "constant(peak=1e-3)"
  return c


def measured_config(reweighting: str = "none") -> ml_collections.ConfigDict:
  """Configuration of 16 updates on sums, with the geometry measured before every second update.

  Args:
    reweighting: spec, as in `config.reweighting`.
  """
  c = sums_config(updates=16)
  c.warm_start.num_steps = 80
  c.batch.prompts, c.batch.group_size = 8, 16
  c.learning_rate = "linear(peak=1e-3)"
  c.evaluation.num_samples, c.evaluation.ks = 1, (1,)
  c.diagnostics.every = 2
  c.reweighting = reweighting
  return c


def guess_config(*, updates: int, seed: int = 0) -> ml_collections.ConfigDict:
  """Configuration of dialogues in which a tiny policy finds a number from 1 to 15 in four turns."""
  c = quickstart_dialogue.get_config()
  c.seed, c.num_updates = seed, updates
  c.task.kwargs.high, c.environment.name = 15, "guess(low=1, high=15)"
  c.environment.max_turns, c.max_response_length = 4, 18
  c.model.overrides = dict(num_layers=2, width=64, mlp_width=128, unroll_layers=1)
  c.batch.prompts = 16
  c.learning_rate = "constant(peak=1e-3)"
  c.evaluation.num_samples, c.evaluation.ks = 1, (1,)
  return c


def worked_sums_config(*, updates: int, seed: int = 0) -> ml_collections.ConfigDict:
  """Configuration of sums of two terms in worked steps: responses of 10 to 40 tokens."""
  c = steps.get_config()
  c.seed, c.num_updates = seed, updates
  c.task.kwargs.terms, c.task.kwargs.warm_start_size = 2, 2048
  c.max_prompt_length, c.max_response_length = 12, 40
  c.model.overrides = dict(
    num_layers=2, width=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=128, unroll_layers=1
  )
  c.warm_start.num_steps = 600
  c.warm_start.batch_size = 32
  c.warm_start.learning_rate = "linear(peak=4e-3, warmup=20)"
  c.batch.prompts = 16
  c.learning_rate = "constant(peak=1e-3)"
  c.evaluation.num_samples, c.evaluation.ks = 1, (1,)
  return c


def fleet_config() -> ml_collections.ConfigDict:
  """Configuration of worked sums for a fleet, whose samplers are separate programs.

  A response in progress continues with new weights.
  """
  c = worked_sums_config(updates=40)
  c.schedule = "asynchronous(max_lag=4)"
  c.fleet.samplers, c.fleet.new_weights = True, "switch"
  c.warm_start.num_steps = 200
  c.sampling.slots = 4
  c.evaluation.every = c.num_updates
  return c
