"""A run to launch: its name, package and flags, checks of them, and the command on each host."""

from __future__ import annotations

import argparse
import os
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from rlvr_jax.launch.package import Package
from rlvr_jax.launch.shell import LaunchError

STOPPED = 143  # 128 + SIGTERM, after a requested shutdown; xpk restarts statuses 127 to 255
EXTRAS = "tpu,hf,gcs,math"  # of setup.py; installed on TPU machines
SHARED = "/mnt/rlvr_jax"  # mount point of the file system that all hosts share


class Run(NamedTuple):
  """A run to launch, or a launched run."""

  name: str
  flags: tuple[str, ...]  # of rlvr_jax.main
  environment: Mapping[str, str]
  retries: int  # after preemptions or failures
  package: Package | None  # None: nothing is shipped

  @property
  def is_sweep(self) -> bool:
    """Whether it is a sweep, whose one process starts a process for each of its runs."""
    return parse_flags(self.flags).get("mode") == "sweep"

  @property
  def is_sampler(self) -> bool:
    """Whether it samples for another run, its trainer."""
    return parse_flags(self.flags).get("mode") == "sample"

  @property
  def folder(self) -> pathlib.Path:
    """Its folder on this machine, for what launch notes about it."""
    base = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
    return pathlib.Path(base) / "rlvr_jax" / "launch" / self.name

  def program_command(self, python: str, *place: str) -> list[str]:
    """The command that a host runs.

    Args:
      python: the host's interpreter.
      place: flags that identify the process; by default the cluster identifies it.
    """
    status = f"--stopped_status={STOPPED}"
    place_flags = () if self.is_sweep else place or ("--distributed",)
    return [python, "-m", "rlvr_jax.main", *place_flags, status, *self.flags]


def parse_name(name: str) -> str:
  """Parses a run's name, which systemd, TPU VMs and Kubernetes must accept; for argparse."""
  if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
    raise argparse.ArgumentTypeError(
      f"{name!r}: use up to 40 small letters, digits and hyphens, beginning with a letter"
    )
  return name


def parse_environment(pairs: list[str]) -> dict[str, str]:
  """Parses the NAME=VALUE pairs of the command line.

  Raises:
    LaunchError: a pair has another form.
  """
  if invalid_pairs := [pair for pair in pairs if not re.match(r"[A-Za-z_]\w*=", pair)]:
    raise LaunchError(f"--env={invalid_pairs[0]}: write --env=NAME=VALUE")
  return dict(pair.split("=", 1) for pair in pairs)


def check_flags(flags: tuple[str, ...], package: Package, *, on_hosts: bool) -> None:
  """Raises LaunchError if the program's flags cannot work on the hosts.

  Args:
    flags: of rlvr_jax.main.
    package: the files to ship.
    on_hosts: whether the hosts are other machines, which need an absolute workdir.
  """
  values = parse_flags(flags)
  if "config" not in values:
    raise LaunchError(
      "--config is missing: give the program's flags after --, such as"
      " -- --config=configs/quickstart.py --workdir=…"
    )
  path = values["config"].partition(":")[0]
  if not pathlib.PurePath(path).is_absolute() and path not in package.files:
    raise LaunchError(
      f"--config={path} is not in the commit: add it with git, and give its path from the root of"
      " the checkout"
    )
  if pathlib.PurePath(path).is_absolute() and on_hosts:
    raise LaunchError(f"--config={path}: give its path from the root of the checkout")
  if "sweep" in values and values["sweep"] not in package.files:
    raise LaunchError(
      f"--sweep={values['sweep']} is not in the commit: add it with git, and give its path from the"
      " root of the checkout"
    )
  workdir = values.get("workdir", SHARED)
  if "://" in workdir and not workdir.startswith("gs://") and values.get("mode") != "export":
    raise LaunchError(
      f"--workdir={workdir} is a URL, which only --mode=export writes: give gs://BUCKET/FOLDER, or"
      " a folder of a file system that all hosts share, such as"
      f" {SHARED}/runs/{pathlib.PurePath(workdir).name}"
    )
  if "://" not in workdir and on_hosts and not pathlib.PurePath(workdir).is_absolute():
    raise LaunchError(
      f"--workdir={workdir} is relative: every host needs the same folder, such as"
      f" {SHARED}/runs/{pathlib.PurePath(workdir).name}"
    )


def check_sweep(run: Run, hosts: int) -> None:
  """Raises LaunchError if the run is a sweep and would have several hosts."""
  if run.is_sweep and hosts > 1:
    raise LaunchError(
      f"--mode=sweep runs on one host, these are {hosts}: choose a --type with one host, such as"
      " v5litepod-8 or v5p-8, or launch each run by itself"
    )


def check_shared(run: Run, owner: str, share: str) -> None:
  """Raises LaunchError if the workdir needs a shared file system that is not mounted.

  Args:
    run: to be started.
    owner: the flag that names the file system to mount.
    share: the flag's value; "" for none.
  """
  workdir = parse_flags(run.flags).get("workdir", "")
  if pathlib.PurePath(workdir).is_relative_to(SHARED) and not share:
    raise LaunchError(
      f"--workdir={workdir} is on a file system that is not mounted: add {owner}, or give a folder"
      " of a bucket, gs://BUCKET/FOLDER, which needs no mount"
    )


def parse_flags(flags: tuple[str, ...]) -> dict[str, str]:
  """Parses the program's flags into values by name."""
  return dict(flag[2:].split("=", 1) for flag in flags if re.match("--[a-z_]+=", flag))
