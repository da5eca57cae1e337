"""TPU slices by Cloud's names, with the names that Kubernetes and TPU VMs use.

Source: Google Cloud's documentation of each TPU version, of TPU software versions, and of TPUs in
GKE, read in November 2026.
"""

from __future__ import annotations

from typing import NamedTuple

from rlvr_jax.launch.shell import LaunchError


class _Kind(NamedTuple):
  runtime: str  # software version of TPU VMs
  accelerator: str  # label of GKE's nodes
  per_chip: int  # units that the name counts: 2 cores per chip, or 1 chip
  largest_host: int  # chips of the largest slice with one host
  topologies: tuple[str, ...]


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
_KINDS = {
  "v4": _Kind("tpu-ubuntu2204-base", "tpu-v4-podslice", 2, 4, _CUBES),
  "v5litepod": _Kind("v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", 1, 8, _FLAT),
  "v5p": _Kind("v2-alpha-tpuv5", "tpu-v5p-slice", 2, 4, _CUBES),
  "v6e": _Kind("v2-alpha-tpuv6e", "tpu-v6e-slice", 1, 8, _FLAT),
}
_CHIPS_PER_HOST = 4  # of slices with several hosts


class Slice(NamedTuple):
  """A TPU slice."""

  name: str  # in Cloud's spelling
  chips: int
  hosts: int
  topology: str  # such as 2x2x4
  accelerator: str  # GKE's label
  runtime: str  # software version of TPU VMs

  @property
  def chips_per_host(self) -> int:
    return self.chips // self.hosts


def find_slice(name: str, flag: str = "--type") -> Slice:
  """Finds the slice with a name in Cloud's spelling, such as v5litepod-64 or v5p-32.

  Args:
    name: of the slice.
    flag: that gives the name, for the message.
  Raises:
    LaunchError: the name is unknown; the message has the allowed names.
  """
  by_name = {s.name: s for kind, k in _KINDS.items() for s in _make_slices(kind, k)}
  if name in by_name:
    return by_name[name]
  kind = name.partition("-")[0]
  if kind == "v5e":
    raise LaunchError(f"{flag}={name}: Cloud spells it {name.replace('v5e', 'v5litepod')}")
  allowed = [s for s in by_name if s.startswith(f"{kind}-")] or [f"{k}-…" for k in _KINDS]
  raise LaunchError(f"{flag}={name} is unknown; allowed: {', '.join(allowed)}")


def _make_slices(name: str, kind: _Kind) -> list[Slice]:
  slices = []
  for topology in kind.topologies:
    chips = 1
    for length in topology.split("x"):
      chips *= int(length)
    hosts = 1 if chips <= kind.largest_host else chips // _CHIPS_PER_HOST
    label = f"{name}-{chips * kind.per_chip}"
    slices.append(Slice(label, chips, hosts, topology, kind.accelerator, kind.runtime))
  return slices
