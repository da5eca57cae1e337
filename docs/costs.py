"""Writes the table of costs into docs/costs.md from the committed reports:

  python -m docs.costs

Run it in the root of the repository. `--mode=costs` writes a report,
experiments/benchmarks/results/costs/RECIPE/costs_TOPOLOGY.json, with the recipe's settings for that
slice, such as --config=RECIPE.py:v5p:2x2x4. The next command writes the reports that are missing or
come from another compiler. It takes some ten minutes for each model of 7B parameters. To compile a
report again, delete its file first:

  python -m docs.costs --compile
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from docs.tables import between_marks, recipe_module
from rlvr_jax.commands import ahead_of_time
from rlvr_jax.costs import programs
from rlvr_jax.evaluate.compare import markdown_table

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "costs.md"
REPORTS = ROOT / "experiments" / "benchmarks" / "results" / "costs"
COMMAND = "python -m docs.costs"
COMPILER = "Built on Jun 17 2026 11:08:48"  # libtpu 0.0.42.1; limits of cycles are for it alone
GENERATION_GIB = {"v5p": 90.0, "v5e": 14.5}  # the most that generation may take


class Limits(NamedTuple):
  """Upper limits on the costs of an update per chip, and a lower limit on the utilization.

  A limit is the goal if there is a goal and it is reached. Otherwise it is some five per cent
  looser than the reached value.
  """

  cycles: float  # in units of 10⁹, as `COMPILER` estimates them
  gib: float
  received_gb: float
  utilization: float  # model FLOPs utilization, the upper bound from the chip's peaks


LIMITS = {  # (recipe, slice), in the order of the table
  ("salt_qwen25_math_7b", "v5p:2x2x4"): Limits(145, 75.5, 2815, 0.57),
  ("salt_qwen25_math_7b", "v5e:8x8"): Limits(65, 13.8, 1810, 0.575),
  ("p3o_qwen3_4b", "v5p:2x2x4"): Limits(14.2, 38, 440, 0.60),
  ("p3o_qwen3_4b", "v5e:8x8"): Limits(7.4, 14.2, 240, 0.60),
  ("grpo_qwen35_4b", "v5p:2x2x4"): Limits(30.5, 44.4, 333, 0.68),
  ("grpo_qwen35_4b", "v5e:8x8"): Limits(10.5, 11.7, 180, 0.65),
  ("fade_qwen25_7b", "v5p:2x2x4"): Limits(22, 51, 655, 0.85),
  ("fade_qwen25_7b", "v5e:8x8"): Limits(10.3, 12.5, 275, 0.85),
  ("mu_grpo_r1_distill_7b", "v5p:2x2x4"): Limits(22, 51, 655, 0.85),
  ("mu_grpo_r1_distill_7b", "v5e:8x8"): Limits(10.3, 12.5, 275, 0.85),
  ("gsm8k_qwen25_05b", "v5e:2x4"): Limits(1.35, 6.8, 32, 0.80),
  ("gsm8k_qwen25_05b", "v5e:1x1"): Limits(11.5, 14.5, 0, 0.70),
  ("gsm8k_qwen25_15b_lora", "v5e:2x4"): Limits(3.9, 3.5, 52, 0.65),
  ("gsm8k_qwen25_15b_lora", "v5e:1x1"): Limits(22.6, 6.1, 0, 0.65),
  ("gspo_qwen3_30b_a3b", "v5p:2x4x4"): Limits(34.3, 58.7, 2955, 0.67),
  ("gspo_qwen35_35b_a3b", "v5p:2x4x4"): Limits(61.9, 68, 3340, 0.355),
  ("gsm8k_olmoe_1b_7b", "v5p:2x2x1"): Limits(18.6, 56.6, 826, 0.61),
  ("gsm8k_olmoe_1b_7b", "v5e:4x8"): Limits(5.65, 14.6, 390, 0.42),
}
# The usual lengths of some recipes; reports of the other recipes assume the greatest lengths.
LENGTHS = dict.fromkeys(("p3o_qwen3_4b", "grpo_qwen35_4b"), "lognormal(mean=800, prompt=150)")


def recipe_config(recipe: str, topology: str) -> ConfigDict:
  """A recipe's configuration with the settings that it has for a slice, if there are any."""
  module = recipe_module(f"full_size.{recipe}")
  if topology in getattr(module, "SLICES", {}):
    return module.get_config(topology)
  return module.get_config()


def report_path(recipe: str, topology: str) -> pathlib.Path:
  return REPORTS / recipe / f"costs_{topology.replace(':', '_')}.json"


def read_reports() -> dict[tuple[str, str], dict[str, Any]]:
  """The reports whose files exist, by (recipe, slice), in the order of `LIMITS`."""
  paths = {case: report_path(*case) for case in LIMITS}
  return {
    case: json.loads(path.read_text(encoding="utf-8"))
    for case, path in paths.items()
    if path.exists()
  }


def table() -> str:
  """A Markdown table with a row for each report."""
  rows = {}
  for (recipe, topology), report in read_reports().items():
    rows[f"`{recipe}`, {topology}"] = _row(report["conditions"], report["costs"])
  header = ["problems × responses × tokens", "mesh, remat", "update, GiB", "generation, GiB"]
  header += ["compute, HBM, links: s", "MFU at most"]
  return markdown_table(header, rows, "recipe, slice")


def _row(conditions: Mapping[str, Any], costs: Mapping[str, Any]) -> list[str]:
  update = costs["update"]
  gib = {name: sum(cost["memory_bytes"].values()) / 2**30 for name, cost in costs.items()}
  sizes = (conditions[name] for name in ("prompts", "group_size", "response_tokens"))
  lengths = "" if conditions["lengths"] == "longest" else f", `{conditions['lengths']}`"
  mesh = ", ".join(f"{axis} {size}" for axis, size in conditions["mesh"].items() if size > 1)
  return [
    " × ".join(map(str, sizes)) + lengths,
    f"{mesh or 'one chip'}, {conditions['remat']}",
    f"{gib['update']:.1f}",
    f"{gib['generation']:.1f}",
    ", ".join(f"{seconds:.3g}" for seconds in update["seconds"].values()),
    f"{100 * update['model_flops_utilization']:.1f} %",
  ]


def excesses(cost: Mapping[str, Any], limits: Limits, *, with_cycles: bool) -> list[str]:
  """A line for each figure of an update that breaks its limit; cycles count only `with_cycles`."""
  figures = Limits(
    cycles=cost["cycles"] / 1e9,
    gib=sum(cost["memory_bytes"].values()) / 2**30,
    received_gb=cost["received_bytes"] / 1e9,
    utilization=cost["model_flops_utilization"],
  )
  lines = []
  for name, figure, limit in zip(Limits._fields, figures, limits, strict=True):
    too_much = figure < limit if name == "utilization" else figure > limit
    if too_much and (with_cycles or name != "cycles"):
      lines.append(f"{name}: {figure:.4g}, limit {limit:g}")
  return lines


def written() -> str:
  """The text of docs/costs.md with an updated table."""
  return between_marks(PAGE.read_text(encoding="utf-8"), "costs", f"\n{table()}\n\n")


def compile_reports() -> None:
  """Writes the reports that are missing, or that another compiler than the installed one made."""
  compilers = {case: report["conditions"]["compiler"] for case, report in read_reports().items()}
  for recipe, topology in LIMITS:
    config = recipe_config(recipe, topology)
    mesh = programs.make_topology_mesh(config.mesh, topology)
    if compilers.get((recipe, topology)) == mesh.devices.flat[0].client.platform_version:
      continue
    print(f"{recipe}, {topology}", flush=True)
    folder, lengths = REPORTS / recipe, LENGTHS.get(recipe, "longest")
    ahead_of_time.costs(config, topology, folder, lengths=lengths)()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
  parser.add_argument("--compile", action="store_true", help="write reports that are missing")
  if parser.parse_args().compile:
    compile_reports()
  PAGE.write_text(written(), encoding="utf-8")


if __name__ == "__main__":
  main()
