"""Tests which premises of the papers a task meets: two runs of GRPO per task, and their tables.

  python -m experiments.premises.run --task=steps --size=small --minutes=100

Run it from the repository root. It stops after the given minutes and continues when called again;
finished runs are not repeated. At the end it writes results/TASK_SIZE.json next to this file and
prints the tables. It uses seed 100, which no reported run uses, so that a task's settings may be
chosen by its results. It trains on jax's default platform.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from experiments.premises.scopes import scope_blocks
from rlvr_jax.evaluate.run_files import GEOMETRY_FOLDER, read_metrics
from rlvr_jax.geometry import diagnostics

_TASK = flags.DEFINE_enum("task", "steps", ["steps", "tour"], "Recipe in configs/.")
_SIZE = flags.DEFINE_enum("size", "small", ["small", "long"], "Size of the recipe.")
_MINUTES = flags.DEFINE_float("minutes", 100.0, "Time limit of this call.", lower_bound=0.1)
_WORKDIR = flags.DEFINE_string("workdir", "runs/premises", "Folder for the runs' workdirs.")

HERE = pathlib.Path(__file__).parent
SEED = 100
UPDATES = 200
STAGE = 16  # updates on the rollouts of one policy, whose lag grows from 0 to 15
SCOPES = ("batch", "group", 8)
KS = (1, 2, 4, 8, 16, 32, 64)
UNFINISHED = 3  # exit status if the time limit ends before the runs


def commands(task: str, size: str, root: pathlib.Path) -> dict[str, list[str]]:
  """Name of a run → command line; the second run starts from the warm start of the first."""
  program = [sys.executable, "-m", "rlvr_jax.main", f"--config=configs/{task}.py:{size}"]
  program += [f"--config.seed={SEED}", "--config.evaluation.batch_prompts=64"]
  program += ["--config.task.kwargs.held_out_size=64", "--config.evaluation.num_samples=64"]
  ks = f"--config.evaluation.ks={KS}"
  on_policy = ["--config.schedule=on_policy", f"--config.num_updates={UPDATES}"]
  on_policy += ["--config.evaluation.every=100", "--config.diagnostics.every=20", ks]
  stale = [f"--config.schedule=stages(count={UPDATES // STAGE // 3})"]
  stale += [f"--config.num_updates={UPDATES // STAGE // 3 * STAGE}", ks]
  stale += [f"--config.evaluation.every={UPDATES}"]
  stale += [f"--config.start.checkpoint={root / 'on_policy' / 'checkpoints' / '0'}"]
  runs = {"on_policy": on_policy, "stale": stale}
  keep = "--config.checkpoint.keep=1000"  # including the first checkpoint
  return {
    name: [*program, *run_flags, keep, f"--workdir={root / name}"]
    for name, run_flags in runs.items()
  }


def finish(command: Sequence[str], deadline: float) -> bool:
  """Runs a command until it ends or the deadline; returns whether it finished.

  At the deadline it requests shutdown; the run saves, and the same command continues it.
  """
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
  try:
    status = process.wait(timeout=max(deadline - time.monotonic(), 0))
  except subprocess.TimeoutExpired:
    process.terminate()
    process.wait()
    return False
  if status:
    raise SystemExit(f"exit status {status} of: {' '.join(command)}")
  return True


# --- results of the runs --------------------------------------------------------------------------


def block_geometry(gram: np.ndarray, coefficients: np.ndarray, count: int) -> dict[str, float]:
  """Means over the blocks of `scope_blocks` in which A gives a gradient; {} if none does."""
  n_eff, counted = diagnostics.group_effective_rollouts(coefficients, gram, count)
  ratios, _ = diagnostics.group_participation_ratios(gram, count)
  n_eff = np.asarray(n_eff)[counted]
  ratios = np.asarray(ratios)[counted]
  if not n_eff.size:
    return {}
  return {
    "participation_ratio": float(ratios.mean()),
    "n_eff": float(n_eff.mean()),
    "below_1": float(np.mean(n_eff < 1)),
    "alpha": float(np.clip(1 - n_eff, 0, 1).mean()),  # of SALT, with its default bounds
  }


def geometry_table(workdir: pathlib.Path) -> dict[str, dict[str, float]]:
  """ "FEATURE, SCOPE" → means over all measurements of a run."""
  rows: dict[str, list[dict[str, float]]] = {}
  for path in sorted((workdir / GEOMETRY_FOLDER).glob("*.npz")):
    with np.load(path) as file:
      arrays = dict(file)
    for feature, key in (("score", "gram"), ("sampled", "gram_sampled")):
      for scope in SCOPES:
        blocks = scope_blocks(arrays[key], arrays["coefficients"], scope, seed=int(path.stem))
        name = f"{feature}, {'8 rollouts' if scope == 8 else scope}"
        if figures := block_geometry(*blocks):
          rows.setdefault(name, []).append(figures)
  return {
    name: {key: float(np.mean([row[key] for row in measurements])) for key in measurements[0]}
    for name, measurements in rows.items()
  }


def means_by_lag(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
  """Lag → means of the ratio's statistics over the updates at that lag."""
  names = dict(ess="behavior/ess", kl="behavior/kl_k3", largest="behavior/ratio_max")
  lags = sorted({round(r["staleness/mean"]) for r in records})
  means = {}
  for lag in lags:
    lag_records = [r for r in records if round(r["staleness/mean"]) == lag]
    means[str(lag)] = {
      name: float(np.mean([r[key] for r in lag_records])) for name, key in names.items()
    }
  return means


def summary(on_policy: pathlib.Path, stale: pathlib.Path) -> dict[str, Any]:
  """All figures of a task's tables."""
  records = list(read_metrics(on_policy))
  train = [r for r in records if r["phase"] == "train"]
  held_out = [r for r in records if r["phase"] == "eval"]
  first = train[0]
  lengths = {name: first[f"response/length_{name}"] for name in ("p10", "p50", "p90", "max")}
  mixed = np.mean([1 - r["groups/all_correct"] - r["groups/all_wrong"] for r in train[:10]])
  return {
    "length": lengths,
    "pass_at_k": {str(r["step"]): {str(k): r[f"eval/pass@{k}"] for k in KS} for r in held_out},
    "pass@64_first_low": held_out[0]["eval/pass@64_low"],
    "mixed_groups": float(mixed),
    "geometry": geometry_table(on_policy),
    "entropy": {str(r["step"]): r["policy/entropy"] for r in train[:: len(train) // 8 or 1]},
    "entropy_end": train[-1]["policy/entropy"],
    "by_lag": means_by_lag([r for r in read_metrics(stale) if r["phase"] == "train"]),
  }


def premise_rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, str, bool, str]]:
  """Yields rows of (paper, premise, whether the task meets it, supporting figures)."""
  geometry = figures["geometry"]
  for feature in ("score", "sampled"):
    rows = {name: row for name, row in geometry.items() if name.startswith(feature)}
    least = min(rows, key=lambda name: rows[name]["n_eff"])
    n_eff = rows[least]["n_eff"]
    yield "SALT", f"n_eff below 1, {feature}", n_eff < 1, f"{n_eff:.2f} ({least}), the least"
  lags = figures["by_lag"]
  ess = {int(lag): row["ess"] for lag, row in lags.items()}
  last = max(ess)
  yield (
    "P3O",
    "stale rollouts lower the ESS below 0.9",
    ess[last] < 0.9,
    f"{ess[last]:.3f}, lag {last}",
  )
  largest = lags[str(last)]["largest"]
  yield "μ-GRPO", "ratios leave [0.8, 1.2]", largest > 1.2, f"largest {largest:.2f}, lag {last}"
  start = next(iter(figures["entropy"].values()))
  end = figures["entropy_end"]
  yield "FADE", "entropy falls to less than half", end < start / 2, f"{start:.3f} to {end:.3f} nats"
  first, *_, final = (row["64"] for row in figures["pass_at_k"].values())
  low = figures["pass@64_first_low"]
  fall = f"{first:.3f} to {final:.3f}; 95 % interval of the first from {low:.3f}"
  yield "FADE", "pass@64 falls below its first interval", final < low, fall
  passes = next(iter(figures["pass_at_k"].values()))
  spread = f"pass@1 {passes['1']:.3f}, pass@64 {passes['64']:.3f}"
  yield (
    "all",
    "pass@1 of 0.15 to 0.5, pass@64 from 0.95",
    0.15 < passes["1"] < 0.5 and passes["64"] >= 0.95,
    spread,
  )


def format_markdown(figures: Mapping[str, Any]) -> str:
  """Returns the tables of one task as Markdown."""
  lines = ["| paper | premise | | measured |", "|---|---|---|---|"]
  lines += [
    f"| {paper} | {premise} | {'yes' if is_met else 'none found'} | {measured} |"
    for paper, premise, is_met, measured in premise_rows(figures)
  ]
  lines += ["", "| feature, scope | PR | n_eff | blocks below 1 | α |", "|---|---|---|---|---|"]
  lines += [
    f"| {name} | {row['participation_ratio']:.1f} | {row['n_eff']:.2f} | {row['below_1']:.0%} |"
    f" {row['alpha']:.2f} |"
    for name, row in figures["geometry"].items()
  ]
  lines += ["", "| update | " + " | ".join(f"pass@{k}" for k in KS) + " |", "|---" * 8 + "|"]
  lines += [
    f"| {step} | " + " | ".join(f"{row[str(k)]:.3f}" for k in KS) + " |"
    for step, row in figures["pass_at_k"].items()
  ]
  lines += ["", "| lag | ESS | KL (k3), nats | largest ratio |", "|---|---|---|---|"]
  lines += [
    f"| {lag} | {row['ess']:.3f} | {row['kl']:.2g} | {row['largest']:.2f} |"
    for lag, row in figures["by_lag"].items()
    if (int(lag) + 1).bit_count() == 1  # 0, 1, 3, 7, 15; the file has all lags
  ]
  length = figures["length"]
  entropy = ", ".join(f"{value:.3f} ({step})" for step, value in figures["entropy"].items())
  lines += [
    "",
    f"Response length in tokens: p10 {length['p10']:.0f}, p50 {length['p50']:.0f},"
    f" p90 {length['p90']:.0f}, longest {length['max']:.0f}.",
    f"Mixed groups, first 10 updates: {figures['mixed_groups']:.0%}.",
    f"Entropy in nats per token (update): {entropy}.",
  ]
  return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
  del argv
  start = time.monotonic()
  task = _TASK.value
  size = _SIZE.value
  root = pathlib.Path(_WORKDIR.value) / f"{task}_{size}"
  runs = commands(task, size, root)
  for name, command in runs.items():
    print(f"{task} {size}: {name}", file=sys.stderr, flush=True)
    if not finish(command, start + 60 * _MINUTES.value):
      print("not finished; run the same command again to continue", file=sys.stderr)
      raise SystemExit(UNFINISHED)
  figures = summary(root / "on_policy", root / "stale")
  commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
  command_lines = {name: " ".join(["python", *command[1:]]) for name, command in runs.items()}
  about = dict(task=task, size=size, seed=SEED, commit=commit.stdout.strip())
  about["commands"] = command_lines
  results = HERE / "results" / f"{task}_{size}.json"
  results.parent.mkdir(exist_ok=True)
  results.write_text(json.dumps(about | figures, indent=1) + "\n", encoding="utf-8")
  print(format_markdown(figures))


if __name__ == "__main__":
  app.run(main)
