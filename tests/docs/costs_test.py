"""The table of costs in docs/models.md is that of the committed reports."""

import json
import pathlib

from docs import costs

RECIPES = pathlib.Path(__file__).parents[2] / "configs" / "full_size"


def test_the_table_is_up_to_date():
  assert costs.written() == costs.PAGE.read_text(encoding="utf-8"), f"write it by: {costs.COMMAND}"


def test_every_recipe_of_full_size_has_its_reports():
  recipes = {path.stem for path in RECIPES.glob("*.py")} - {"__init__", "base"}
  assert set(costs.RECIPES) == recipes == {path.name for path in costs.REPORTS.iterdir()}
  assert costs.table().count("\n| `") == 2 * len(recipes)


def test_a_row_is_that_of_its_report():
  path = costs.REPORTS / "gsm8k_qwen25_05b" / "costs_v5e_2x4.json"
  update = json.loads(path.read_text())["costs"]["update"]
  (row,) = [x for x in costs.table().splitlines() if x.startswith("| `gsm8k_qwen25_05b`, v5e:2x4")]
  cells = [cell.strip() for cell in row.split("|")[2:-1]]
  assert cells[:2] == ["32 × 8 × 512", "fsdp 8"]
  gib = sum(update["memory_bytes"].values()) / 2**30
  assert abs(float(cells[3]) - gib) <= 0.05
  assert float(cells[6].split(", ")[0]) == float(f"{update['seconds']['compute']:.3g}")
