"""The table of costs in docs/models.md is that of the committed reports."""

import importlib
import json
import pathlib

import jax
import pytest

from docs import costs
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.presets import preset

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


def reports():
  paths = sorted(costs.REPORTS.glob("*/costs_*.json"))
  return {(path.parent.name, path.stem): json.loads(path.read_text()) for path in paths}


def test_all_reports_are_of_one_compiler_and_of_the_present_form():
  conditions = [report["conditions"] for report in reports().values()]
  assert len({c["compiler"].partition("Built")[2] for c in conditions}) == 1
  assert {type(c["micro_batches"]) for c in conditions} == {int}


@pytest.mark.parametrize("name", sorted(reports()))
def test_a_recipe_keeps_to_its_limits(name):
  """Memory of a chip, and what the peaks allow of its FLOPs; see docs/models.md."""
  report = reports()[name]
  limit = 85 if report["conditions"]["topology"].startswith("v5p") else 14.5
  for cost in report["costs"].values():
    assert sum(cost["memory_bytes"].values()) / 2**30 <= limit
  assert report["costs"]["update"]["model_flops_utilization"] >= 0.4


@pytest.mark.parametrize("name", sorted(reports()))
def test_a_report_is_of_its_recipe_as_it_is(name):
  config = importlib.import_module(f"rlvr_jax.configs.full_size.{name[0]}").get_config()
  conditions = reports()[name]["conditions"]
  assert conditions["prompts"] == config.batch.prompts
  assert conditions["group_size"] == config.batch.group_size
  assert conditions["prompt_tokens"] == config.max_prompt_length
  assert conditions["response_tokens"] == config.max_response_length
  assert conditions["too_large"] == []


def test_collectives_of_an_update_are_near_the_least():
  """Of FADE's recipe: two gathers in bfloat16 and a reduction in float32 per micro-batch."""
  report = reports()["fade_qwen25_7b", "costs_v5p_2x2x4"]
  network = preset("qwen2.5_7b")
  shapes = jax.eval_shape(transformer(network).init, jax.random.key(0))
  parameters = sum(x.size for x in jax.tree.leaves(shapes))
  least = parameters * (2 * 2 + 4) * 15 / 16 * report["conditions"]["micro_batches"]
  assert report["conditions"]["mesh"]["tensor"] == 1
  assert report["costs"]["update"]["received_bytes"] <= 1.5 * least
