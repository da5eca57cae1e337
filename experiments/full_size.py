"""The testbed's arms of `CLAIMS` on a published checkpoint, on a GPU or a TPU slice.

  python -m rlvr_jax.main --mode=sweep --config=configs/full_size/gsm8k_qwen25_05b.py \\
    --sweep=experiments/full_size.py --workdir=runs/evidence_05b \\
    --config.model.checkpoint=Qwen2.5-0.5B-Instruct --config.task.kwargs.data_dir=GSM8K

The recipe on the command line sets task, model, lengths and learning rate; another recipe is
`configs/full_size/gsm8k_qwen25_15b_lora.py`. `--mode=costs --topology=v5e:2x4` compiles the recipe
ahead of time, without a chip. `python -m experiments.full_size` prints the estimated hours.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

from experiments import evidence
from experiments.p3o_mismatch.testbed import FIRST
from experiments.testbed.config import UPDATES
from rlvr_jax.evaluate import compare

COSTS = pathlib.Path(__file__).parent / "benchmarks" / "results" / "costs"
RECIPES = ("gsm8k_qwen25_05b", "gsm8k_qwen25_15b_lora")
TOPOLOGIES = ("v5e_1x1", "v5e_2x4")
ROLLOUTS = 256  # per update, as in these recipes
SEEDS = range(3)
BURST = 16  # decoding steps of one generation program
SLOTS = {("gsm8k_qwen25_15b_lora", "v5e_1x1"): 128}  # slots, if fewer than all rollouts
OF_PEAK = 1 / 3  # assumed utilization of the chips' peaks
COMMON = {
  "num_updates": UPDATES,
  "schedule": "updates_per_refresh(batches=4)",
  "evaluation.every": 48,
  "evaluation.num_samples": 8,
  "evaluation.ks": (1, 2, 4, 8),
  "diagnostics.every": 24,
}


def arm_fields(fields: dict[str, Any]) -> dict[str, Any]:
  """Fields of an arm at `ROLLOUTS` rollouts per update."""
  fields = COMMON | fields
  if "batch.group_size" in fields:
    fields["batch.prompts"] = ROLLOUTS // fields["batch.group_size"]
  return fields


def get_sweep() -> list[dict[str, Any]]:
  first = [{**run, **COMMON} for run in FIRST]
  return first + [
    {"label": label, "seed": seed, **arm_fields(dict(fields))}
    for seed in SEEDS
    for label, fields in evidence.CLAIMS.items()
  ]


def hours(recipe: str, topology: str) -> float:
  """Estimates the hours of one run from the compiled programs, at `OF_PEAK` of the peaks.

  A program takes as long as the slowest of compute, memory and links. Responses have maximum
  length. Evaluation, grading and compilation are not included.
  """
  path = COSTS / recipe / f"costs_{topology}.json"
  report = json.loads(path.read_text(encoding="utf-8"))
  slowest = {name: max(cost["seconds"].values()) for name, cost in report["costs"].items()}
  conditions = report["conditions"]
  waves = ROLLOUTS / SLOTS.get((recipe, topology), ROLLOUTS)
  bursts = waves * math.ceil(conditions["response_tokens"] / BURST)
  return UPDATES * (slowest["update"] + bursts * slowest["generation"]) / OF_PEAK / 3600


def table() -> str:
  """Returns a Markdown table with the hours of one run, and of all runs."""
  runs = len(get_sweep())
  rows = {
    f"{recipe}, {topology.replace('_', ':')}": [
      f"{hours(recipe, topology):.2f}",
      f"{runs}",
      f"{runs * hours(recipe, topology):.0f}",
    ]
    for recipe in RECIPES
    for topology in TOPOLOGIES
  }
  return compare.markdown_table(["hours a run", "runs", "hours in all"], rows, "recipe and slice")


if __name__ == "__main__":
  print(table())
