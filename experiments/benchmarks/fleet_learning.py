"""Does a fleet learn what one program learns? The quickstart with samplers, over seeds.

  python experiments/benchmarks/fleet_learning.py --scratch=runs/fleet_learning

For every seed: one program with the lags of `simulated_asynchronous`, one with the largest lag at
every update (`fixed_lag`), a trainer with one sampler, and a trainer with four, all launched on
this machine. Samplers that are faster than the trainer are always ahead, so that their lags are
nearly those of `fixed_lag`, which is the control. The last run is then repeated by one program
(`recorded`), whose updates must have the same numbers, bit for bit.
Finished runs are not repeated. The table, results/fleet_learning.md with a .json file next to it,
has held-out pass@1 at the end, differences by seed, lags, and the number of living samplers.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
from absl import app, flags

from experiments.benchmarks.tables import Row, hardware, write_results
from rlvr_jax.evaluate.paired import mean_and_half_width
from rlvr_jax.evaluate.run_files import read_metrics

MAX_LAG = 4
REFERENCE = "fixed_lag"
SAMPLERS = {"simulated_asynchronous": None, REFERENCE: None, "1 sampler": 1, "4 samplers": 4}
# Metrics of an update that the clock or the machine decides.
_NOT_REPEATED = ("time/", "hosts/", "fleet/", "counter/", "data/passes", "agreement/", "memory/")

_SEEDS = flags.DEFINE_integer("seeds", 5, "Seeds, from 0.", lower_bound=2)
_UPDATES = flags.DEFINE_integer("updates", 300, "Updates of each run.", lower_bound=1)
_SCRATCH = flags.DEFINE_string("scratch", None, "Folder of the runs.", required=True)
_FOLDER = flags.DEFINE_string(
  "folder", str(pathlib.Path(__file__).parent / "results"), "Folder for the table."
)


def flags_of(workdir: pathlib.Path, seed: int, updates: int, schedule: str) -> list[str]:
  """Flags of the quickstart with a schedule; runs of one seed have equal warm starts."""
  return [
    f"--config={ROOT / 'configs' / 'quickstart.py'}",
    f"--workdir={workdir}",
    f"--config.seed={seed}",
    f"--config.num_updates={updates}",
    f"--config.schedule={schedule}",
    f"--config.evaluation.every={updates}",
  ]


def train(arguments: Sequence[str], name: str, samplers: int | None) -> None:
  """Runs one program, or launches a trainer and samplers on this machine."""
  command = [sys.executable, "-m", "rlvr_jax.main", *arguments]
  if samplers is not None:
    command = [sys.executable, "-m", "rlvr_jax.launch", "local", "start", f"--name={name}"]
    command += ["--processes=1", f"--samplers={samplers}", "--", *arguments]
  subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def measure_arm(arm: str, seeds: int, updates: int, scratch: pathlib.Path) -> list[dict[str, Any]]:
  """Trains an arm with every seed; what its runs have measured."""
  found = []
  samplers = SAMPLERS[arm]
  schedule = f"asynchronous(max_lag={MAX_LAG})"
  if samplers is None:
    schedule = f"{arm}({'lag' if arm == REFERENCE else 'max_lag'}={MAX_LAG})"
  for seed in range(seeds):
    name = f"{arm.replace(' ', '-')}-{seed}"
    train(
      flags_of(scratch / name, seed, updates, schedule),
      f"fleet-learning-{name}",
      samplers,
    )
    records = [*read_metrics(scratch / name)]
    updated = [record for record in records if record["phase"] == "train"]
    found.append(
      {
        "pass@1": [r for r in records if r["phase"] == "eval"][-1]["eval/pass@1"],
        "mean lag": float(np.mean([r["staleness/mean"] for r in updated])),
        "largest lag": max(r["staleness/max"] for r in updated),
        "samplers": max((r.get("fleet/running", 1) for r in updated), default=1),
      }
    )
  return found


def repeats(run: pathlib.Path, arguments: Sequence[str], workdir: pathlib.Path) -> bool:
  """Whether one program that repeats a run has its numbers, at every update and at the end."""
  train(arguments, "", None)
  alike = [
    [
      {k: v for k, v in record.items() if not k.startswith(_NOT_REPEATED)}
      for record in read_metrics(folder)
      if record["phase"] in ("train", "eval")
    ]
    for folder in (run, workdir)
  ]
  return alike[0] == alike[1]


def main(argv: list[str]) -> None:
  del argv
  scratch = pathlib.Path(_SCRATCH.value).absolute()
  seeds, updates = _SEEDS.value, _UPDATES.value
  found = {arm: measure_arm(arm, seeds, updates, scratch) for arm in SAMPLERS}
  rows: list[Row] = []
  for arm, runs in found.items():
    values = [run["pass@1"] for run in runs]
    mean, half = mean_and_half_width(values)
    row: Row = {"run": arm, "pass@1": f"{mean:.3f} ± {half:.3f}"}
    if arm != REFERENCE:
      differences = [a["pass@1"] - b["pass@1"] for a, b in zip(runs, found[REFERENCE], strict=True)]
      mean, half = mean_and_half_width(differences)
      row["difference"] = f"{mean:+.3f} ± {half:.3f}"
    row["mean lag"] = f"{np.mean([run['mean lag'] for run in runs]):.2f}"
    row["largest lag"] = int(max(run["largest lag"] for run in runs))
    row["samplers that show signs of life"] = int(max(run["samplers"] for run in runs))
    row["by seed"] = ", ".join(f"{value:.3f}" for value in values)
    rows.append(row)
  run = scratch / f"4-samplers-{seeds - 1}"
  workdir = scratch / f"{run.name}-again"
  schedule = f"simulated_asynchronous(max_lag={MAX_LAG}, recorded={str(run)!r})"
  same = repeats(run, flags_of(workdir, seeds - 1, updates, schedule), workdir)
  conditions = {
    "hardware": hardware(),
    "seeds": seeds,
    "updates": updates,
    "intervals": "95 %, t over seeds",
    "the last run, repeated, has the same numbers": same,
  }
  path = pathlib.Path(_FOLDER.value) / "fleet_learning"
  print(write_results(path, "Learning with samplers", rows, conditions))
  if not same:
    sys.exit("the repeated run differs")


if __name__ == "__main__":
  app.run(main)
