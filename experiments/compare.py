"""Compares recipes on one recorded batch of rollouts, fresh and stale.

  python -m experiments.compare --workdir=runs/compare

Trains the quickstart's policy for `--before` updates, records one batch of rollouts to
WORKDIR/rollouts.safetensors, and trains on for the largest of `--lags`. For every recipe and lag
it takes the gradient of the recipe's loss on the recorded batch at the parameters of that lag:
loss, gradient norm, cosine of the update direction (the negative gradient, before the optimizer) to
GRPO's, share of clipped or capped tokens, ESS, ratio of the gradient masses mS/mF. Writes
compare.md, compare.json and one heat map of all pairwise cosines per lag.

`--rollouts` replaces the recorded batch: FILE.safetensors, as this program or a non-finite stop
writes it, or RUN/rollouts:NUMBER, a batch of a run's store. Its lag then counts from the trained
policy.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import app, flags

from experiments.recipes.sweep import RECIPES
from rlvr_jax.evaluate.compare import markdown_table
from rlvr_jax.evaluate.curves import save_figure
from rlvr_jax.evaluate.figures import plot_cosines
from rlvr_jax.rollouts.batch import write_batch
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.same_rollouts import compare_gradients, load_recipe

COLUMNS = {  # heading → metric
  "loss": "loss",
  "gradient norm": "gradient_norm",
  "cosine to GRPO": "cosine",
  "clipped": "loss/clip_fraction",
  "ESS": "behavior/ess",
  "mS/mF": "advantage/mass_ratio",
}

# Recipes whose updates need what a recorded batch lacks: a teacher, several rewards.
_OTHERS = ("opd", "gdpo")

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_BASE = flags.DEFINE_string("base", "quickstart", "Recipe by which the policy is trained.")
_RECIPES = flags.DEFINE_list(
  "recipes",
  [name for name in RECIPES if name not in _OTHERS],
  "Recipes to compare; grpo is always included.",
)
_BEFORE = flags.DEFINE_integer("before", 50, "Updates before the batch is recorded.", lower_bound=0)
_LAGS = flags.DEFINE_list("lags", ["0", "8", "32"], "Updates between recording and gradient.")
_ROLLOUTS = flags.DEFINE_string("rollouts", None, "A recorded batch to use instead; see above.")


def table(names: Sequence[str], rows: dict[str, dict[str, float]]) -> str:
  """Returns a Markdown table with one row per recipe."""

  def cell(row: dict[str, float], metric: str) -> str:
    return f"{row[metric]:.3g}" if metric in row else "–"

  cells = {name: [cell(rows[name], metric) for metric in COLUMNS.values()] for name in names}
  return markdown_table([*COLUMNS], cells, "recipe")


def draw(path: pathlib.Path, names: Sequence[str], matrix: np.ndarray, title: str) -> None:
  """Saves a heat map of pairwise cosines, with numbers."""
  side = 2.5 + 0.5 * len(names)
  with save_figure(path, size=(side, side), dpi=80) as axes:
    image = plot_cosines(axes, names, matrix)
    axes.set_title(title)
    axes.figure.colorbar(image, ax=axes, shrink=0.7, label="cosine of update directions")


def compare(workdir: pathlib.Path, **arguments: Any) -> dict[int, dict[str, dict[str, float]]]:
  """Runs the comparison and writes all files; returns the numbers by lag and recipe.

  Args:
    workdir: folder for the results.
    arguments: arguments of `compare_gradients`.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  comparison = compare_gradients(workdir, **arguments)
  write_batch(workdir / "rollouts.safetensors", comparison.batch)
  sections = []
  for lag in comparison.lags:
    title = f"{lag} updates after recording"
    draw(workdir / f"cosines_lag_{lag}.png", comparison.names, comparison.cosines[lag], title)
    sections.append(f"### {title}\n\n{table(comparison.names, comparison.numbers[lag])}")
  (workdir / "compare.md").write_text("\n\n".join(sections) + "\n")
  (workdir / "compare.json").write_text(json.dumps(comparison.numbers, indent=1))
  return comparison.numbers


def main(argv: list[str]) -> None:
  del argv
  workdir = pathlib.Path(_WORKDIR.value)
  compare(
    workdir,
    base=load_recipe(_BASE.value),
    recipes=_RECIPES.value,
    before=_BEFORE.value,
    lags=sorted({int(lag) for lag in _LAGS.value}),
    rollouts=_ROLLOUTS.value,
  )
  say((workdir / "compare.md").read_text())
  say(f"heat maps and numbers: {workdir}")


if __name__ == "__main__":
  app.run(main)
