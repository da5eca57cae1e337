"""Arms of the experiments on the testbed, and the order of their runs.

An arm is a label and the fields of `config.py` that it changes. Every experiment has `CLAIMS`, the
arms needed to test the claims of its paper, and `ABLATIONS`, which run afterwards.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.testbed.config import ROLLOUTS
from rlvr_jax.evaluate import compare

Arms = Mapping[str, Mapping[str, Any]]  # label → path of a field → value

EXPERIMENTS = pathlib.Path(__file__).parents[1]
SEEDS = range(5)
GRPO = "GRPO"  # the baseline of all experiments: the unchanged configuration
BASE: Arms = {GRPO: {}}
TOUR = {"config": "experiments/testbed/config.py:tour"}


def group_size_fields(group_size: int) -> dict[str, int]:
  """Fields that set the group size without changing the number of rollouts."""
  return {"batch.group_size": group_size, "batch.prompts": ROLLOUTS // group_size}


def runs(arms: Arms) -> list[dict[str, Any]]:
  """Runs of all arms, ordered by seed."""
  return [
    {"label": label, "seed": seed, **fields} for seed in SEEDS for label, fields in arms.items()
  ]


def merge_arms(groups: Iterable[Arms]) -> Arms:
  """Merges the arms of several experiments; shared arms occur once.

  Raises:
    ValueError: two experiments give different fields to the same label.
  """
  merged: dict[str, Mapping[str, Any]] = {}
  for arms in groups:
    for label, fields in arms.items():
      if merged.setdefault(label, fields) != fields:
        raise ValueError(
          f"two experiments call an arm {label!r}, but one sets {dict(merged[label])} and the other"
          f" {dict(fields)}; give one of them another label"
        )
  return merged


def committed_runs(folder: pathlib.Path = EXPERIMENTS) -> set[tuple[str, int]]:
  """(label, seed) of the runs with committed results, in the testbed.json of any experiment."""
  paths = sorted(folder.glob("*/testbed.json"))
  return {(r["label"], r["seed"]) for path in paths for r in compare.read_results(path)}
