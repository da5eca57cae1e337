"""Price of a hand-over above which stages are faster: a curve over the price.

  python -m experiments.mu_grpo.hand_over

A hand-over gives new weights to the engine that samples. It is nearly free in one process. Here it
has a price, in units of a run's own seconds per update, so that it can be compared with systems
whose updates take minutes. A run of μ updates per refresh pays it ⌈u/μ⌉ times for u updates.
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
RISE = 0.1  # of held-out pass@1: the accuracy that both reach
COSTS_7B = (
  HERE.parent
  / "benchmarks"
  / "results"
  / "costs"
  / "mu_grpo_r1_distill_7b"
  / "costs_v5p_2x2x4.json"
)
RESTART_S = (30.0, 60.0)  # of an inference engine of 7B that loads its weights anew: an assumption
GRID = tuple(float(price) for price in np.geomspace(0.01, 100, 41))


class Cost(NamedTuple):
  """Cost of a run until it reaches a level."""

  updates: float
  seconds: float  # without its hand-overs, which are nearly free where it ran
  refreshes: int
  seconds_per_update: float


class Curve(NamedTuple):
  """Seconds of GRPO over those of stages, by the price of a hand-over; for one seed."""

  seed: int
  prices: tuple[float, ...]  # in updates
  speedup: tuple[float, ...]  # above 1 stages are faster
  break_even: float  # in updates; ∞: stages are never faster


def cost_to(result: Mapping[str, Any], level: float, mu: int) -> Cost | None:
  """Updates and seconds until held-out pass@1 first reaches the level; None if it never does.

  Args:
    result: of a run; its evaluations have the axis `seconds`.
    level: of pass@1.
    mu: updates per refresh, ≥ 1.
  """
  columns = result["evaluations"]
  updates = curves.reaching(columns["updates"], columns[compare.METRIC], level)
  if math.isnan(updates):
    return None
  seconds = float(np.interp(updates, columns["updates"], columns["seconds"]))
  each = (columns["seconds"][-1] - columns["seconds"][0]) / columns["updates"][-1]
  return Cost(updates, seconds, _refreshes(updates, mu), each)


def _refreshes(updates: float, mu: int) -> int:
  """⌈u/μ⌉, up to the rounding of an interpolation."""
  return math.ceil(updates / mu - 1e-6)


def recorded_cost(result: Mapping[str, Any], mu: int) -> Cost | None:
  """Cost of a rise of `RISE`, as from `cost_to`, that a result of results.json contains."""
  cost = result["cost"]
  if cost["updates"] is None or cost["seconds"] is None:
    return None
  each = result["elapsed_seconds"] / result["evaluations"]["updates"][-1]
  return Cost(cost["updates"], cost["seconds"], _refreshes(cost["updates"], mu), each)


def total(cost: Cost, price: float) -> float:
  """Seconds if a hand-over costs `price` updates."""
  return cost.seconds + cost.refreshes * price * cost.seconds_per_update


def break_even(grpo: Cost, stages: Cost) -> float:
  """The price, in updates, above which stages are faster: 0 if at any, ∞ if at none."""
  slower = stages.seconds - grpo.seconds
  saved = grpo.refreshes * grpo.seconds_per_update - stages.refreshes * stages.seconds_per_update
  if saved <= 0:
    return math.inf
  return max(slower / saved, 0.0)


def curve(seed: int, grpo: Cost, stages: Cost, prices: Sequence[float] = GRID) -> Curve:
  ratios = tuple(total(grpo, price) / total(stages, price) for price in prices)
  return Curve(seed, tuple(prices), ratios, break_even(grpo, stages))


def curves_of(
  grpo: Mapping[int, Cost | None],
  stages: Mapping[int, Cost | None],
  prices: Sequence[float] = GRID,
) -> list[Curve]:
  """One curve for each seed with which both reached the level; seed → cost."""
  pairs = {seed: (cost, stages.get(seed)) for seed, cost in grpo.items()}
  return [
    curve(seed, of_grpo, of_stages, prices)
    for seed, (of_grpo, of_stages) in pairs.items()
    if of_grpo and of_stages
  ]


def recorded(results: Sequence[Mapping[str, Any]], label: str) -> dict[int, Cost | None]:
  """Seed → cost of a rise of `RISE`, by results.json."""
  runs = compare.by_label(results)[label]
  return {run["seed"]: recorded_cost(run, MU[label]) for run in runs}


def of_quickstart(prices: Sequence[float] = GRID) -> list[Curve]:
  """The curves of results.json."""
  results = compare.read_results(HERE / "results.json")
  return curves_of(recorded(results, GRPO), recorded(results, STAGES), prices)


def prices_of_7b() -> dict[str, float]:
  """Prices of a hand-over of 7B, in updates of the full-size recipe at its chips' peak.

  Resharding: every chip receives the weights in bfloat16 that it does not hold, at the peak of its
  links. An update is bound by its slowest of compute, memory and links. Both seconds are lower
  bounds, the peaks being what no program reaches.
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
  """Markdown: the speed-up at each price, and the break-even price, by seed.

  Args:
    curves_at: prices → curves.
  """
  prices = {"in one process, as it is here": 0.0, **prices_of_7b(), "100 updates": 100.0}
  found = curves_at(tuple(prices.values()))
  if not found:
    return "No seed with which both reached the level."
  header = ["updates", *(f"seed {made.seed}" for made in found), "mean"]
  rows = {}
  for index, (name, price) in enumerate(prices.items()):
    ratios = [made.speedup[index] for made in found]
    rows[name] = [f"{price:.3g}", *(f"{x:.2f}" for x in ratios), f"{statistics.mean(ratios):.2f}"]
  rows["break-even"] = ["–", *(f"{made.break_even:.2f}" for made in found), "–"]
  return compare.markdown(header, rows, "price of a hand-over")


def draw(found: Sequence[Curve], path: pathlib.Path) -> None:
  """Saves the curves, one for each seed, with the prices of 7B."""
  with curves.figure_of(path) as axes:
    for made in found:
      axes.plot(made.prices, made.speedup, label=f"seed {made.seed}")
    for name, price in prices_of_7b().items():
      axes.axvline(max(price, GRID[0]), color="gray", linewidth=0.8)
      at = (max(price, GRID[0]), 0.5)
      axes.annotate(name, at, rotation=90, fontsize=7, xycoords=("data", "axes fraction"))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set(xlabel="price of a hand-over, updates", ylabel="seconds of GRPO / of stages")
    axes.legend()


def main() -> None:
  draw(of_quickstart(), HERE / "hand_over.png")
  print(table(of_quickstart))


if __name__ == "__main__":
  main()
