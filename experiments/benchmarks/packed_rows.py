"""Places that updates on TPUs compute per token that they need, for responses of many lengths.

  python experiments/benchmarks/packed_rows.py
  python experiments/benchmarks/packed_rows.py --recipe=fade_qwen25_7b --topology=v5e:8x8 \\
    --lengths="lognormal(mean=600, prompt=200)"

Rollouts are packed as a run of the recipe packs them, with its settings for the slice if it has
any. Nothing is compiled, and no TPU is needed. Without a recipe the table of all recipes of full
size is written.

Lengths are of `costs.workload`. In the table those of responses are lognormal, cut off at the
recipe's limit; the mean is that of the distribution before the cut.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

import jax
import numpy as np
from ml_collections import ConfigDict

from docs.costs import recipe_config
from experiments.benchmarks.tables import write_results
from rlvr_jax import specs
from rlvr_jax.costs import workload
from rlvr_jax.costs.workload import Lengths, count_packing
from rlvr_jax.rollouts.packing import RowLayout
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.build import batch_shape
from rlvr_jax.train.setup.programs import make_row_layout

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "benchmarks" / "results" / "packed_rows"
COMMAND = "python experiments/benchmarks/packed_rows.py"

DRAWS = 5
SIGMA, PROMPT = 0.8, 200  # of the table; tokens of every prompt


class Case(NamedTuple):
  """A recipe on a slice; None stands for the recipe's own."""

  recipe: str
  topology: str
  problems: int | None = None  # batch.prompts
  tokens: int | None = None  # batch.tokens_per_micro_batch


# `fade` and `mu_grpo` split rows on v5e:8x8, with tensor 4, as on v5p:2x2x4.
CASES = (
  Case("salt_qwen25_math_7b", "v5p:2x2x4"),
  Case("salt_qwen25_math_7b", "v5e:8x8"),
  Case("p3o_qwen3_4b", "v5p:2x2x4"),
  Case("p3o_qwen3_4b", "v5e:8x8"),
  Case("fade_qwen25_7b", "v5p:2x2x4"),
  Case("mu_grpo_r1_distill_7b", "v5p:2x2x4"),
  Case("gsm8k_qwen25_05b", "v5e:2x4"),
  Case("gsm8k_qwen25_05b", "v5e:1x1"),
  Case("base", "v5p:2x2x4"),
  Case("base", "v5p:2x2x4", problems=64),
)
SHARES = {"1/6": 1 / 6, "1/3": 1 / 3, "1/2": 1 / 2}  # means, as shares of the limit


def case_config(case: Case) -> ConfigDict:
  """The recipe's configuration, with a mesh of all chips."""
  config = recipe_config(case.recipe, case.topology)
  chips = int(np.prod([int(size) for size in re.findall(r"\d+", case.topology.split(":")[1])]))
  config.mesh.fsdp = chips // (config.mesh.data * config.mesh.tensor)
  batch = config.batch
  batch.prompts = case.problems or batch.prompts
  batch.tokens_per_micro_batch = case.tokens or batch.tokens_per_micro_batch
  return config


def recipe_layout(config: ConfigDict) -> RowLayout:
  """The layout of a run's rows on TPUs."""
  sizes = tuple(config.mesh[axis] for axis in sharding.AXES)
  mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
  return make_row_layout(config.batch, batch_shape(config), "splash", mesh)


def measure(case: Case, lengths: Lengths, draws: int = DRAWS) -> np.ndarray:
  """f64[draws], places over tokens."""
  config = case_config(case)
  shape, layout = batch_shape(config), recipe_layout(config)
  batches = [lengths.draw(shape, number) for number in range(draws)]
  return np.array([count_packing(batch, layout).places_per_token for batch in batches])


def measure_all() -> list[dict[str, str]]:
  """The rows of the table: mean of the draws, and the largest."""
  rows = []
  for case in CASES:
    config = case_config(case)
    batch, limit = config.batch, config.max_response_length
    row = {"recipe, slice": f"`{case.recipe}`, {case.topology}"}
    row["problems × responses × tokens"] = f"{batch.prompts} × {batch.group_size} × {limit}"
    for name, share in SHARES.items():
      lengths = workload.lognormal(mean=share * limit, sigma=SIGMA, prompt=PROMPT)
      ratios = measure(case, lengths)
      row[f"mean {name} of the limit"] = f"{ratios.mean():.2f} (≤ {ratios.max():.2f})"
    rows.append(row)
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--recipe", help="a module of configs/full_size; by default all of them")
  parser.add_argument("--topology", default="v5p:2x2x4", help="TPU slice; all its chips are used")
  parser.add_argument("--problems", type=int, help="batch.prompts; by default the recipe's")
  parser.add_argument("--tokens", type=int, help="batch.tokens_per_micro_batch, likewise")
  parser.add_argument("--lengths", default="longest", help="a component of costs.workload")
  chosen = parser.parse_args()
  if chosen.recipe is not None:
    case = Case(chosen.recipe, chosen.topology, chosen.problems, chosen.tokens)
    ratios = measure(case, specs.make("--lengths", workload, chosen.lengths, Lengths))
    print(f"places over tokens: mean {ratios.mean():.3f}, largest of {DRAWS}: {ratios.max():.3f}")
    return
  rows = measure_all()
  conditions = {"σ": SIGMA, "draws": DRAWS, "prompts": f"{PROMPT} tokens"}
  print(write_results(RESULTS, "Places over tokens of packed rows", rows, conditions))


if __name__ == "__main__":
  main()
