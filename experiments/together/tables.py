"""Writes the tables of README.md: python -m experiments.together.tables."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.testbed import report
from experiments.testbed.arms import GRPO, Arms
from experiments.testbed.report import Result, end_mean, late_mean, training_mean
from experiments.together.testbed import ABLATIONS, CLAIMS

PAGE = pathlib.Path(__file__).parent / "README.md"
ARMS: Arms = {**CLAIMS, **ABLATIONS}
COLUMNS = {
  "pass@1": late_mean(),
  "pass@16": late_mean("eval/pass@16"),
  "entropy at the end": end_mean("policy/entropy"),
  "ESS": training_mean("behavior/ess"),
  "model TFLOPs": lambda result: result["evaluations"]["flops"][-1] / 1e12,
}
PANELS = (
  report.Panel("held-out pass@1", "eval/pass@1", list(ARMS)),
  report.Panel("held-out pass@16", "eval/pass@16", list(ARMS)),
  report.Panel("entropy, nats per token", "policy/entropy", list(ARMS)),
)


def tables(results: Sequence[Result]) -> str:
  without = [label for label in ARMS if label != GRPO]
  return "\n\n".join(
    [
      "Against GRPO:",
      report.table(results, list(ARMS), COLUMNS, compared=late_mean()),
      "Against all four:",
      report.table(results, without, {}, compared=late_mean(), baseline="all four"),
    ]
  )


if __name__ == "__main__":
  report.write_page(PAGE, ARMS, tables, PANELS)
