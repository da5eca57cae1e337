"""Seconds to publish a policy for samplers and to restore it, next to what the disk gives.

  python experiments/benchmarks/publish.py
  python experiments/benchmarks/publish.py --scratch=/mnt/disk

In turn, a few times: a policy of 1 GB in float32 is published, and the same bytes are written into
a file per array, by threads, each to the disk (fsync). Then the policy is restored, and those files
are read, both with their pages dropped from the system's cache. Publishing includes checksums and
the copy that the trainer may not change; restoring includes the check of every sum. `sums` is that
part of both, which an accelerator does in milliseconds; the ratios are with it. The table is
printed and written to results/publish_BACKEND.md, with a .json file next to it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from absl import app, flags

from rlvr_jax.train.cluster.process import keep_freed_memory

keep_freed_memory()

import jax
import numpy as np

from experiments.benchmarks.page_cache import drop_from_cache
from experiments.benchmarks.tables import Row, hardware, write_results
from rlvr_jax.configs import quickstart
from rlvr_jax.ops.checksums import checksums
from rlvr_jax.train.fleet.policies import (
  Policy,
  PolicyPublisher,
  PolicyReader,
  abstract_policy,
)
from rlvr_jax.train.setup.build import build
from rlvr_jax.types import Params

_THREADS = 16
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measurements of each kind.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 15, "Layers of 67 MB.", lower_bound=1)
_SCRATCH = flags.DEFINE_string("scratch", None, "Folder where the policies are written.")
_FOLDER = flags.DEFINE_string(
  "folder", str(pathlib.Path(__file__).parent / "results"), "Folder for the table."
)


def write_to_disk(folder: pathlib.Path, arrays: list[np.ndarray]) -> float:
  """Seconds to write each array into a file of its own, and to the disk."""
  folder.mkdir(exist_ok=True)

  def write(index: int) -> None:
    with open(folder / str(index), "wb", buffering=0) as file:
      file.write(memoryview(arrays[index]).cast("B"))
      os.fsync(file.fileno())

  began = time.perf_counter()
  with ThreadPoolExecutor(_THREADS) as pool:
    list(pool.map(write, range(len(arrays))))
  return time.perf_counter() - began


def read_from_disk(folder: pathlib.Path, arrays: list[np.ndarray]) -> float:
  """Seconds to read these files into new arrays."""

  def read(index: int) -> np.ndarray:
    found = np.empty_like(arrays[index])
    with open(folder / str(index), "rb", buffering=0) as file:
      file.readinto(memoryview(found).cast("B"))
    return found

  began = time.perf_counter()
  with ThreadPoolExecutor(_THREADS) as pool:
    list(pool.map(read, range(len(arrays))))
  return time.perf_counter() - began


def measure(rounds: int, layers: int, scratch: pathlib.Path) -> list[Row]:
  config = quickstart.get_config()
  config.model.overrides = dict(
    num_layers=layers, width=1024, num_heads=8, num_kv_heads=8, head_dim=128, mlp_width=4096
  )
  parts = build(config)
  params: Params = parts.initial.trained()
  arrays = [np.asarray(x) for x in jax.tree.leaves(params)]
  policies, plain = scratch / "policies", scratch / "plain"
  network, adapters_only = parts.model.config, parts.lora is not None
  trained, mesh = parts.placement.state.params, parts.placement.mesh
  abstract = abstract_policy(trained, network, mesh, adapters_only=adapters_only)
  reader = PolicyReader(policies, abstract)
  rows: list[Row] = []
  with contextlib.closing(
    PolicyPublisher(policies, network, adapters_only=adapters_only)
  ) as publisher:
    for number in range(rounds + 1):
      policy = Policy(number, f"{number:016x}")
      written = write_to_disk(plain, arrays)
      began = time.perf_counter()
      publisher.publish(params, policy)
      waited = time.perf_counter() - began
      publisher.wait()
      published = time.perf_counter() - began
      drop_from_cache(scratch)
      read = read_from_disk(plain, arrays)
      restoring = reader.restore(policy)
      began = time.perf_counter()
      jax.block_until_ready(checksums(params))
      sums = time.perf_counter() - began
      if number:  # the first round compiles
        rows.append(
          {
            "round": number,
            "GB": restoring.bytes / 1e9,
            "sums, s": sums,
            "trainer waits, s": waited,
            "published, s": published,
            "written, s": written,
            "published / written": published / written,
            "restored, s": restoring.seconds,
            "read, s": read,
            "restored / read": restoring.seconds / read,
          }
        )
      del restoring
  return rows


def main(argv: list[str]) -> None:
  del argv
  with tempfile.TemporaryDirectory(dir=_SCRATCH.value) as scratch:
    rows = measure(_ROUNDS.value, _LAYERS.value, pathlib.Path(scratch))
  medians = {name: float(np.median([row[name] for row in rows])) for name in rows[0]}
  rows.append({**medians, "round": "median"})
  command = " ".join(["python experiments/benchmarks/publish.py", *sys.argv[1:]])
  path = pathlib.Path(_FOLDER.value) / f"publish_{jax.default_backend()}"
  conditions = {"hardware": hardware(), "jax": jax.__version__, "command": command}
  print(write_results(path, "Policies of a fleet, published and restored", rows, conditions))


if __name__ == "__main__":
  app.run(main)
