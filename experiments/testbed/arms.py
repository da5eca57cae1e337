"""Arms of the experiments on the testbed, and the order of their runs.

An arm is a label and what it changes in `config.py`. Every experiment has `CLAIMS`, the arms that a
claim of its paper needs, and `ABLATIONS`, which come after.
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
GRPO = "GRPO"  # the baseline of all experiments: the configuration as it is
BASE: Arms = {GRPO: {}}
TOUR = {"config": "experiments/testbed/config.py:tour"}


def in_groups_of(group_size: int) -> dict[str, int]:
  """Fields for this group size, at the same number of rollouts."""
  return {"batch.group_size": group_size, "batch.prompts": ROLLOUTS // group_size}


def runs(arms: Arms) -> list[dict[str, Any]]:
  """All arms with the first seed, then all with the next."""
  return [
    {"label": label, "seed": seed, **fields} for seed in SEEDS for label, fields in arms.items()
  ]


def merged(groups: Iterable[Arms]) -> Arms:
  """Arms of several experiments, shared ones once.

  Raises:
    ValueError: a label stands for two things.
  """
  found: dict[str, Mapping[str, Any]] = {}
  for arms in groups:
    for label, fields in arms.items():
      if found.setdefault(label, fields) != fields:
        raise ValueError(
          f"two experiments call an arm {label!r}, but one sets {dict(found[label])} and the other"
          f" {dict(fields)}; give one of them another label"
        )
  return found


def committed(folder: pathlib.Path = EXPERIMENTS) -> set[tuple[str, int]]:
  """(label, seed) of the runs whose results are committed, in an experiment's testbed.json."""
  paths = sorted(folder.glob("*/testbed.json"))
  return {(r["label"], r["seed"]) for path in paths for r in compare.read_results(path)}
