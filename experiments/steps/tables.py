"""Writes the tables and the figure of README.md: python -m experiments.steps.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.mu_grpo import hand_over
from experiments.steps.sweep import ARMS, FIRST, GRPO, LARGE, MU, SETTINGS
from experiments.testbed import report
from experiments.testbed.report import Panel, Result, geometry_value, late_mean, training_mean
from rlvr_jax.evaluate import compare
from rlvr_jax.evaluate.compare import METRIC, markdown_table

HOME = pathlib.Path(__file__).parent
LATE, LATE_16 = late_mean(), late_mean("eval/pass@16")
TIGHT, RELAXED, SUFFIX, TRIGGER = (
  f"{name}, μ = {MU}" for name in ("tight", "relaxed", "suffix", "trigger")
)
RISE = 0.2  # of held-out pass@1, at which seconds are compared
ENTROPY = training_mean("policy/entropy")
RANK_ONE = geometry_value("head_rank_one_fraction", when="last")
LEARNING = {
  "pass@1": LATE,
  "pass@16": LATE_16,
  "entropy": ENTROPY,
  "ESS": training_mean("behavior/ess"),
}
OF_SALT = (
  *(GRPO, "SALT, sampled", "SALT, score", f"GRPO, G = {LARGE}", f"SALT, sampled, G = {LARGE}"),
  "entropy bonus 0.05",
)
GEOMETRY = {
  **{
    f"{title}, {feature}": geometry_value(metric, feature)
    for title, metric in (("PR", "participation_ratio"), ("n_eff", "effective_rollouts"))
    for feature in ("score", "sampled")
  },
  "n_eff of A′, sampled": geometry_value("effective_rollouts_reweighted", "sampled"),
  "α": training_mean("reweighting/alpha"),
  "shared share of A": training_mean("reweighting/shared_share"),
  "residual energy": geometry_value("residual_energy", "sampled"),
  "update norm": geometry_value("update_norm", "sampled"),
  "head with last block": geometry_value("agreement_correlation"),
  "permuted, 95 %": geometry_value("agreement_permutation_quantile"),
  "signs that agree": lambda result: result["signs"],
  "by chance": lambda result: result["signs_by_chance"],
}
OF_FADE = (GRPO, "FADE", "FADE, H* = 0.5", "success-heavy", "failure-heavy", "pass@4 training")
OF_STAGES = (GRPO, TIGHT, RELAXED, SUFFIX, TRIGGER)
TOGETHER = (GRPO, "SALT, sampled", "P3O", "FADE", SUFFIX, "all four")


def value_after_first_stage(result: Result) -> float:
  """Held-out pass@1 at the end of the first stage."""
  evaluations = result["evaluations"]
  return evaluations[METRIC][evaluations["updates"].index(MU)]


STAGES = {
  "after the first stage": value_after_first_stage,
  "pass@1": LATE,
  "largest ratio where A < 0": lambda r: max(r["train"]["behavior/ratio_max_negative"]),
  "vetoed tokens": training_mean("veto/token_fraction"),
  "trigger rate": training_mean("veto/trigger_rate"),
}
PANELS = (
  Panel("SALT", METRIC, OF_SALT[:-1]),
  Panel("rollouts of another policy", METRIC, [x for x in FIRST if "GRPO" in x or "P3O" in x]),
  Panel("FADE and static estimators", METRIC, OF_FADE),
  Panel("stages", METRIC, OF_STAGES),
  Panel("each method alone, and all four", METRIC, TOGETHER),
  Panel("the same: pass@16", "eval/pass@16", TOGETHER),
)


def setting_table(results: Sequence[Result]) -> str:
  """What rollouts of another policy cost each method, and how P3O compares with GRPO there."""

  def difference(label: str, baseline: str) -> str:
    both = [r for r in results if r["label"] in (label, baseline)]
    if len({r["label"] for r in both}) < 2:
      return "–"
    found = compare.differences(both, baseline, LATE)[label]
    return compare.difference_cell(found) if found else "–"

  rows = {"own": ["–", "–", difference("P3O", GRPO)]}
  for setting in SETTINGS:
    grpo, p3o = f"{GRPO}, {setting}", f"P3O, {setting}"
    rows[setting] = [difference(grpo, GRPO), difference(p3o, "P3O"), difference(p3o, grpo)]
  return markdown_table(
    ["GRPO less its own", "P3O less its own", "P3O less GRPO"], rows, "rollouts"
  )


def costs(results: Sequence[Result], label: str, mu: int) -> dict[int, hand_over.Cost | None]:
  """Seed → cost of a rise of pass@1 by `RISE`."""
  return {
    run["seed"]: hand_over.cost_to(run, run["evaluations"][METRIC][0] + RISE, mu)
    for run in results
    if run["label"] == label
  }


def price_curves(results: Sequence[Result], prices: Sequence[float]) -> list[hand_over.Curve]:
  """Curves of GRPO's seconds over those of the suffix arm to that rise, by price."""
  return hand_over.make_curves(costs(results, GRPO, 4), costs(results, SUFFIX, MU), prices)


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure of held-out pass@1, a panel for each question."""
  report.draw_panels(results, PANELS, home / "curves.png")


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown."""
  sections = {
    "All arms": report.table(results, list(ARMS), LEARNING, compared=LATE),
    "Late pass@1 where another policy samples": setting_table(results),
    "Geometry by SALT's two features": report.table(results, OF_SALT, GEOMETRY),
    "Entropy over the run": report.table(results, OF_FADE, {}, compared=ENTROPY, digits=5),
    "The head's rank-1 fraction at the end": report.table(
      results, OF_FADE, {"rank-1 fraction": RANK_ONE}, compared=RANK_ONE
    ),
    "Stages": report.table(results, OF_STAGES, STAGES),
    f"Seconds of GRPO over those of {SUFFIX}, to a rise of {RISE:g}": hand_over.table(
      lambda prices: price_curves(results, prices)
    ),
  }
  return "\n\n".join(f"{title}:\n\n{text}" for title, text in sections.items())


if __name__ == "__main__":
  report.write_page(HOME, tables, report.measure_run, draw, list(ARMS))
