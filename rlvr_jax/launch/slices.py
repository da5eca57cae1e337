"""Finds TPU slices by the names that Google Cloud gives them, and chooses each program's slices.

Source: Google Cloud's documentation of each TPU version and of TPU software versions, read in
November 2026.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from rlvr_jax.launch.run import at_least
from rlvr_jax.launch.shell import LaunchError


class _Kind(NamedTuple):
  runtime: str  # software version of TPU VMs
  per_chip: int  # the name's number per chip: 2 if the name counts cores, 1 if it counts chips
  largest_host: int  # chips of the largest slice with one host
  sizes: tuple[int, ...]  # the possible numbers of chips of a slice


_FLAT = (1, 4, 8, 16, 32, 64, 128, 256)
_CUBES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
_KINDS = {
  "v4": _Kind("tpu-ubuntu2204-base", 2, 4, _CUBES),
  "v5litepod": _Kind("v2-alpha-tpuv5-lite", 1, 8, _FLAT),
  "v5p": _Kind("v2-alpha-tpuv5", 2, 4, _CUBES),
  "v6e": _Kind("v2-alpha-tpuv6e", 1, 8, _FLAT),
}
_CHIPS_PER_HOST = 4  # in slices with several hosts


class Slice(NamedTuple):
  """A TPU slice."""

  name: str  # the name in Cloud's spelling
  chips: int
  hosts: int
  runtime: str  # software version of TPU VMs


class Machines(NamedTuple):
  """The machines of one program."""

  slice: Slice
  num_slices: int
  spot: bool  # cheaper, but preempted at any time

  def __str__(self) -> str:
    return (
      f"{self.num_slices} × {self.slice.name}, {self.num_slices * self.slice.chips} chips in all,"
      f" {self.num_slices * self.slice.hosts} hosts{', spot' * self.spot}"
    )

  def price_class(self) -> str:
    """How the chips are billed, in words; prices differ by region and change."""
    kind = self.slice.name.partition("-")[0]
    return (
      f"{self.num_slices * self.slice.chips} chips × hours at the price of"
      f" {'spot' if self.spot else 'on-demand'} {kind}"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of targets whose programs have slices."""
  add = parser.add_argument
  add("--zone", required=True, help="such as us-west4-a")
  add("--project", default="", help="default: gcloud's project")
  add("--type", default="", help="slice in Cloud's spelling: v5litepod-64, v5p-32; for start")
  text = "number of slices; must divide config.mesh.data"
  add("--num_slices", type=at_least(1), default=1, help=text)
  add("--sampler_type", default="", help="slice of each sampler; default: --type")
  text = "cheaper machines, preempted at any time: for all programs, or for samplers only"
  add("--spot", nargs="?", choices=("all", "samplers"), const="all", help=text)
  add("--allow_dirty", action="store_true", help="ship uncommitted changes too")


def machines_of(args: argparse.Namespace, *, count: int) -> list[Machines]:
  """The machines of a run, and then each sampler's machines.

  Args:
    args: flags of `add_flags`.
    count: number of programs, including the run.
  Raises:
    LaunchError: a slice is unknown, or a flag of samplers is given without samplers.
  """
  given = [f"--sampler_type={args.sampler_type}"] if args.sampler_type else []
  given += ["--spot=samplers"] if args.spot == "samplers" else []
  if given and args.samplers is None:
    raise LaunchError(f"{given[0]} needs samplers: add --samplers=N")
  run = Machines(find_slice(args.type), args.num_slices, args.spot == "all")
  sampler = run
  if args.samplers is not None:
    flag = "--sampler_type" if args.sampler_type else "--type"
    sampler = Machines(find_slice(args.sampler_type or args.type, flag), 1, args.spot is not None)
  return [run, *[sampler] * (count - 1)]


def find_slice(name: str, flag: str = "--type") -> Slice:
  """The slice with a name in Cloud's spelling, such as v5litepod-64 or v5p-32.

  Args:
    name: the name of the slice.
    flag: the flag that gives the name; error messages quote it.
  Raises:
    LaunchError: the name is unknown; the message has the allowed names.
  """
  kind, _, units = name.partition("-")
  if kind == "v5e":
    raise LaunchError(f"{flag}={name}: Google Cloud calls it {name.replace('v5e', 'v5litepod')}")
  if kind not in _KINDS:
    allowed = ", ".join(f"{k}-…" for k in _KINDS)
    raise LaunchError(f"{flag}={name} is unknown; allowed: {allowed}")
  runtime, per_chip, largest_host, sizes = _KINDS[kind]
  chips_by_units = {str(chips * per_chip): chips for chips in sizes}
  if units not in chips_by_units:
    allowed = ", ".join(f"{kind}-{units}" for units in chips_by_units)
    raise LaunchError(f"{flag}={name} is unknown; allowed: {allowed}")
  chips = chips_by_units[units]
  return Slice(name, chips, 1 if chips <= largest_host else chips // _CHIPS_PER_HOST, runtime)
