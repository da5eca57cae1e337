"""NVIDIA GPUs for which XLA compiles on a machine without a GPU.

jax's CUDA plugin compiles for a GPU from its description. The plugin needs no driver: only the
wheels of the extra `cuda13`.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from jax.experimental import topologies

_PER_HOST = 8  # GPUs of one machine
_WITHOUT_DRIVER = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # the plugin else looks for a driver


class Gpu(NamedTuple):
  """The properties of a GPU, for XLA and `chips.CHIPS`; the comment on `_H100` has the sources."""

  name: str
  capability: tuple[int, int]
  multiprocessors: int
  clock_ghz: float
  memory_bytes: int
  memory_bytes_per_s: int
  link_bytes_per_s: float  # bytes received over NVLink per second
  flops: float  # FLOPs of dense bfloat16 products per second
  l2_bytes: int
  shared_bytes: int  # shared memory of a multiprocessor

  @property
  def memory_gib(self) -> float:
    return self.memory_bytes / 2**30


# The figures of the H100 were read from one, except its link and FLOPs. The others are from
# NVIDIA's data sheets of the A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 (half of NVLink's
# bandwidth of both directions), and from the tables of technical specifications by compute
# capability in the CUDA C++ programming guide, read in November 2026.
_H100 = Gpu(
  name="NVIDIA H100 80GB HBM3",
  capability=(9, 0),
  multiprocessors=132,
  clock_ghz=1.98,
  memory_bytes=84_929_347_584,
  memory_bytes_per_s=3_352_320_000_000,
  link_bytes_per_s=450e9,
  flops=989.4e12,
  l2_bytes=52_428_800,
  shared_bytes=233_472,
)
GPUS = {
  "a100": Gpu(
    name="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    multiprocessors=108,
    clock_ghz=1.41,
    memory_bytes=85_000_000_000,
    memory_bytes_per_s=2_039_000_000_000,
    link_bytes_per_s=300e9,
    flops=312e12,
    l2_bytes=41_943_040,
    shared_bytes=167_936,
  ),
  "h100": _H100,
  "h200": _H100._replace(  # with other memory
    name="NVIDIA H200", memory_bytes=150_000_000_000, memory_bytes_per_s=4_800_000_000_000
  ),
  "b200": _H100._replace(
    name="NVIDIA B200",
    capability=(10, 0),
    multiprocessors=148,
    clock_ghz=1.965,
    memory_bytes=192_000_000_000,
    memory_bytes_per_s=8_000_000_000_000,
    link_bytes_per_s=900e9,
    flops=2250e12,
    l2_bytes=132_644_864,
  ),
}


def is_gpu(topology: str) -> bool:
  """Whether a topology such as "h100:8" names GPUs."""
  return topology.partition(":")[0] in GPUS


def gpu_devices(topology: str) -> list[Any]:
  """Descriptions of the GPUs of one machine, or of several machines with eight GPUs each.

  Args:
    topology: kind and number, such as "h100:8".
  Raises:
    ValueError: the number of GPUs is not possible, or the compiler is not installed.
  """
  kind, _, text = topology.partition(":")
  number = int(text) if re.fullmatch(r"\d{1,6}", text) else 0
  if not number or (number > _PER_HOST and number % _PER_HOST):
    raise ValueError(
      f"--topology={topology}: give a number of GPUs, 1 to {_PER_HOST} or a multiple of"
      f" {_PER_HOST}, such as {kind}:1 or {kind}:8"
    )
  os.environ.setdefault(_WITHOUT_DRIVER, "1")  # read when the plugin is loaded
  hosts, on_each = -(-number // _PER_HOST), min(number, _PER_HOST)
  try:
    described = topologies.get_topology_desc(
      platform="cuda", target_config=_describe(GPUS[kind]), topology=f"{hosts}x1x{on_each}"
    )
    return list(described.devices)
  except Exception as error:  # the plugin's errors have no common class
    raise ValueError(
      f"cannot compile for --topology={topology}: {str(error)[:300]}. pip install"
      ' "rlvr_jax[cuda13]" installs the compiler, which needs no GPU'
    ) from error


def _describe(gpu: Gpu) -> str:
  """The description of a GPU in XLA's text format."""
  major, minor = gpu.capability
  return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {gpu.multiprocessors}  fpus_per_core: {64 if major == 8 else 128}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}  memory_bandwidth: {gpu.memory_bytes_per_s}
  l2_cache_size: {gpu.l2_bytes}
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {gpu.shared_bytes - 1024}
  shared_memory_per_core: {gpu.shared_bytes}
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  threads_per_block_limit: 1024  threads_per_core_limit: 2048  threads_per_warp: 32
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{gpu.name}"
"""
