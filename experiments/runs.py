"""What the experiments share: one run as a process, its held-out curve, intervals over seeds."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from rlvr_jax.train.metrics import read_metrics

METRIC = "eval/pass@1"
# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}


def run(
  label: str,
  arguments: Sequence[str],
  *,
  seed: int,
  workdir: pathlib.Path,
  warm_start_of: pathlib.Path | None = None,
) -> dict:
  """One run as a process of its own; its held-out curve, and the seconds that it took in all.

  A finished run is not repeated: its result lies in WORKDIR/result.json.

  Args:
    warm_start_of: the workdir of a run with the same seed and the same warm start, which is taken
      from there.
  """
  result_file = workdir / "result.json"
  if result_file.exists():
    return json.loads(result_file.read_text())
  if warm_start_of is not None and warm_start_of.exists() and not workdir.exists():
    shutil.copytree(warm_start_of / "warm_start", workdir / "warm_start")
  command = [sys.executable, "-m", "rlvr_jax.main", *arguments, f"--config.seed={seed}"]
  print(f"{label}, seed {seed}", file=sys.stderr, flush=True)
  began = time.perf_counter()
  subprocess.run(
    [*command, f"--workdir={workdir}"],
    check=True,
    stdout=subprocess.DEVNULL,
    env={"JAX_PLATFORMS": "cpu", **os.environ},
  )
  seconds = time.perf_counter() - began
  evaluations = [record for record in read_metrics(workdir) if record["phase"] == "eval"]
  fields = {"updates": "step", "pass@1": METRIC, "low": f"{METRIC}_low", "high": f"{METRIC}_high"}
  result = {name: [record[field] for record in evaluations] for name, field in fields.items()}
  result |= {"label": label, "seed": seed, "seconds": round(seconds, 1)}
  result_file.write_text(json.dumps(result))
  return result


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
  """Mean over seeds, and half of its 95 % interval by Student's t."""
  spread = statistics.stdev(values) / len(values) ** 0.5
  return statistics.mean(values), T_QUANTILES[len(values) - 1] * spread


def check_seeds(num_seeds: int) -> None:
  """Raises where the t interval has no quantile."""
  if num_seeds - 1 not in T_QUANTILES:
    raise ValueError(f"--seeds={num_seeds}: allowed are 2 to {max(T_QUANTILES) + 1}")


def interval(result: dict, index: int) -> str:
  """Held-out pass@1 of one evaluation with its bootstrap interval over problems."""
  return f"{result['pass@1'][index]:.3f} [{result['low'][index]:.3f}, {result['high'][index]:.3f}]"


def write_results(path: pathlib.Path, results: Sequence[dict]) -> None:
  """One result per line."""
  path.write_text("\n".join(["[", ",\n".join(map(json.dumps, results)), "]\n"]))
