"""The committed runs that docs/deciding.py and docs/verdicts.py read, and values of them."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from experiments.testbed import report
from rlvr_jax.evaluate import compare

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"
Result = Mapping[str, Any]
OfRun = Callable[[Result], float]


def results(name: str) -> dict[str, list[Result]]:
  """Label → runs, of experiments/NAME."""
  path = EXPERIMENTS / name
  return compare.group_by_label(
    compare.read_results(path if path.suffix else path / "results.json")
  )


SALT, P3O, MU = (results(name) for name in ("salt_geometry", "p3o_mismatch", "mu_grpo"))
FAR, HIGH = results("large_ratios"), results("high_entropy")
SAMPLED, OTHERS = results("sampled_feature"), results("other_samplers")
LOW = results("low_precision")
ON_STEPS = {
  label: runs
  for name in ("salt_geometry", "p3o_mismatch", "fade", "mu_grpo", "together")
  for label, runs in results(f"{name}/testbed.json").items()
}
EQUAL = "r − r̄"  # label of equal masses, of experiments/high_entropy


def every(found: Mapping[str, list[Result]]) -> list[Result]:
  """The runs of all labels."""
  return [run for runs in found.values() for run in runs]


def average(metric: str) -> OfRun:
  """Mean over a run's measurements, of experiments/salt_geometry."""
  return lambda run: statistics.mean(value for _, value in run["curves"][metric])


def measured(name: str) -> OfRun:
  """What an experiment with a plan has measured over a run."""
  return lambda run: run["measured"][name]


def trigger_rate(part: slice) -> OfRun:
  """Of the veto, mean over a part of a stage's updates, of experiments/mu_grpo."""
  return lambda run: statistics.mean(run["trigger_rate_by_age"][part])


FIRST_QUARTER, LAST_QUARTER = slice(0, 24), slice(72, 96)  # of a stage of μ = 96
N_EFF = average("geometry/effective_rollouts")
REWEIGHTED = average("geometry/effective_rollouts_reweighted")
RESIDUAL = average("geometry/residual_energy")
ALPHA_ON_STEPS = report.training_mean("reweighting/alpha")
HIGH_RANK = measured("head's rank-1 fraction")
LATE, LATE_16 = report.late_mean(), report.late_mean("eval/pass@16")


def start(run: Result) -> float:
  """Held-out pass@1 before the first update."""
  return run["evaluations"][compare.METRIC][0]


def fall(run: Result) -> float:
  """Of pass@1, from the highest to the late one."""
  return report.peak_value()(run) - LATE(run)
