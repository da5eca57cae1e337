"""Prepares the command of a mode: checks flags and configuration before the command starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import ml_collections

from rlvr_jax.commands import ahead_of_time, sweep
from rlvr_jax.commands.check import check
from rlvr_jax.commands.eval import evaluate_checkpoint
from rlvr_jax.commands.export import export
from rlvr_jax.commands.sample import sample
from rlvr_jax.commands.train import train
from rlvr_jax.commands.tune import tune
from rlvr_jax.commands.view import view
from rlvr_jax.costs import chips, programs, workload
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.reporting import machines, writer
from rlvr_jax.train.setup import config_file
from rlvr_jax.train.setup.build import batch_shape, build, make_schedule
from rlvr_jax.train.setup.checks import generates_separately
from rlvr_jax.train.start.parameters import checkpoint_folder
from rlvr_jax.view.read import DEFAULT_BATCHES

_AHEAD_OF_TIME = ("fits", "costs", "tune")
_MODES = {  # flag → the modes that take it
  "checkpoint": ("eval", "export"),
  "topology": _AHEAD_OF_TIME,
  "lengths": ("costs", "tune"),
  "profile": ("train",),
  "trackers": ("train", "sweep"),
  "sweep": ("sweep",),
  "minutes": ("sweep",),
  "beside": ("view",),
  "batches": ("view",),
  "serve": ("view",),
  "port": ("view",),
}


def prepare_command(
  mode: str,
  config: ml_collections.ConfigDict,
  workdir: str | None,
  checkpoint: str | None,
  topology: str | None,
  profile: str = "",
  tracked_by: Sequence[str] = (),
  sweep_file: str | None = None,
  argv: Sequence[str] = (),
  minutes: float | None = None,
  lengths: str | None = None,
  beside: str | None = None,
  batches: str | None = None,
  serve: bool = False,
  port: int | None = None,
) -> Callable[[], object]:
  """Checks the configuration completely; returns a function that runs the command.

  Args:
    mode: train, sample, check, eval, export, fits, costs, tune, sweep, view.
    config: see `configs/base.py`; for view, the configuration to compare with the run's.
    workdir: folder for all output files; optional for costs, and not used by fits.
    checkpoint: for eval and export, see `train.start.parameters.checkpoint_folder`.
    topology: for fits, costs and tune, a slice such as v5e:4x4; see `programs.topology_devices`.
    profile: for train, see `train.train`.
    tracked_by: for train and sweep, see `train.train`.
    sweep_file: for sweep, see `sweep.read_runs`.
    argv: the command line; the fields that it sets apply to all runs of a sweep.
    minutes: for sweep, see `sweep.sweep`.
    lengths: for costs and tune, see `workload.parse_lengths`; None for the greatest lengths.
    beside, batches, serve, port: for view, see `view.view`; None for the defaults.
  Raises:
    ValueError: a flag or field is invalid; the message says which, what is allowed, and the remedy.
    OSError: a file of the data or of the model cannot be read.
  """
  given = {
    "checkpoint": checkpoint is not None,
    "topology": topology is not None,
    "lengths": lengths is not None,
    "profile": bool(profile),
    "trackers": bool(tracked_by),
    "sweep": sweep_file is not None,
    "minutes": minutes is not None,
    "beside": beside is not None,
    "batches": batches is not None,
    "serve": serve,
    "port": port is not None,
  }
  for flag, modes in _MODES.items():
    if given[flag] and mode not in modes:
      *others, last = modes
      taking = f"{', '.join(others)} or {last}" if others else last
      raise ValueError(f"--{flag} goes with --mode={taking}, not with --mode={mode}")
  if sweep_file is None and mode == "sweep":
    raise ValueError("--mode=sweep needs --sweep=FILE, a Python file whose get_sweep() lists runs")
  if port is not None and not serve:
    raise ValueError(f"--port={port} has no effect without --serve; add --serve, or leave it out")
  if batches is not None and serve:
    raise ValueError(
      f"--batches={batches} has no effect with --serve, which reads a batch when it is asked for;"
      " leave it out"
    )
  if mode in _AHEAD_OF_TIME:
    return _prepare_ahead_of_time(mode, config, workdir, topology, lengths or "longest")
  if mode == "view":
    batches = DEFAULT_BATCHES if batches is None else batches
    return view(config, str(workdir), beside=beside, batches=batches, serve=serve, port=port or 0)
  if mode != "export":  # an export may be written to any file system of fsspec
    parse_path("--workdir", str(workdir))
  if mode == "check":  # this command reports all other errors itself
    return functools.partial(check, config, str(workdir))
  machines.Profile(profile, str(workdir))
  for name in tracked_by:
    writer.check_tracker(name)
  if mode == "sweep":
    return _prepare_sweep(str(sweep_file), str(workdir), argv, tracked_by, minutes)
  folder = checkpoint_folder(checkpoint) if checkpoint else None
  parts = build(config, only_samples=mode == "sample")
  if mode in ("train", "sample") and not len(parts.task.train):
    raise ValueError(
      "config.task has no training problems; name a split for training in config.task.kwargs, or"
      " only evaluate with --mode=eval"
    )
  if mode == "train":
    return functools.partial(train, parts, str(workdir), profile=profile, tracked_by=tracked_by)
  if mode == "sample":
    return functools.partial(sample, parts, str(workdir))
  action = evaluate_checkpoint if mode == "eval" else export
  return functools.partial(action, parts, str(workdir), folder)


def _prepare_sweep(
  file: str,
  workdir: str,
  argv: Sequence[str],
  tracked_by: Sequence[str],
  minutes: float | None = None,
) -> Callable[[], object]:
  """Reads the configuration of every run; a run itself reports errors that reading cannot find."""
  overrides = config_file.texts("config", argv)
  trusting, recipe = config_file.is_trusting(argv), config_file.recipe_path(argv)
  runs = sweep.read_runs(file, recipe, overrides, workdir, trusting=trusting)
  more = [f"--trackers={','.join(tracked_by)}"] if tracked_by else []
  more += ["--trust_run"] * trusting
  return functools.partial(sweep.sweep, runs, workdir, more=more, minutes=minutes)


def _prepare_ahead_of_time(
  mode: str,
  config: ml_collections.ConfigDict,
  workdir: str | None,
  topology: str | None,
  lengths: str,
) -> Callable[[], object]:
  """Prepares fits, costs or tune, which need only shapes: no data, checkpoint or chips."""
  # Lengths are drawn here once, so that impossible lengths are found before anything is built.
  workload.parse_lengths(lengths, config.environment).draw(batch_shape(config), 0)
  if topology is not None:
    chips.find_chip(topology)
  if mode == "fits":
    return ahead_of_time.fits(config, topology)
  if topology is None:
    raise ValueError(
      f"--mode={mode} needs --topology, the TPU slice to compile for, such as v5p:2x2x4"
    )
  folder = None if workdir is None else parse_path("--workdir", workdir, must_be_on_disk=True)
  if mode == "costs":
    return ahead_of_time.costs(config, topology, folder, lengths=lengths)
  if folder is None:
    raise ValueError("--mode=tune needs --workdir, a folder for the results of its compilations")
  schedule = make_schedule(config.schedule, num_updates=config.num_updates, seed=config.seed)
  if schedule.threaded or generates_separately(config.generation_mesh):
    raise ValueError(
      "--mode=tune needs a run whose generation and updates take turns on all chips, but"
      f" config.schedule = {config.schedule!r} and config.generation_mesh ="
      f" {config.generation_mesh.to_dict()}. If the schedule samples during updates, set"
      " --config.schedule='on_policy()'; if generation has devices of its own, set the sizes of"
      " config.generation_mesh to 0"
    )
  programs.make_topology_mesh(config.mesh, topology)
  return functools.partial(tune, config, topology, folder, lengths=lengths)
