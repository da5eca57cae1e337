"""Writes the table of costs into docs/models.md, from the committed reports, from the root:

  python -m docs.costs

A report, experiments/benchmarks/results/costs/RECIPE/costs_TOPOLOGY.json, is of `--mode=costs`.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from docs.tables import between_marks
from rlvr_jax.evaluate.compare import markdown_table

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
REPORTS = ROOT / "experiments" / "benchmarks" / "results" / "costs"
COMMAND = "python -m docs.costs"
RECIPES = (  # in the order of the table
  *("salt_qwen25_math_7b", "p3o_qwen3_4b", "fade_qwen25_7b", "mu_grpo_r1_distill_7b"),
  *("gsm8k_qwen25_05b", "gsm8k_qwen25_15b_lora"),
)


def table() -> str:
  """Markdown: a row for each recipe and slice."""
  rows = {}
  for recipe in RECIPES:
    for path in sorted((REPORTS / recipe).glob("costs_*.json"), reverse=True):
      report = json.loads(path.read_text(encoding="utf-8"))
      where = report["conditions"]["topology"]
      rows[f"`{recipe}`, {where}"] = _row(report["conditions"], report["costs"])
  header = ["problems × responses × tokens", "mesh", "micro-batches", "update, GiB"]
  header += ["generation, GiB", "received GB", "compute, HBM, links: s", "MFU at most"]
  return markdown_table(header, rows, "recipe, slice")


def _row(conditions: Mapping[str, Any], costs: Mapping[str, Any]) -> list[str]:
  update = costs["update"]
  gib = {name: sum(cost["memory_bytes"].values()) / 2**30 for name, cost in costs.items()}
  sizes = (conditions[name] for name in ("prompts", "group_size", "response_tokens"))
  mesh = ", ".join(f"{axis} {size}" for axis, size in conditions["mesh"].items() if size > 1)
  return [
    " × ".join(map(str, sizes)),
    mesh or "one chip",
    str(conditions["micro_batches"]),
    f"{gib['update']:.1f}",
    f"{gib['generation']:.1f}",
    f"{update['received_bytes'] / 1e9:,.0f}",
    ", ".join(f"{seconds:.3g}" for seconds in update["seconds"].values()),
    f"{100 * update['model_flops_utilization']:.0f} %",
  ]


def written() -> str:
  """The page with its table up to date."""
  return between_marks(PAGE.read_text(encoding="utf-8"), "costs", f"\n{table()}\n\n")


def main() -> None:
  PAGE.write_text(written(), encoding="utf-8")


if __name__ == "__main__":
  main()
