"""Repeats one arm of every experiment on the testbed and compares it with the committed numbers.

  python -m rlvr_jax.main --mode=sweep --config=experiments/testbed/config.py \\
    --sweep=experiments/again.py --workdir=runs/again
  python -m experiments.again --workdir=runs/again

from the repository root. The second command prints a table. Its exit status is 1 if any number
other than a timing differs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments import evidence
from experiments.testbed.arms import EXPERIMENTS
from experiments.testbed.report import measure_run
from rlvr_jax.evaluate import compare

SEED = 0
ARMS = {  # folder of an experiment → its arm
  "salt_geometry": "SALT, sampled",
  "p3o_mismatch": "P3O, temperature 1.5, raw",
  "fade": "FADE",
  "mu_grpo": "suffix, μ = 96",
  "together": "all four",
}
_MACHINE_FIELDS = {"number", "commit", "command", "layout", "workdir"}


def get_sweep() -> list[dict[str, Any]]:
  by_label = {run["label"]: run for run in evidence.IN_ORDER if run["seed"] == SEED}
  return [by_label[label] for label in ARMS.values()]


def numbers(result: Mapping[str, Any]) -> dict[str, Any]:
  """Path → value of all numbers that a run computes, without timings."""
  computed = {name: x for name, x in result.items() if name not in _MACHINE_FIELDS}
  leaves = jax.tree.leaves_with_path(json.loads(json.dumps(computed)), is_leaf=lambda x: x is None)
  by_path = {jax.tree_util.keystr(path): value for path, value in leaves}
  return {path: value for path, value in by_path.items() if "'seconds'" not in path}


def differing_paths(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
  """Paths of the numbers that differ between two results, or that one of them lacks."""
  a = numbers(first)
  b = numbers(second)
  return [path for path in sorted({*a, *b}) if path not in a or path not in b or a[path] != b[path]]


def main(argv: Sequence[str] | None = None, home: pathlib.Path = EXPERIMENTS) -> int:
  """Prints the table; returns 1 if any number differs.

  Args:
    argv: command line; None for that of the process.
    home: folder of the experiments, with their committed results.
  """
  parser = argparse.ArgumentParser()
  parser.add_argument("--workdir", required=True, help="workdir of the sweep")
  again = {run["label"]: run for run in compare.read_results(parser.parse_args(argv).workdir)}
  rows = {}
  num_differing = 0
  for folder, label in ARMS.items():
    runs = compare.group_by_label(compare.read_results(home / folder / "testbed.json"))[label]
    first = next(run for run in runs if run["seed"] == SEED)
    second = again[label] | measure_run(again[label]["workdir"])
    paths = differing_paths(first, second)
    num_differing += len(paths)
    example = f", such as {paths[0]}" if paths else ""
    rows[folder] = [label, str(len(numbers(first))), f"{len(paths)}{example}"]
  print(compare.markdown_table(["arm", "numbers", "that differ"], rows, "experiment"))
  return min(num_differing, 1)


if __name__ == "__main__":
  sys.exit(main())
