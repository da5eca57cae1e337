"""Claims of docs/reproduction.md, comparisons that decide claims, and further comparisons."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from docs.deciding import Comparison, OfRun, Result, Side, Task, differences, results, side
from experiments.large_ratios import sweep as ratios
from experiments.large_ratios.sweep import at_lower, with_new_seeds
from experiments.large_ratios.tables import PRICE, RACES, SOONER, UPDATES_PER_HAND_OVER, speedups
from experiments.low_precision import tables as low
from experiments.other_samplers.sweep import EQUAL, LARGER, half_from
from experiments.sampled_feature.sweep import BONUS, ROLLOUTS, SIZES, fixed, grpo, salt
from experiments.sampled_feature.tables import gain_of_size
from experiments.steps.tables import TIGHT
from experiments.testbed import report
from experiments.testbed.claims import MATTERS
from experiments.testbed.report import GRPO, peak_update
from rlvr_jax.evaluate.compare import METRIC, final_value, rise

PAPERS = {
  "S": "SALT, arXiv 2606.05800",
  "P": "P3O, arXiv 2605.12380",
  "F": "FADE, arXiv 2607.01490",
  "M": "μ-GRPO, arXiv 2605.17570",
}
VERDICTS = (
  *("found", "excluded beyond the margin", "reversed", "undecided"),
  *("not tested", "not testable", "description"),
)


# --- tasks and their runs -------------------------------------------------------------------------

QUICKSTART = Task("quickstart", "salt_geometry/README.md", results("salt_geometry"))
MISMATCH = Task("mismatch", "p3o_mismatch/README.md", results("p3o_mismatch"))
RECIPES = Task("recipes", "recipes/README.md", results("recipes"))
WRITTEN = Task("written steps", "sampled_feature/README.md", results("sampled_feature"))
PRECISION = Task("low precision", "low_precision/README.md", results("low_precision"))
STAGES = Task("two stages", "mu_grpo/README.md", results("mu_grpo"))
RATIOS = Task("large ratios", "large_ratios/README.md", results("large_ratios"))
OTHERS = Task("other samplers", "other_samplers/README.md", results("other_samplers"))
ENTROPIC = Task("high entropy", "high_entropy/README.md", results("high_entropy"))
STEPS = Task("`steps`", "steps/README.md", results("steps"))


# --- values of a run ------------------------------------------------------------------------------


def average(metric: str) -> OfRun:
  """The mean of a metric over the measurements of a run of experiments/salt_geometry."""
  return lambda run: statistics.mean(value for _, value in run["curves"][metric])


def measured(name: str) -> OfRun:
  """A value that an experiment has stored in a run's field "measured", by its name."""
  return lambda run: run["measured"][name]


def start(run: Result) -> float:
  """Held-out pass@1 before the first update."""
  return run["evaluations"][METRIC][0]


def start_8(run: Result) -> float:
  """Held-out pass@8 before the first update."""
  return run["evaluations"]["eval/pass@8"][0]


def fall(run: Result) -> float:
  """Highest held-out pass@1 minus late held-out pass@1."""
  return HIGHEST(run) - LATE(run)


def late_rise(run: Result) -> float:
  """Late held-out pass@1 minus held-out pass@1 before the first update."""
  return LATE(run) - start(run)


def correlation_above_chance(run: Result) -> float:
  """The correlation of two cosine matrices, minus its 95 % quantile over permutations."""
  correlation, permuted = (
    average(f"geometry/agreement_{name}")(run) for name in ("correlation", "permutation_quantile")
  )
  return correlation - permuted


def directions_per_rollout(run: Result) -> float:
  """The participation ratio by the feature `score`, divided by the number of rollouts."""
  return measured("PR, score")(run) / ROLLOUTS


LATE, LATE_16, HIGHEST = report.late_mean(), report.late_mean("eval/pass@16"), report.peak_value()
PR, N_EFF = average("geometry/participation_ratio"), average("geometry/effective_rollouts")
N_EFF_A = average("geometry/effective_rollouts_reweighted")
RESIDUAL = average("geometry/residual_energy")
STEPS_PR, STEPS_N_EFF = (
  report.geometry_value(name) for name in ("participation_ratio", "effective_rollouts")
)
STEPS_RESIDUAL = report.geometry_value("residual_energy", "sampled")
ENTROPY, RANK_ONE = measured("entropy over the run"), measured("head's rank-1 fraction")


def speedup(name: str) -> Side:
  """The speed-up of stale over fresher rollouts in a race, from experiments/large_ratios."""
  race = RACES[name]
  found = speedups(RATIOS.all_runs, race, PRICE, at_most=race.bounded)
  return Side(f"speed-up {'at most ' if race.bounded else ''}of {race.stale}", found)


def larger_groups(name: str, label: Callable[[int], str]) -> Side:
  """A method's late pass@1 with groups of 64 rollouts minus that with groups of 4.

  The runs are those of experiments/sampled_feature.
  """
  labels = {size: label(size) for size in SIZES}
  return Side(f"{name}, G = 64 less 4", gain_of_size(WRITTEN.all_runs, labels))


def sweep_mean() -> Side:
  """The mean of late pass@8 over GRPO's clip ranges, from experiments/low_precision."""
  return Side(low.SWEEP.control, low.sweep_mean(PRECISION.all_runs))


# --- the claims -----------------------------------------------------------------------------------


class Claim(NamedTuple):
  """A claim of a paper, or a part of a claim."""

  text: str
  decided: Comparison | str  # the comparison that decides the claim, or one of the last VERDICTS


def between(
  task: Task,
  arm: str,
  control: str,
  value: OfRun = LATE,
  quantity: str = "pass@1",
  margin: float = MATTERS,
  claimed: str = "more",
  plan: str = "",
) -> Comparison:
  """A comparison of two arms by a value of their runs, which is late held-out pass@1 by default."""
  sides = side(task, arm, value), side(task, control, value)
  return Comparison(quantity, *sides, task, margin, claimed, plan)


def below(value: OfRun, quantity: str, bound: float, meaning: str) -> Comparison:
  """The comparison for the claim that a value of GRPO's gradients is lower than a bound."""
  above = Side(f"{bound:g} ({meaning})", {}, bound)
  return Comparison(quantity, above, side(WRITTEN, grpo(16), value), WRITTEN, 0.1)


_ALPHA_0 = between(WRITTEN, salt(16), fixed(0.0), plan="S4, α = 0")
_DEGRADED = low.label(low.GRPO, *low.HARDEST)
_RELAXED, _TIGHT = at_lower("relaxed"), at_lower("GRPO, ε = 0.2")
_CEILING = (1 + PRICE / 4) / (1 + PRICE / UPDATES_PER_HAND_OVER)  # if updates teach alike

CLAIMS = {  # S1 … M5; a letter distinguishes the parts of a claim
  "S1a": Claim(
    "under GRPO gradients are of low rank: low PR",
    below(directions_per_rollout, "PR by `score`, over the rollouts", 0.5, "half"),
  ),
  "S1b": Claim(
    "they cancel: low n_eff, by the paper's feature `score`",
    below(measured("n_eff, score"), "n_eff by `score`", 1.0, "they cancel"),
  ),
  "S1c": Claim(
    "the same by `sampled`", below(measured("n_eff"), "n_eff by `sampled`", 1.0, "they cancel")
  ),
  "S2a": Claim(
    "SALT raises n_eff over GRPO and DAPO",
    between(
      WRITTEN, salt(16), grpo(16), measured("n_eff of A′"), "n_eff of A′", 0.1, plan="S2, n_eff"
    ),
  ),
  "S2b": Claim(
    "it raises PR",
    between(WRITTEN, salt(16), grpo(16), measured("PR"), "PR", 0.2, plan="S2, PR"),
  ),
  "S2c": Claim("it raises accuracy", between(WRITTEN, salt(16), grpo(16), plan="S2")),
  "S3a": Claim(
    "SALT has the best PR–n_eff trade-off: a random subspace is worse",
    between(
      QUICKSTART, "SALT, G = 16", "SALT, random subspace, G = 16", N_EFF_A, "n_eff of A′", 1.0
    ),
  ),
  "S3b": Claim("the shared channel alone is worse", _ALPHA_0),
  "S3c": Claim("the residual channel alone and no positive part are worse", "not tested"),
  "S4a": Claim("a fixed α is brittle, the adaptive one is not: better than α fixed at 0", _ALPHA_0),
  "S4b": Claim(
    "better than α fixed at 1", between(WRITTEN, salt(16), fixed(1.0), plan="S4, α = 1")
  ),
  "S5": Claim(
    "at a fixed budget SALT uses larger groups better",
    Comparison(
      "gain of pass@1 by larger groups",
      larger_groups("SALT", salt),
      larger_groups("GRPO", grpo),
      WRITTEN,
      MATTERS,
      plan="S5",
    ),
  ),
  "S6": Claim(
    "with G shared energy falls and the residual's rises; the bound stays, the norm falls; across"
    " prompts the norm follows the bound",
    "not tested",
  ),
  "S7": Claim(
    "LM-head and last-block geometry agree, nulls do not; signs of large entries agree",
    Comparison(
      "correlation of cosines",
      side(QUICKSTART, "GRPO, G = 8", correlation_above_chance)._replace(
        name="head with last block, G = 8"
      ),
      Side("permuted, 95 % quantile", {}),
      QUICKSTART,
      0.1,
    ),
  ),
  "S8": Claim("low PR and n_eff persist across model families; SALT raises both", "not testable"),
  "S9": Claim("the same for code", "not testable"),
  "S10a": Claim(
    "α adapts with G; the plan read it as: it rises",
    between(WRITTEN, salt(64), salt(4), measured("α"), "α", 0.1, plan="S10"),
  ),
  "S10b": Claim(
    "the clip fraction stays low: not above GRPO's",
    between(WRITTEN, grpo(16), salt(16), measured("clipped"), "clip fraction", 0.01, "not less"),
  ),
  "S11a": Claim(
    "an entropy bonus raises PR, here at G = 16 alone",
    between(WRITTEN, BONUS, grpo(16), measured("PR, score"), "PR by `score`", 1.0, plan="S11"),
  ),
  "S11b": Claim(
    "it does not change n_eff",
    between(WRITTEN, BONUS, grpo(16), measured("n_eff, score"), "n_eff by `score`", 0.3, "equal"),
  ),
  "S11c": Claim("the exploration share grows with G", "not tested"),
  "P1": Claim(
    "one P3O run matches or beats the best of GRPO with ε = 0.2, 0.4, 0.6",
    between(RATIOS, at_lower("P3O"), _TIGHT, claimed="not less", plan="P1, ε = 0.2, rate 6e-4"),
  ),
  "P2": Claim(
    "robust to rollouts sampled at another temperature",
    between(STEPS, "P3O, temperature 1.5, raw", "P3O", claimed="not less"),
  ),
  "P3": Claim(
    "robust to bf16 training with fp8 rollouts, where GRPO degrades",
    between(
      PRECISION,
      low.label(low.P3O, "bfloat16", "fp8 rollouts"),
      low.label(low.P3O, "bfloat16"),
      claimed="not less",
      plan="P3, bfloat16, fp8 rollouts",
    ),
  ),
  "P4a": Claim(
    "pass@k matches or beats the averaged GRPO sweep",
    Comparison(
      "pass@8",
      side(PRECISION, low.SWEEP.arm, low.LATE_8),
      sweep_mean(),
      PRECISION,
      MATTERS,
      "not less",
      "P4",
    ),
  ),
  "P4b": Claim(
    "with fp8 rollouts GRPO collapses: it ends below its start",
    Comparison(
      "pass@8",
      side(PRECISION, _DEGRADED, start_8)._replace(name=f"{_DEGRADED}, at the start"),
      side(PRECISION, _DEGRADED, low.LATE_8),
      PRECISION,
      MATTERS,
    ),
  ),
  "P5a": Claim(
    "better than GRPO in a one-step asynchronous pipeline, both at a rate of 6e-4",
    between(
      RATIOS,
      at_lower("P3O, lag 1"),
      at_lower("GRPO, ε = 0.2, lag 1"),
      plan="P5, lag 1, rate 6e-4",
    ),
  ),
  "P5b": Claim("the same, each at its own best rate", "not tested"),
  "P5c": Claim("steadier, and in a two-step pipeline", "not tested"),
  "P6": Claim(
    "robust to half of the rollouts from another model",
    between(OTHERS, half_from(LARGER, "P3O"), "P3O", claimed="not less", plan="P6, larger model"),
  ),
  "P7": Claim(
    "a second anchor, to the reference, collapses at temperature 1.2; P3O does not",
    "not testable",
  ),
  "F1": Claim(
    "success-heavy mass collapses entropy",
    between(
      ENTROPIC, "r − r̄", "success-heavy", ENTROPY, "entropy over the run, nats", 0.02, plan="F1"
    ),
  ),
  "F2": Claim(
    "failure-heavy mass drives the head's update to rank one",
    between(
      ENTROPIC, "failure-heavy", "r − r̄", RANK_ONE, "head's rank-1 fraction", 0.05, plan="F2"
    ),
  ),
  "F3a": Claim(
    "peaks earlier in pass@1 than the best static estimator",
    between(
      ENTROPIC,
      "success-heavy",
      "FADE",
      peak_update,
      "update of the highest pass@1",
      30.0,
      plan="F3, sooner",
    ),
  ),
  "F3b": Claim(
    "and not lower",
    between(
      ENTROPIC,
      "FADE",
      "success-heavy",
      HIGHEST,
      "highest pass@1",
      claimed="not less",
      plan="F3, as high",
    ),
  ),
  "F3c": Claim(
    "has the best pass@k curve",
    between(
      ENTROPIC,
      "FADE",
      "pass@4 training",
      LATE_16,
      "pass@16",
      claimed="not less",
      plan="F3, as broad",
    ),
  ),
  "M1a": Claim(
    f"reaches GRPO's accuracy sooner, which here can be by {_CEILING:.2f} × at most",
    Comparison(
      "times as fast as GRPO to its accuracy",
      speedup("M1, vetoed"),
      Side("1", {}, 1.0),
      RATIOS,
      SOONER,
      plan="M1, vetoed",
    ),
  ),
  "M1b": Claim("by 2.2 × in wall-clock with four stages", "not testable"),
  "M2a": Claim(
    "at large μ the tight interval plateaus: it ends below GRPO", between(STEPS, GRPO, TIGHT)
  ),
  "M2b": Claim(
    "[0, 5] gains",
    Comparison(
      "pass@1",
      side(RATIOS, _RELAXED, LATE),
      side(RATIOS, _RELAXED, start)._replace(name="at the start"),
      RATIOS,
      MATTERS,
    ),
  ),
  "M2c": Claim(
    "and then collapses",
    between(RATIOS, _RELAXED, _TIGHT, fall, "fall of pass@1 from its highest"),
  ),
  "M3": Claim(
    "masking the triggers alone still collapses; the suffix or broader scopes are stable",
    between(
      RATIOS,
      with_new_seeds(ratios.SUFFIX),
      with_new_seeds(ratios.TRIGGER),
      plan="M3, new seeds",
    ),
  ),
  "M4": Claim(
    "four refreshes against 1024: switching overhead and memory contention go", "not testable"
  ),
  "M5": Claim("reward dynamics by stage; vetoed token fraction", "description"),
}
DECIDED_BY: Mapping[str, Comparison] = {
  name: claim.decided for name, claim in CLAIMS.items() if isinstance(claim.decided, Comparison)
}


# --- further comparisons --------------------------------------------------------------------------


class Row(NamedTuple):
  """A difference that decides no claim and that no experiment's page shows."""

  claim: str
  task: Task
  arm: str
  control: str  # "": the arm's value is itself a difference
  value: OfRun = final_value
  quantity: str = "pass@1"

  def differences(self) -> dict[int, float]:
    """The arm's value minus the control's, by seed."""
    arm = side(self.task, self.arm, self.value)
    zero = Side("", {}, 0.0)
    return differences(arm, side(self.task, self.control, self.value) if self.control else zero)


_STEPS_32, _STEPS_GRPO_32 = "SALT, sampled, G = 32", "GRPO, G = 32"
MORE = (
  Row("S2", QUICKSTART, "SALT, G = 16", "GRPO, G = 16", N_EFF_A, "n_eff of A′"),
  Row("S2, S4", QUICKSTART, "SALT, G = 16", "GRPO, G = 16"),
  Row("S3", QUICKSTART, "SALT, G = 16", "SALT, random subspace, G = 16", PR, "PR"),
  Row("S3", QUICKSTART, "SALT, G = 16", "SALT, random subspace, G = 16"),
  Row("S3", QUICKSTART, "SALT, α = 1.0, G = 16", "SALT, G = 16"),
  Row("S4", QUICKSTART, "SALT, α = 1.0, G = 16", "GRPO, G = 16"),
  Row("S4", WRITTEN, fixed(1.0), grpo(16), LATE),
  Row("S4", WRITTEN, fixed(0.0), grpo(16), LATE),
  Row("S5", WRITTEN, salt(64), salt(4), LATE),
  Row("S5", WRITTEN, grpo(64), grpo(4), LATE),
  Row("S5", QUICKSTART, "SALT, G = 4", "GRPO, G = 4"),
  Row("S5", QUICKSTART, "SALT, G = 64", "GRPO, G = 64"),
  Row("S5", STEPS, _STEPS_32, _STEPS_GRPO_32, LATE),
  Row("S5", STEPS, _STEPS_GRPO_32, GRPO, LATE),
  Row("S5", STEPS, _STEPS_32, "SALT, sampled", LATE),
  Row("S6", QUICKSTART, "GRPO, G = 64", "GRPO, G = 4", RESIDUAL, "residual energy"),
  Row("S6", STEPS, _STEPS_GRPO_32, GRPO, STEPS_RESIDUAL, "residual energy"),
  Row(
    "S10",
    STEPS,
    _STEPS_32,
    "SALT, sampled",
    report.training_mean("reweighting/alpha"),
    "α",
  ),
  Row("S11", WRITTEN, BONUS, grpo(16), measured("n_eff"), "n_eff by `sampled`"),
  Row("S11", WRITTEN, BONUS, grpo(16), LATE),
  Row("S11", QUICKSTART, "GRPO + entropy bonus, G = 16", "GRPO, G = 16", PR, "PR by `score`"),
  Row("S11", QUICKSTART, "GRPO + entropy bonus, G = 16", "GRPO, G = 16", N_EFF, "n_eff by `score`"),
  Row("S11", STEPS, "entropy bonus 0.05", GRPO, STEPS_PR, "PR by `score`"),
  Row("S11", STEPS, "entropy bonus 0.05", GRPO, STEPS_N_EFF, "n_eff by `score`"),
  *(Row("P1", MISMATCH, "matched: P3O", f"matched: GRPO, ε = {clip}") for clip in (0.2, 0.4, 0.6)),
  Row("P1", OTHERS, "P3O", "GRPO", LATE),
  Row("P2", MISMATCH, "temperature 1.5: P3O", "matched: P3O"),
  Row("P2", MISMATCH, "temperature 1.5: GRPO, ε = 0.2", "matched: GRPO, ε = 0.2"),
  Row("P3", MISMATCH, "int8 rollouts: P3O", "matched: P3O"),
  Row("P3", MISMATCH, "int8 rollouts: GRPO, ε = 0.2", "matched: GRPO, ε = 0.2"),
  Row("P3", STEPS, "P3O, fp8 rollouts", "P3O", LATE),
  Row("P3", STEPS, "GRPO, fp8 rollouts", GRPO, LATE),
  Row("P4", STEPS, "P3O, fp8 rollouts", "GRPO, fp8 rollouts", LATE_16, "pass@16"),
  Row("P5", RATIOS, ratios.FREE, at_lower("GRPO, ε = 0.2, lag 1"), LATE),
  Row("P5", RATIOS, ratios.CAP, at_lower("GRPO, ε = 0.2, lag 1"), LATE),
  Row("P5", RATIOS, ratios.PULL, at_lower("GRPO, ε = 0.2, lag 1"), LATE),
  Row("P5", MISMATCH, "lag 1: P3O", "lag 1: GRPO, ε = 0.2"),
  Row("P5", MISMATCH, "lag 2: P3O", "lag 2: GRPO, ε = 0.2"),
  Row("P5", STEPS, "P3O, lag 8", "GRPO, lag 8", LATE),
  Row("P5", STEPS, "P3O, lag 8", "GRPO, lag 8", LATE_16, "pass@16"),
  Row("P6", OTHERS, half_from(LARGER, "GRPO"), "GRPO", LATE),
  Row("P6", OTHERS, half_from(EQUAL, "GRPO"), "GRPO", LATE),
  Row("P6", STEPS, "P3O, half from another policy", "P3O", LATE),
  Row("P6", STEPS, "GRPO, half from another policy", GRPO, LATE),
  Row("P7", STEPS, "P3O, two anchors, temperature 1.2, raw", "P3O, temperature 1.2, raw", LATE),
  Row("F1", ENTROPIC, "r − r̄", "failure-heavy", ENTROPY, "entropy over the run, nats"),
  Row("F3", STEPS, "FADE, H* = 0.5", GRPO, HIGHEST, "highest pass@1"),
  Row("F3", STEPS, "FADE, H* = 0.5", GRPO, LATE_16, "pass@16"),
  Row("F3", RECIPES, "fade", "grpo"),
  Row("F3", RECIPES, "pass_at_k", "grpo"),
  Row("M2", STAGES, "tight clip", "GRPO, μ = 4"),
  Row("M2", STEPS, "relaxed, μ = 96", "", rise, "pass@1, last less first"),
  Row("M2", RATIOS, "relaxed", "GRPO, ε = 0.2", fall, "fall of pass@1 from its highest"),
  *(
    Row("M3", STAGES, f"veto {scope}, κ = 0.1{rate}", f"relaxed clip{rate}")
    for rate in ("", ", higher rate")
    for scope in ("trigger", "suffix", "trigger_and_suffix")
  ),
  Row("M3", STAGES, "veto response, κ = 0.1", "relaxed clip"),
  Row("M3", STEPS, "trigger, μ = 96", "", rise, "pass@1, last less first"),
  *(
    Row("M3", RATIOS, rate(label), "", late_rise, "late pass@1 less first")
    for rate in (at_lower, with_new_seeds)
    for label in (ratios.SUFFIX, ratios.TRIGGER)
  ),
)
