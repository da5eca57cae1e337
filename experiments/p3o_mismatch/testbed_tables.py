"""Writes the tables of TESTBED.md: python -m experiments.p3o_mismatch.testbed_tables."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.p3o_mismatch.testbed import ABLATIONS, CLAIMS
from experiments.testbed import report
from experiments.testbed.arms import GRPO, Arms
from experiments.testbed.report import Result, end_mean, late_mean, training_mean

PAGE = pathlib.Path(__file__).parent / "TESTBED.md"
ARMS: Arms = {**CLAIMS, **ABLATIONS}
SETTINGS = [
  label.partition(", ")[2] for label in ARMS if f"P3O, {label.partition(', ')[2]}" in ARMS
]
SETTINGS = list(dict.fromkeys(setting for setting in SETTINGS if f"GRPO, {setting}" in ARMS))
COLUMNS = {
  "pass@1": late_mean(),
  "pass@16": late_mean("eval/pass@16"),
  "entropy at the end": end_mean("policy/entropy"),
  "ESS": training_mean("behavior/ess"),
  "KL to β (k3)": training_mean("behavior/kl_k3"),
  "clip fraction": training_mean("loss/clip_fraction"),
  "updates skipped": end_mean("update/skipped"),
}
SHOWN = (
  *(GRPO, "P3O", "GRPO, temperature 1.5, raw", "P3O, temperature 1.5, raw"),
  *("GRPO, half from another policy", "P3O, half from another policy"),
)
PANELS = (
  report.Panel("held-out pass@1", "eval/pass@1", SHOWN),
  report.Panel("entropy, nats per token", "policy/entropy", SHOWN),
  report.Panel("effective sample size", "behavior/ess", SHOWN),
)


def tables(results: Sequence[Result]) -> str:
  matched = [GRPO, "P3O", "GRPO, ε = 0.4", "GRPO, ε = 0.6"]
  parts = [
    "Matched rollouts, against GRPO with ε = 0.2:",
    report.table(results, matched, COLUMNS, compared=late_mean()),
  ]
  for setting in SETTINGS:
    labels = [label for label in ARMS if label.endswith(f", {setting}")]
    baseline = f"GRPO, {setting}"
    parts += [f"{setting[0].upper()}{setting[1:]}:"]
    parts += [report.table(results, labels, COLUMNS, compared=late_mean(), baseline=baseline)]
  degraded = [GRPO, *(f"GRPO, {setting}" for setting in SETTINGS)]
  parts += ["What a setting costs GRPO, against its matched run:"]
  parts += [report.table(results, degraded, {"pass@1": late_mean()}, compared=late_mean())]
  degraded = ["P3O", *(f"P3O, {setting}" for setting in SETTINGS)]
  parts += ["And P3O:"]
  parts += [
    report.table(results, degraded, {"pass@1": late_mean()}, compared=late_mean(), baseline="P3O")
  ]
  return "\n\n".join(parts)


if __name__ == "__main__":
  report.write_page(PAGE, ARMS, tables, PANELS)
