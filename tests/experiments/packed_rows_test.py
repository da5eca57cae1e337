"""The table of packed rows is what the recipes' layouts give."""

import json

from experiments.benchmarks import packed_rows, tables
from experiments.benchmarks.packed_rows import Case


def test_the_table_is_up_to_date():
  rows = packed_rows.measure_all()
  remedy = f"write it by: {packed_rows.COMMAND}"
  assert json.loads(packed_rows.RESULTS.with_suffix(".json").read_text())["rows"] == rows, remedy
  assert tables.table(rows) in packed_rows.RESULTS.with_suffix(".md").read_text("utf-8"), remedy


def test_a_slice_splits_rows_over_the_chips_that_tensor_leaves():
  layout = packed_rows.recipe_layout(packed_rows.case_config(Case("fade_qwen25_7b", "v5e:8x8")))
  assert layout.devices == 16


def test_rows_of_the_recipes_hold_little_in_vain():
  """Responses of a third of the limit; those of `fade` are shorter, and fill fewer rows."""
  rows = json.loads(packed_rows.RESULTS.with_suffix(".json").read_text())["rows"]
  found = {
    (row["recipe, slice"], row["problems × responses × tokens"].rpartition(" × ")[0]): float(
      row["mean 1/3 of the limit"].partition(" ")[0]
    )
    for row in rows
  }
  assert len(found) == len(packed_rows.CASES) and max(found.values()) <= 1.25
  long = {name: ratio for name, ratio in found.items() if "fade" not in name[0]}
  assert max(ratio for (_, sizes), ratio in long.items() if sizes == "32 × 16") <= 1.10
  assert max(ratio for (_, sizes), ratio in long.items() if sizes == "64 × 16") <= 1.07
