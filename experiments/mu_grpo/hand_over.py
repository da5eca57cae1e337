"""Price of a hand-over (weight sync) above which stages are faster: a curve over the price.

  python -m experiments.mu_grpo.hand_over

A hand-over syncs new weights to the sampling engine. Within one process it is nearly free. Here it
has a price, in units of a run's own seconds per update, so that systems whose updates take minutes
can be compared. A run with μ updates per refresh pays it ⌈u/μ⌉ times for u updates.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.evaluate import compare, curves
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.presets import preset

HERE = pathlib.Path(__file__).parent
GRPO, STAGES = "GRPO, μ = 4", "veto suffix, κ = 0.1"  # in results.json
MU = {GRPO: 4, STAGES: 96}
RISE = 0.1  # of held-out pass@1, to the level that both methods have to reach
COSTS_7B = (
  HERE.parent
  / "benchmarks"
  / "results"
  / "costs"
  / "mu_grpo_r1_distill_7b"
  / "costs_v5p_2x2x4.json"
)
RESTART_S = (30.0, 60.0)  # assumed, for a 7B inference engine that reloads its weights
GRID = tuple(float(price) for price in np.geomspace(0.01, 100, 41))


class Cost(NamedTuple):
  """Cost of a run until it reaches a level."""

  updates: float
  seconds: float  # measured with hand-overs that are nearly free; without compilation
  refreshes: int
  seconds_per_update: float


class Curve(NamedTuple):
  """Seconds of GRPO over those of stages, by the price of a hand-over; for one seed."""

  seed: int
  prices: tuple[float, ...]  # in updates
  speedup: tuple[float, ...]  # > 1 where stages are faster
  break_even: float  # in updates; ∞ if stages are never faster


def cost_to(result: Mapping[str, Any], level: float, mu: int) -> Cost | None:
  """Cost until held-out pass@1 first reaches the level; None if it never does.

  Args:
    result: result of a run whose evaluations have the axis `seconds`.
    level: level of pass@1.
    mu: updates per refresh, ≥ 1.
  """
  columns = result["evaluations"]
  updates = curves.first_crossing(columns["updates"], columns[compare.METRIC], level)
  if math.isnan(updates):
    return None
  seconds = float(np.interp(updates, columns["updates"], columns["seconds"]))
  seconds -= columns["seconds"][0]  # the start
  seconds_per_update = (columns["seconds"][-1] - columns["seconds"][0]) / columns["updates"][-1]
  return Cost(updates, seconds, refreshes(updates, mu), seconds_per_update)


def refreshes(updates: float, mu: int) -> int:
  """⌈u/μ⌉, with a tolerance for rounding of the interpolation."""
  return math.ceil(updates / mu - 1e-6)


def recorded_cost(result: Mapping[str, Any], mu: int) -> Cost | None:
  """Cost of a rise of `RISE` that a result of results.json contains; None if it was not reached."""
  cost = result["cost"]
  if cost["updates"] is None or cost["seconds"] is None:
    return None
  first, updates = result["first_update_seconds"], result["evaluations"]["updates"][-1]
  seconds_per_update = (result["elapsed_seconds"] - first) / (updates - 1)
  hand_overs = refreshes(cost["updates"], mu)
  return Cost(cost["updates"], cost["seconds"] - first, hand_overs, seconds_per_update)


def total_seconds(cost: Cost, price: float) -> float:
  """Seconds if a hand-over costs `price` updates."""
  return cost.seconds + cost.refreshes * price * cost.seconds_per_update


def break_even(grpo: Cost, stages: Cost) -> float:
  """Price, in updates, above which stages are faster: 0 if always, ∞ if never."""
  extra_seconds = stages.seconds - grpo.seconds
  saving = grpo.refreshes * grpo.seconds_per_update - stages.refreshes * stages.seconds_per_update
  if saving <= 0:
    return math.inf
  return max(extra_seconds / saving, 0.0)


def make_curve(seed: int, grpo: Cost, stages: Cost, prices: Sequence[float] = GRID) -> Curve:
  ratios = tuple(total_seconds(grpo, price) / total_seconds(stages, price) for price in prices)
  return Curve(seed, tuple(prices), ratios, break_even(grpo, stages))


def make_curves(
  grpo: Mapping[int, Cost | None],
  stages: Mapping[int, Cost | None],
  prices: Sequence[float] = GRID,
) -> list[Curve]:
  """Makes a curve for each seed with which both methods reached the level.

  Args:
    grpo, stages: seed → cost.
    prices: prices of a hand-over, in updates.
  """
  pairs = {seed: (cost, stages.get(seed)) for seed, cost in grpo.items()}
  return [
    make_curve(seed, grpo_cost, stages_cost, prices)
    for seed, (grpo_cost, stages_cost) in pairs.items()
    if grpo_cost and stages_cost
  ]


def recorded_costs(results: Sequence[Mapping[str, Any]], label: str) -> dict[int, Cost | None]:
  """Seed → cost of a rise of `RISE`, from results.json."""
  return {r["seed"]: recorded_cost(r, MU[label]) for r in results if r["label"] == label}


def recorded_curves(
  results: Sequence[Mapping[str, Any]], prices: Sequence[float] = GRID
) -> list[Curve]:
  """Curves of the runs of results.json."""
  return make_curves(recorded_costs(results, GRPO), recorded_costs(results, STAGES), prices)


def prices_of_7b() -> dict[str, float]:
  """Prices of a 7B hand-over, in updates of the full-size recipe at its chips' peak.

  For resharding, every chip receives the bfloat16 weights that it lacks, at its links' peak. An
  update takes as long as the slowest of compute, memory and links. Both times are lower bounds,
  because no program reaches the peaks.
  """
  report = json.loads(COSTS_7B.read_text(encoding="utf-8"))
  conditions = report["conditions"]
  shapes = jax.eval_shape(transformer(preset(conditions["model"])).init, jax.random.key(0))
  weights = 2 * sum(x.size for x in jax.tree.leaves(shapes))  # bytes
  mesh = conditions["mesh"]
  received = weights / mesh["tensor"] * (1 - 1 / mesh["fsdp"])
  resharding = received / conditions["peaks of a chip"]["interconnect_bytes_per_s"]
  update = max(report["costs"]["update"]["seconds"].values())
  low, high = (seconds / update for seconds in RESTART_S)
  return {
    "resharding, v5p links at their peak": resharding / update,
    f"engine restart, {RESTART_S[0]:g} s": low,
    f"engine restart, {RESTART_S[1]:g} s": high,
  }


def table(curves_at: Callable[[Sequence[float]], list[Curve]]) -> str:
  """Makes a Markdown table of the speed-up at each price, and the break-even price, by seed.

  Args:
    curves_at: prices → curves.
  """
  prices = {"in one process, as it is here": 0.0, **prices_of_7b(), "100 updates": 100.0}
  seed_curves = curves_at(tuple(prices.values()))
  if not seed_curves:
    return "No seed with which both reached the level."
  header = ["updates", *(f"seed {curve.seed}" for curve in seed_curves), "mean"]
  rows = {}
  for index, (name, price) in enumerate(prices.items()):
    ratios = [curve.speedup[index] for curve in seed_curves]
    rows[name] = [f"{price:.3g}", *(f"{x:.2f}" for x in ratios), f"{statistics.mean(ratios):.2f}"]
  rows["break-even"] = ["–", *(f"{curve.break_even:.2f}" for curve in seed_curves), "–"]
  return compare.markdown_table(header, rows, "price of a hand-over")


def draw(seed_curves: Sequence[Curve], path: pathlib.Path) -> None:
  """Saves a figure of the curves, one per seed, with the prices of 7B."""
  with curves.save_figure(path) as axes:
    for curve in seed_curves:
      axes.plot(curve.prices, curve.speedup, label=f"seed {curve.seed}")
    for name, price in prices_of_7b().items():
      axes.axvline(max(price, GRID[0]), color="gray", linewidth=0.8)
      position = (max(price, GRID[0]), 0.5)
      axes.annotate(name, position, rotation=90, fontsize=7, xycoords=("data", "axes fraction"))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set(xlabel="price of a hand-over, updates", ylabel="seconds of GRPO / of stages")
    axes.legend()


def main() -> None:
  results = compare.read_results(HERE / "results.json")
  draw(recorded_curves(results), HERE / "hand_over.png")
  print(table(lambda prices: recorded_curves(results, prices)))


if __name__ == "__main__":
  main()
