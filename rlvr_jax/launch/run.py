"""Names, flags and commands of the programs to launch: a run, and the samplers of its fleet."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rlvr_jax.launch.shell import LaunchError

STOPPED = 143  # exit status 128 + SIGTERM, after a requested shutdown; xpk restarts 127 to 255


class Run(NamedTuple):
  """A program to launch: a run, or a sampler, which is launched like a run."""

  name: str
  flags: tuple[str, ...]  # flags of rlvr_jax.main
  environment: Mapping[str, str]
  retries: int  # number of restarts after preemptions or failures

  @property
  def is_sweep(self) -> bool:
    """Whether the program is a sweep, whose one process starts a process for each run."""
    return parse_flags(self.flags).get("mode") == "sweep"

  def command(self, python: str, *place: str) -> list[str]:
    """The command of one process.

    Args:
      python: the Python interpreter of the host.
      place: flags that connect the process to the program's other processes; ignored for a sweep.
    """
    own = () if self.is_sweep else place
    return [python, "-m", "rlvr_jax.main", *own, f"--stopped_status={STOPPED}", *self.flags]


def programs_of(run: Run, samplers: int | None, sampler_config: Sequence[str]) -> list[Run]:
  """The programs of a launch: the run, and then the samplers that it trains with.

  Args:
    run: the run that the user has described.
    samplers: number of samplers; None for a run that samples by itself.
    sampler_config: FIELD=VALUE pairs of the configuration, for samplers only.
  Raises:
    LaunchError: the flags do not go together.
  """
  values = parse_flags(run.flags)
  mode = values.get("mode", "train")
  if "config" not in values and mode != "sample":
    raise LaunchError(
      "--config is missing: give the program's flags after --, such as"
      " -- --config=configs/quickstart.py --workdir=…"
    )
  if samplers is None:
    if sampler_config:
      raise LaunchError(f"--sampler_config={sampler_config[0]} needs samplers: add --samplers=N")
    return [run]
  if samplers < 0:
    raise LaunchError(f"--samplers={samplers}: give a number of samplers, 0 or more")
  if mode != "train":
    raise LaunchError(f"--samplers={samplers} goes with --mode=train, not with --mode={mode}")
  if "workdir" not in values:
    raise LaunchError("--workdir is missing: samplers and trainer exchange files in this folder")
  trainer = run._replace(flags=(*run.flags, "--config.fleet.samplers=True"))
  # A sampler takes the trainer's configuration from the workdir; the same person starts both.
  flags = ("--mode=sample", "--trust_run", f"--workdir={values['workdir']}")
  flags += tuple(f"--config.{pair}" for pair in sampler_config)
  names = (sampler_name(run.name, number) for number in range(samplers))
  return [trainer, *(run._replace(name=name, flags=flags) for name in names)]


def sampler_name(name: str, number: int | str) -> str:
  """The name of a run's sampler; `number` counts from 0, or is a placeholder for any number."""
  return f"{name}-sampler-{number}"


def parse_name(name: str) -> str:
  """Parses a run's name; for argparse.

  systemd, TPU VMs and xpk must accept the name, also with a sampler's number after it.
  """
  if not re.fullmatch(r"[a-z]([-a-z0-9]{0,26}[a-z0-9])?", name):
    raise argparse.ArgumentTypeError(
      f"{name!r}: use up to 28 lowercase letters, digits and hyphens, with a letter first and no"
      " hyphen last"
    )
  return name


def at_least(low: int) -> Callable[[str], int]:
  """A parser of integers of at least `low`; for argparse."""

  def parse(text: str) -> int:
    if not re.fullmatch(r"-?\d+", text) or int(text) < low:
      raise argparse.ArgumentTypeError(f"{text!r}: give an integer, {low} or more")
    return int(text)

  return parse


def parse_environment(pairs: list[str]) -> dict[str, str]:
  """Parses the NAME=VALUE pairs of the command line.

  Raises:
    LaunchError: a pair is not NAME=VALUE.
  """
  if invalid_pairs := [pair for pair in pairs if not re.match(r"[A-Za-z_]\w*=", pair)]:
    raise LaunchError(f"--env={invalid_pairs[0]}: write --env=NAME=VALUE")
  return dict(pair.split("=", 1) for pair in pairs)


def parse_flags(flags: tuple[str, ...]) -> dict[str, str]:
  """Parses the program's flags into values by name."""
  return dict(flag[2:].split("=", 1) for flag in flags if re.match("--[a-z_]+=", flag))
