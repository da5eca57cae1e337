"""Published peak performance of TPU chips and of GPUs."""

from __future__ import annotations

from typing import NamedTuple

from rlvr_jax.costs.gpus import GPUS


class Chip(NamedTuple):
  """Published peak rates and memory of one jax device, which is a chip or a core of a chip."""

  flops: float  # FLOPs of bfloat16 matrix products per second
  hbm_bytes_per_s: float  # bytes read and written
  interconnect_bytes_per_s: float  # bytes received from other chips, over all links together
  hbm_gib: float  # memory that XLA may use
  flops_per_cycle: float | None  # of bfloat16 matrix products; None: the compiler gives no cycles

  @property
  def cycles_per_s(self) -> float | None:
    """Cycles per second; None if the compiler gives no cycle counts to convert to seconds."""
    return None if self.flops_per_cycle is None else self.flops / self.flops_per_cycle


def _halve(chip: Chip) -> Chip:
  """Returns the peaks of one core of a chip whose two cores are separate devices."""
  return Chip(
    flops=chip.flops / 2,
    hbm_bytes_per_s=chip.hbm_bytes_per_s / 2,
    interconnect_bytes_per_s=chip.interconnect_bytes_per_s / 2,
    hbm_gib=chip.hbm_gib / 2,
    flops_per_cycle=chip.flops_per_cycle and chip.flops_per_cycle / 2,
  )


# Peaks of one device, by the first part of a topology's name. Source: Google Cloud's TPU
# documentation of each version (docs.cloud.google.com/tpu/docs/v5p and so on), read in November
# 2026. It gives the interconnect bandwidth of both directions together, 1200 GB/s for a v5p, of
# which one direction is half. A v4 has 6 links of 50 GB/s each way: "TPU v4: An Optically
# Reconfigurable Supercomputer", arXiv 2304.01433. A v5e has 16 GiB; according to libtpu a program
# may use 15.75. FLOPs per cycle are the next power of two above libtpu 0.0.42.1's estimate for a
# product of two matrices of 16384². In the order below, the estimates are 0.94, 0.92, 0.94, 0.78
# and 0.85 of these powers.
CHIPS = {
  "v4": _halve(Chip(275e12, 1200e9, 300e9, 32, 2**18)),
  "v5e": Chip(197e12, 819e9, 200e9, 15.75, 2**17),
  "v5p": Chip(459e12, 2765e9, 600e9, 95, 2**18),
  "v6e": Chip(918e12, 1638e9, 400e9, 32, 2**19),
  "tpu7x": _halve(Chip(2307e12, 7380e9, 600e9, 192, 2**20)),
  # Each GPU is a device. By default jax takes three quarters of a GPU's memory.
  **{
    name: Chip(gpu.flops, gpu.memory_bytes_per_s, gpu.link_bytes_per_s, 0.75 * gpu.memory_gib, None)
    for name, gpu in GPUS.items()
  },
}


def find_chip(topology: str) -> Chip:
  """The peaks of one device of a topology, such as the TPU slice "v5e:4x4" or the GPUs "h100:8".

  Raises:
    ValueError: no peaks are known for devices of this kind.
  """
  kind = topology.partition(":")[0]
  if kind not in CHIPS:
    raise ValueError(
      f"--topology={topology}: peak FLOP/s and bytes/s of chip {kind!r} are not known; allowed"
      f" are {sorted(CHIPS)}, each with a size: v5e:4x4, h100:8"
    )
  return CHIPS[kind]
