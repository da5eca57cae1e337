"""Seconds and host memory of loading a checkpoint of published shape with random weights.

  python experiments/benchmarks/load_checkpoint.py
  python experiments/benchmarks/load_checkpoint.py --overrides='{"num_layers": 2}' --folder=/tmp/out

The checkpoint is written in bfloat16, as one file and in shards, then loaded to float32 parameters
by a separate process: first from the disk, with its pages dropped from the system's page cache, and
then from that cache. On a CPU parameters are themselves host memory, so the benchmark measures the
peak of the process's private memory (RssAnon, sampled) beyond its initial memory and the final
parameters; the system can drop pages of mapped files. The limit is twice the largest tensor of the
file. The table is printed and written to results/load_checkpoint_BACKEND.md, with a .json file next
to it.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from absl import app, flags

from rlvr_jax.train.cluster.process import keep_freed_memory

keep_freed_memory()

import jax
import ml_dtypes
import numpy as np

from experiments.benchmarks.page_cache import drop_from_cache
from experiments.benchmarks.tables import Row, hardware, write_results
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface import load_params
from rlvr_jax.models.huggingface_config import checkpoint_config
from rlvr_jax.models.huggingface_export import published_config
from rlvr_jax.models.huggingface_tensors import find_published
from rlvr_jax.models.presets import preset
from rlvr_jax.models.safetensors import open_checkpoint, write_checkpoint
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.storage.folders import new_directory, write_bytes
from rlvr_jax.train.cluster.sharding import add_shardings, make_mesh
from rlvr_jax.types import Params

_LIMIT = 2.0  # in largest tensors
_SAMPLING_INTERVAL_S = 0.002
_POOL = 2**24  # random numbers that all tensors repeat
NOTES = """bfloat16 files to float32 parameters. `peak beyond`: private memory at its peak,
without what the process had before and without the final parameters. `in largest tensors`: the
same, in sizes of the checkpoint's largest tensor as it is in the file. At most 2 are allowed."""

_PRESET = flags.DEFINE_string("preset", "qwen2.5_1.5b", "A preset of rlvr_jax.models.presets.")
_OVERRIDES = flags.DEFINE_string("overrides", "{}", "JSON: fields of the preset to replace.")
_SHARD_MIB = flags.DEFINE_integer("shard_mib", 1024, "Shard size, MiB.", lower_bound=1)
_SCRATCH = flags.DEFINE_string("scratch", None, "Folder where checkpoints are written.")
_LOAD = flags.DEFINE_string("load", None, "Load this directory and print its cost; no table.")
_FOLDER = flags.DEFINE_string(
  "folder", str(pathlib.Path(__file__).parent / "results"), "Folder for the table."
)


def abstract_params(config: TransformerConfig) -> Params:
  shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
  return add_shardings(shapes, make_mesh())


def write_random_checkpoint(
  directory: pathlib.Path, config: TransformerConfig, max_shard_bytes: int
) -> None:
  """Writes a checkpoint of random weights."""
  settings = published_config(config, "bfloat16", None)
  published = find_published(abstract_params(config), config, settings["model_type"])
  shapes = {name: tensor.shape for name, tensor in published.items()}
  pool = np.random.default_rng(0).standard_normal(_POOL, np.float32).astype(ml_dtypes.bfloat16)
  tensors = (np.resize(pool, shape) for shape in shapes.values())
  with new_directory(directory) as (system, folder):
    write_checkpoint(system, folder, shapes, pool.dtype, tensors, max_shard_bytes=max_shard_bytes)
    write_bytes(system, f"{folder}/config.json", json.dumps(settings).encode())


def private_bytes() -> int:
  """Anonymous memory of this process, in bytes."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith("RssAnon:"):
      return int(line.split()[1]) * 1024
  raise OSError("/proc/self/status has no RssAnon; this benchmark needs Linux")


def measure_load(directory: str) -> Row:
  """Loads a checkpoint to float32; returns seconds and bytes."""
  config = checkpoint_config(directory)
  abstract = abstract_params(config)
  jax.block_until_ready(jax.numpy.zeros(8) + 1)  # starts the backend
  before = peak = private_bytes()
  done = threading.Event()

  def sample() -> None:
    nonlocal peak
    while not done.wait(_SAMPLING_INTERVAL_S):
      peak = max(peak, private_bytes())

  sampler = threading.Thread(target=sample)
  sampler.start()
  start = time.perf_counter()
  params = jax.block_until_ready(load_params(directory, abstract, config))
  seconds = time.perf_counter() - start
  done.set()
  sampler.join()
  sizes = [tensor.nbytes for tensor in open_checkpoint(directory).values()]
  parameter_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
  beyond = peak - before - parameter_bytes
  return {
    "seconds": seconds,
    "GB/s": sum(sizes) / seconds / 1e9,
    "checkpoint GB": sum(sizes) / 1e9,
    "parameters GB": parameter_bytes / 1e9,
    "peak beyond GB": beyond / 1e9,
    "largest tensor GB": max(sizes) / 1e9,
    "in largest tensors": beyond / max(sizes),
  }


def measure(config: TransformerConfig, shard_mib: int, scratch: pathlib.Path) -> list[Row]:
  rows: list[Row] = []
  layouts = {"one file": 2**50, f"shards of {shard_mib} MiB": shard_mib * 2**20}
  for layout, max_shard_bytes in layouts.items():
    directory = scratch / layout.replace(" ", "_")
    write_random_checkpoint(directory, config, max_shard_bytes)
    for where in ("disk", "cache"):
      if where == "disk":
        drop_from_cache(directory)
      command = [sys.executable, __file__, f"--load={directory}"]
      process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
      measured = json.loads(process.stdout.splitlines()[-1])
      rows.append({"layout": layout, "from": where} | measured)
    for file in directory.iterdir():
      file.unlink()
  return rows


def write_report(rows: list[Row], folder: pathlib.Path, command: str) -> str:
  """Writes the table and the numbers; returns the table."""
  path = folder / f"load_checkpoint_{jax.default_backend()}"
  conditions = {"hardware": hardware(), "jax": jax.__version__, "command": command}
  return write_results(path, "Loading a checkpoint", rows, conditions, NOTES)


def main(argv: list[str]) -> None:
  del argv
  if _LOAD.value:
    print(json.dumps(measure_load(_LOAD.value)))
    return
  config = preset(_PRESET.value, **json.loads(_OVERRIDES.value))
  with tempfile.TemporaryDirectory(dir=_SCRATCH.value) as scratch:
    rows = measure(config, _SHARD_MIB.value, pathlib.Path(scratch))
  command = " ".join(["python experiments/benchmarks/load_checkpoint.py", *sys.argv[1:]])
  print(write_report(rows, pathlib.Path(_FOLDER.value), command))
  most = max(row["in largest tensors"] for row in rows)
  if most > _LIMIT:
    sys.exit(f"peak private memory beyond the parameters is {most:.2f} largest tensors, above 2")


if __name__ == "__main__":
  app.run(main)
