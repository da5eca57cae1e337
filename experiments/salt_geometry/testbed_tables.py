"""Writes the tables of TESTBED.md: python -m experiments.salt_geometry.testbed_tables."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.salt_geometry.testbed import ABLATIONS, CLAIMS, LARGE
from experiments.testbed import report
from experiments.testbed.arms import GRPO, Arms
from experiments.testbed.report import Result, geometry_value, late_mean, training_mean

PAGE = pathlib.Path(__file__).parent / "TESTBED.md"
ARMS: Arms = {**CLAIMS, **ABLATIONS}
LEARNING = {
  "pass@1": late_mean(),
  "pass@16": late_mean("eval/pass@16"),
  "entropy": training_mean("policy/entropy"),
  "clip fraction": training_mean("loss/clip_fraction"),
}
BY_FEATURE = {
  f"{title}, {feature}": geometry_value(metric, feature)
  for title, metric in (
    ("PR", "participation_ratio"),
    ("n_eff of A", "effective_rollouts"),
    ("n_eff of A'", "effective_rollouts_reweighted"),
  )
  for feature in ("score", "sampled")
}
SPLIT = {
  "α": training_mean("reweighting/alpha"),
  "shared share of A": training_mean("reweighting/shared_share"),
  "shared energy": geometry_value("shared_energy", "sampled"),
  "residual energy": geometry_value("residual_energy", "sampled"),
  "update norm": geometry_value("update_norm", "sampled"),
  "its bound": geometry_value("update_norm_bound", "sampled"),
}
AGREEMENT = {
  "correlation": geometry_value("agreement_correlation"),
  "permutation null, 95 %": geometry_value("agreement_permutation_quantile"),
  "noise null, 95 %": geometry_value("agreement_noise_quantile"),
  "signs that agree": lambda result: result["signs"],
  "by chance": lambda result: result["signs_by_chance"],
}
SHOWN = (GRPO, "SALT, sampled", "SALT, score", f"GRPO, G = {LARGE}", f"SALT, sampled, G = {LARGE}")
PANELS = (
  report.Panel("held-out pass@1", "eval/pass@1", SHOWN),
  report.Panel("entropy, nats per token", "policy/entropy", SHOWN),
  report.Panel("α of SALT", "reweighting/alpha", SHOWN),
)


def tables(results: Sequence[Result]) -> str:
  sections = {
    "Learning": report.table(results, list(ARMS), LEARNING, compared=late_mean()),
    "Geometry, by the feature of a rollout": report.table(results, list(ARMS), BY_FEATURE),
    "What SALT splits, by sampled tokens": report.table(results, list(ARMS), SPLIT),
    "The output head against the last block": report.table(results, SHOWN, AGREEMENT),
  }
  return "\n\n".join(f"{title}:\n\n{text}" for title, text in sections.items())


if __name__ == "__main__":
  report.write_page(PAGE, ARMS, tables, PANELS)
