"""The table of costs in docs/costs.md is that of the committed reports."""

import pathlib

import jax
import pytest

from docs import costs, tables
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.presets import preset

RECIPES = pathlib.Path(__file__).parents[2] / "configs" / "full_size"
REPORTS = costs.read_reports()


def test_the_table_is_up_to_date():
  assert costs.written() == costs.PAGE.read_text(encoding="utf-8"), f"write it by: {costs.COMMAND}"


def test_every_recipe_of_full_size_has_its_limits():
  recipes = {path.stem for path in RECIPES.glob("*.py")} - {"__init__", "base"}
  assert {recipe for recipe, _ in costs.LIMITS} == recipes
  assert {*costs.REPORTS.glob("*/*.json")} == {costs.report_path(*case) for case in costs.LIMITS}
  tuned = {(r, topology) for r in recipes for topology in _slices(r)}
  assert tuned <= costs.LIMITS.keys()


def _slices(recipe):
  return getattr(tables.recipe_module(f"full_size.{recipe}"), "SLICES", {})


def test_a_row_is_that_of_its_report():
  update = REPORTS["gsm8k_qwen25_05b", "v5e:2x4"]["costs"]["update"]
  (row,) = [x for x in costs.table().splitlines() if x.startswith("| `gsm8k_qwen25_05b`, v5e:2x4")]
  cells = [cell.strip() for cell in row.split("|")[2:-1]]
  assert cells[:2] == ["32 × 8 × 512", "data 2, fsdp 4, dots"]
  gib = sum(update["memory_bytes"].values()) / 2**30
  assert abs(float(cells[2].partition(" ")[0]) - gib) <= 0.05
  assert float(cells[4].split(", ")[0]) == float(f"{update['seconds']['compute']:.3g}")


def test_all_reports_are_of_one_compiler():
  assert all(costs.COMPILER in report["conditions"]["compiler"] for report in REPORTS.values())


@pytest.mark.parametrize("case", REPORTS, ids=str)
def test_a_recipe_keeps_to_its_limits(case):
  """Compiled again by tests/costs/costs_tpu_test.py."""
  found = REPORTS[case]["costs"]
  assert not costs.excesses(found["update"], costs.LIMITS[case], with_cycles=True)
  most = costs.GENERATION_GIB[case[1].partition(":")[0]]
  assert sum(found["generation"]["memory_bytes"].values()) / 2**30 <= most


def test_what_exceeds_a_limit_is_named():
  update = REPORTS["fade_qwen25_7b", "v5p:2x2x4"]["costs"]["update"]
  limits = costs.LIMITS["fade_qwen25_7b", "v5p:2x2x4"]
  found = lambda with_cycles=True, **changes: [
    line.partition(":")[0]
    for line in costs.excesses(update, limits._replace(**changes), with_cycles=with_cycles)
  ]
  assert found() == []
  assert found(cycles=1.0, utilization=0.99) == ["cycles", "utilization"]
  assert found(gib=1.0, received_gb=1.0) == ["gib", "received_gb"]
  assert found(with_cycles=False, cycles=1.0) == []


@pytest.mark.parametrize("case", REPORTS, ids=str)
def test_a_report_is_of_its_recipe_as_it_is(case):
  config, conditions = costs.recipe_config(*case), REPORTS[case]["conditions"]
  assert conditions["topology"] == case[1]
  assert conditions["prompts"] == config.batch.prompts
  assert conditions["group_size"] == config.batch.group_size
  assert conditions["prompt_tokens"] == config.max_prompt_length
  assert conditions["response_tokens"] == config.max_response_length
  assert conditions["remat"] == config.model.overrides.remat
  sizes = {axis: size for axis, size in config.mesh.items() if size > 0}
  assert sizes.items() <= conditions["mesh"].items()
  assert conditions["lengths"] == costs.LENGTHS.get(case[0], "longest")
  assert conditions["too_large"] == []


def test_collectives_of_an_update_are_near_the_least():
  """Of FADE's recipe: two gathers in bfloat16 and a reduction in float32 per micro-batch."""
  report = REPORTS["fade_qwen25_7b", "v5p:2x2x4"]
  network = preset("qwen2.5_7b")
  shapes = jax.eval_shape(transformer(network).init, jax.random.key(0))
  parameters = sum(x.size for x in jax.tree.leaves(shapes))
  least = parameters * (2 * 2 + 4) * 15 / 16 * report["conditions"]["micro_batches"]
  assert report["conditions"]["mesh"]["tensor"] == 1
  assert report["costs"]["update"]["received_bytes"] <= 1.5 * least
