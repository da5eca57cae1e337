"""The peaks of TPU chips, as Google publishes them."""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
  """The published peaks of one chip, or of the part of it that is one jax device."""

  flops: float  # products of bfloat16 matrices, per second
  hbm_bytes_per_s: float  # read and written together
  interconnect_bytes_per_s: float  # received from other chips over all links together
  hbm_gib: float  # memory that XLA may use


def _two_devices(chip: Chip) -> Chip:
  """Half of a chip: each of its cores is a device of its own."""
  return Chip(*(peak / 2 for peak in chip))


# Peaks of one device, by the first part of a topology's name.
# Source: the pages of each version in Google Cloud's TPU documentation
# (docs.cloud.google.com/tpu/docs/v5p and so on), read in November 2026. They give the interconnect
# in both directions together, 1200 GB/s for a v5p; half of it is received. A v4 has 6 links of
# 50 GB/s each way: "TPU v4: An Optically Reconfigurable Supercomputer", arXiv 2304.01433. A v5e has
# 16 GiB, of which a program may use 15.75 according to libtpu.
CHIPS = {
  "v4": _two_devices(Chip(275e12, 1200e9, 300e9, 32)),
  "v5e": Chip(197e12, 819e9, 200e9, 15.75),
  "v5p": Chip(459e12, 2765e9, 600e9, 95),
  "v6e": Chip(918e12, 1638e9, 400e9, 32),
  "tpu7x": _two_devices(Chip(2307e12, 7380e9, 600e9, 192)),
}


def chip_of(topology: str) -> Chip:
  """The peaks of each device of a slice such as "v5e:4x4".

  Raises:
    ValueError: its peaks are not known.
  """
  kind = topology.partition(":")[0]
  if kind not in CHIPS:
    raise ValueError(
      f"--topology={topology}: the peaks of a chip {kind!r} are not known; allowed:"
      f" {sorted(CHIPS)}, such as v5e:4x4"
    )
  return CHIPS[kind]
