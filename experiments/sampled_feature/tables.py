"""Writes the tables and the figure of README.md: python -m experiments.sampled_feature.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence

from experiments.sampled_feature.sweep import (
  ALPHAS,
  BASE_SIZE,
  BONUS,
  PILOT,
  RUNS,
  SIZES,
  fixed,
  grpo,
  salt,
)
from experiments.testbed.claims import (
  HEADINGS,
  Claim,
  Quantity,
  arm_table,
  claim_row,
  measured,
  quantity_tables,
  write_page,
)
from experiments.testbed.report import Panel, Result, draw_panels, late_mean
from rlvr_jax.evaluate import compare
from rlvr_jax.evaluate.compare import METRIC, markdown_table

HOME = pathlib.Path(__file__).parent
LATE = late_mean()
N_EFF, OF_LOSS, PR, PR_SCORE = "n_eff", "n_eff of A′", "PR", "PR, score"
ALPHA, RESIDUAL = "α", "residual energy"
MEASURED = {  # heading → (metric, what of its values over the updates)
  N_EFF: ("geometry/effective_rollouts", statistics.mean),
  OF_LOSS: ("geometry/effective_rollouts_reweighted", statistics.mean),
  PR: ("geometry/participation_ratio", statistics.mean),
  "n_eff, score": ("geometry/effective_rollouts_score", statistics.mean),
  PR_SCORE: ("geometry/participation_ratio_score", statistics.mean),
  ALPHA: ("reweighting/alpha", statistics.mean),
  RESIDUAL: ("geometry/residual_energy", statistics.mean),
  "update norm": ("geometry/update_norm", statistics.mean),
  "its bound": ("geometry/update_norm_bound", statistics.mean),
  "entropy": ("policy/entropy", statistics.mean),
  "clipped": ("loss/clip_fraction", statistics.mean),
}
SHOWN = (N_EFF, OF_LOSS, PR, "n_eff, score", PR_SCORE, ALPHA, "update norm", "clipped")
SMALL, LARGE = SIZES[0], SIZES[-1]
OF_SALT = Claim("S2", salt(BASE_SIZE), grpo(BASE_SIZE), "more")
ON_DAPO = Claim("S2, DAPO", "SALT on DAPO", "DAPO", "more")
QUANTITIES = (
  Quantity(
    "Late pass@1",
    (
      OF_SALT,
      ON_DAPO,
      *(Claim(f"S4, α = {alpha:g}", salt(BASE_SIZE), fixed(alpha), "more") for alpha in ALPHAS),
      *(Claim(f"S5, G = {size}", salt(size), grpo(size), "more") for size in (SMALL, LARGE)),
    ),
    LATE,
  ),
  Quantity(
    "n_eff of A′",
    (OF_SALT._replace(name="S2, n_eff"), ON_DAPO._replace(name="S2, n_eff, DAPO")),
    measured(OF_LOSS),
    0.1,
  ),
  Quantity(
    "PR",
    (OF_SALT._replace(name="S2, PR"), ON_DAPO._replace(name="S2, PR, DAPO")),
    measured(PR),
    0.2,
  ),
  Quantity(
    "PR by `score`",
    (Claim("S11", BONUS, grpo(BASE_SIZE), "more"),),
    measured(PR_SCORE),
    1.0,
  ),
  Quantity(
    "The residual's share of energy",
    (Claim("S6", grpo(LARGE), grpo(SMALL), "more"),),
    measured(RESIDUAL),
    0.05,
  ),
  Quantity("α", (Claim("S10", salt(LARGE), salt(SMALL), "more"),), measured(ALPHA), 0.1),
)
LARGER = Claim("S5", f"SALT, G = {LARGE} less {SMALL}", f"GRPO, G = {LARGE} less {SMALL}", "more")
PANELS = (
  Panel("group sizes", METRIC, [label(size) for size in SIZES for label in (grpo, salt)]),
  Panel("bases", METRIC, [grpo(BASE_SIZE), salt(BASE_SIZE), "DAPO", "SALT on DAPO"]),
  Panel(
    "α, and an entropy bonus",
    METRIC,
    [grpo(BASE_SIZE), salt(BASE_SIZE), *map(fixed, ALPHAS), BONUS],
  ),
)


def gain_of_size(results: Sequence[Result], label: Mapping[int, str]) -> dict[int, float]:
  """Seed → late pass@1 with the largest groups less that with the smallest.

  Args:
    results: with the runs of both.
    label: group size → label.
  """
  runs = compare.group_by_label(results)
  large, small = (
    {run["seed"]: LATE(run) for run in runs.get(label[size], [])} for size in (LARGE, SMALL)
  )
  return {seed: large[seed] - small[seed] for seed in sorted(large.keys() & small.keys())}


def size_table(results: Sequence[Result]) -> str:
  """What larger groups do for SALT, less what they do for GRPO."""
  of_salt, of_grpo = (
    gain_of_size(results, {size: label(size) for size in SIZES}) for label in (salt, grpo)
  )
  rows = {LARGER.name: claim_row(LARGER, of_salt, of_grpo)}
  table = markdown_table(HEADINGS, rows, "claim")
  return f"Late pass@1 with G = {LARGE} less that with G = {SMALL}:\n\n{table}"


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1, with a panel for each question."""
  draw_panels(results, PANELS, home / "curves.png")


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  arms = arm_table(results, list(RUNS), SHOWN, LATE)
  return "\n\n".join([*quantity_tables(QUANTITIES, results), size_table(results), arms])


if __name__ == "__main__":
  write_page(HOME, [*PILOT, *RUNS], MEASURED, tables, draw)
