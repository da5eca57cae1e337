"""A fleet: a trainer and samplers that meet in its workdir, launched together.

A sampler is a run of its own, with a name, flags and machines. What starts, watches and ends a run
does so for samplers too. What `scale` needs to know of a run is noted in the run's folder.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from rlvr_jax.launch.run import Run, parse_flags
from rlvr_jax.launch.shell import LaunchError
from rlvr_jax.launch.slices import find_slice
from rlvr_jax.launch.supervise import replace_text

# Fields that a sampler may have otherwise than the trainer: those of `train.fleet.roles`, which a
# test compares.
OF_A_SAMPLER = (
  *("mesh", "generation_mesh", "compiler_options", "sampling.slots", "logging"),
  *("grading.num_workers", "environment.processes", "generation_deadline_s"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("--samplers", type=int, help="programs that sample for this run; for start and scale")
  text = "FIELD=VALUE of the configuration, for samplers only, such as mesh.tensor=4"
  add("--sampler_config", action="append", default=[], help=text)
  add("--sampler", type=int, help="for logs: of this sampler, instead of the trainer")


def add_slice_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of targets whose programs have slices."""
  add = parser.add_argument
  add("--sampler_type", default="", help="slice of each sampler, such as v5litepod-16; for start")
  text = "cheaper, but preempted at any time: all machines, or those of the samplers"
  add("--spot", nargs="?", choices=("all", "samplers"), const="all", help=text)


def sampler_name(run: Run, number: int | str) -> str:
  """The name of a sampler of a run; `number`: from 0, or what stands for any."""
  return f"{run.name}-sampler-{number}"


def sampler_of(run: Run, number: int | str, args: argparse.Namespace) -> Run:
  """A sampler of a trainer's run; `number`: as of `sampler_name`."""
  workdir = f"--workdir={parse_flags(run.flags)['workdir']}"
  fields = (f"--config.{pair}" for pair in args.sampler_config)
  # The run's configuration is that of the trainer, which the same person starts.
  flags = ("--mode=sample", "--trust_run", workdir, *fields)
  return run._replace(name=sampler_name(run, number), flags=flags)


def with_slice_of_sampler(args: argparse.Namespace) -> argparse.Namespace:
  """The flags of a launch, with those of a sampler's slice in place of the trainer's."""
  own: dict[str, Any] = {"type": args.sampler_type, "num_slices": 1}
  own["spot"] = "all" if args.spot else None
  return argparse.Namespace(**vars(args) | own)


def chosen(run: Run, number: int) -> Run:
  """A sampler of a run by its number, for commands that need its name alone."""
  return run._replace(name=sampler_name(run, number))


def write_note(run: Run, name: str, text: str) -> None:
  """Notes on this machine what `scale` needs to know of a run."""
  run.folder.mkdir(parents=True, exist_ok=True)
  replace_text(run.folder / name, text)


def read_note(run: Run, name: str) -> str:
  """What `write_note` has noted under this name.

  Raises:
    LaunchError: this machine has not started the run with samplers.
  """
  try:
    return (run.folder / name).read_text()
  except FileNotFoundError:
    raise LaunchError(
      f"{run.name} was not started with --samplers on this machine: give this command where it was"
    ) from None


def trainer_of(run: Run, args: argparse.Namespace) -> Run:
  """A run as started with --samplers, which trains on what they sample; without, the run itself.

  Raises:
    LaunchError: the flags do not go together.
  """
  _check_samplers(args)
  if args.samplers is None:
    given = [f"--sampler_config={pair}" for pair in args.sampler_config]
    given += [f"--sampler_type={args.sampler_type}"] if vars(args).get("sampler_type") else []
    given += ["--spot=samplers"] if vars(args).get("spot") == "samplers" else []
    if given:
      raise LaunchError(f"{given[0]} is for samplers: add --samplers=N")
    return run
  if "sampler_type" in args:
    find_slice(args.sampler_type, "--sampler_type")
  values = parse_flags(run.flags)
  if (mode := values.get("mode", "train")) != "train":
    raise LaunchError(
      f"--samplers={args.samplers} goes with --mode=train, not with --mode={mode}: leave it out"
    )
  if "workdir" not in values:
    raise LaunchError("--workdir is missing: samplers meet their trainer in it")
  if (given := _field(run, "fleet.samplers")) not in (None, "True", "true", "1"):
    raise LaunchError(
      f"--config.fleet.samplers={given} is of a run that samples by itself, but --samplers ="
      f" {args.samplers}: leave out one of them"
    )
  schedule = _field(run, "schedule")
  if schedule is not None and not re.match(r"asynchronous\b|.*:", schedule):  # or a user's own
    raise LaunchError(
      f"--config.schedule={schedule} has no real-time bound, which --samplers needs: set it to"
      " asynchronous(max_lag=4), or leave out --samplers"
    )
  for pair in args.sampler_config:
    name, _, value = pair.partition("=")
    if not value or not any(
      name == field or name.startswith(f"{field}.") for field in OF_A_SAMPLER
    ):
      raise LaunchError(
        f"--sampler_config={pair}: write FIELD=VALUE with a field of {', '.join(OF_A_SAMPLER)}; the"
        " others are the trainer's"
      )
  commit = {} if run.package is None else {"RLVR_JAX_COMMIT": run.package.version}
  return run._replace(
    flags=(*run.flags, "--config.fleet.samplers=True"), environment={**commit, **run.environment}
  )


def check_scale(args: argparse.Namespace) -> None:
  """Raises LaunchError if `scale` is not told how many samplers there are to be."""
  if args.samplers is None:
    raise LaunchError("scale needs --samplers=N, how many there are to be")
  _check_samplers(args)


def _check_samplers(args: argparse.Namespace) -> None:
  if args.samplers is not None and args.samplers < 0:
    raise LaunchError(f"--samplers={args.samplers}: give a number of samplers, 0 or more")


def _field(run: Run, name: str) -> str | None:
  """The value of a configuration's field in the run's flags, the last one; None if it has none."""
  start = f"--config.{name}="
  found = [flag.removeprefix(start) for flag in run.flags if flag.startswith(start)]
  return found[-1] if found else None
