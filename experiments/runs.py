"""What the experiments share: recipes, runs as processes, held-out curves, intervals over seeds."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from scipy import special

from rlvr_jax.evaluate.run_files import read_metrics

# The recipes of methods: those that name a card. GRPO comes first: the others are compared with it.
RECIPES = sorted(
  (
    path.stem
    for path in (pathlib.Path(__file__).parents[1] / "configs").glob("*.py")
    if "Card: docs/methods/" in path.read_text(encoding="utf-8")
  ),
  key=lambda name: (name != "grpo", name),
)
METRIC = "eval/pass@1"


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


def run_all(
  runs: Mapping[str, Sequence[str]],
  root: pathlib.Path,
  *,
  num_seeds: int,
  same_warm_start: bool = False,
  measure: Callable[[pathlib.Path], dict] = lambda workdir: {},
) -> list[dict]:
  """Every run with seeds 0, 1, …, one after another, each in a folder of its own under `root`.

  Args:
    runs: label → command line.
    same_warm_start: whether all runs of a seed have the warm start of the first of them.
    measure: a finished run's workdir → what joins its result.
  """
  results, first = [], next(iter(runs))
  for label, arguments in runs.items():
    for seed in range(num_seeds):
      given = workdir_of(root, first, seed) if same_warm_start else None
      workdir = workdir_of(root, label, seed)
      result = run(label, arguments, seed=seed, workdir=workdir, warm_start_of=given)
      results.append(result | measure(workdir))
  return results


def by_label(results: Sequence[dict]) -> dict[str, list[dict]]:
  """The results of every label, in the order of the runs."""
  labels = dict.fromkeys(result["label"] for result in results)
  return {label: [r for r in results if r["label"] == label] for label in labels}


def workdir_of(root: pathlib.Path, label: str, seed: int) -> pathlib.Path:
  """Where `run_all` puts a run."""
  return root / f"{re.sub(r'[^a-z0-9.]+', '_', label.lower())}_{seed}"


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
  """Mean over seeds, and half of its 95 % interval by Student's t."""
  spread = statistics.stdev(values) / len(values) ** 0.5
  return statistics.mean(values), float(special.stdtrit(len(values) - 1, 0.975)) * spread


def cell(values: Sequence[float]) -> str:
  """Mean over seeds with half of its 95 % interval, for a table."""
  mean, half = mean_and_half_width(values)
  return f"{mean:.3g} ± {half:.1g}"


def markdown(header: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
  """A table with one row per run."""
  lines = [f"| run | {' | '.join(header)} |", "|---" * (len(header) + 1) + "|"]
  return "\n".join(lines + [f"| {label} | {' | '.join(cells)} |" for label, cells in rows.items()])


def interval(result: dict, index: int) -> str:
  """Held-out pass@1 of one evaluation with its bootstrap interval over problems."""
  return f"{result['pass@1'][index]:.3f} [{result['low'][index]:.3f}, {result['high'][index]:.3f}]"


def write_results(path: pathlib.Path, results: Sequence[dict]) -> None:
  """One result per line."""
  path.write_text("\n".join(["[", ",\n".join(map(json.dumps, results)), "]\n"]))
