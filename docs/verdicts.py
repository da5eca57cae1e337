"""The evidence of docs/reproduction.md; its numbers come from files of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from docs.reproduction import Verdict, mean, number, paired
from docs.runs import (
  ALPHA_ON_STEPS,
  EQUAL,
  FAR,
  FIRST_QUARTER,
  HIGH,
  HIGH_RANK,
  LAST_QUARTER,
  LATE,
  LATE_16,
  LOW,
  MU,
  N_EFF,
  ON_STEPS,
  OTHERS,
  P3O,
  RESIDUAL,
  REWEIGHTED,
  SALT,
  SAMPLED,
  OfRun,
  Result,
  average,
  every,
  fall,
  measured,
  results,
  start,
  trigger_rate,
)
from experiments.fade.tables import peak_update
from experiments.fade.testbed import ON_TOUR
from experiments.large_ratios.sweep import (
  CAP,
  FREE,
  PULL,
  REFRESHED,
  TRIGGER,
  at_lower,
  longer,
  with_new_seeds,
)
from experiments.large_ratios.sweep import SUFFIX as VETOED
from experiments.large_ratios.tables import PRICE, RACES, UPDATES_PER_HAND_OVER, speedups
from experiments.low_precision import tables as low
from experiments.mu_grpo import hand_over
from experiments.mu_grpo.testbed_tables import SUFFIX as _SUFFIX
from experiments.mu_grpo.testbed_tables import TIGHT as _TIGHT
from experiments.mu_grpo.testbed_tables import price_curves, value_after_first_stage
from experiments.other_samplers.sweep import EQUAL as EQUAL_MODEL
from experiments.other_samplers.sweep import LARGER, half_from
from experiments.sampled_feature.sweep import BONUS, SIZES, fixed, grpo, salt
from experiments.testbed import report
from experiments.testbed.arms import GRPO
from rlvr_jax.evaluate import compare
from rlvr_jax.evaluate.compare import final_value, rise

_RECIPES = results("recipes")

_QUICKSTART = "quickstart, 3 seeds, 100 updates"
_MISMATCH = "quickstart, 3 seeds, 80 updates"
_SALT_LINK = "../experiments/salt_geometry/README.md"
_SALT_STEPS_LINK = "../experiments/salt_geometry/TESTBED.md"
_P3O_LINK = "../experiments/p3o_mismatch/README.md"
_FAR_LINK = "../experiments/large_ratios/README.md"
_HIGH_LINK = "../experiments/high_entropy/README.md"
_SAMPLED_LINK = "../experiments/sampled_feature/README.md"
_OTHERS_LINK = "../experiments/other_samplers/README.md"
_LOW_LINK = "../experiments/low_precision/README.md"
_P3O_STEPS_LINK = "../experiments/p3o_mismatch/TESTBED.md"
_RECIPES_LINK = "../experiments/recipes/README.md"
_MU_LINK = "../experiments/mu_grpo/README.md"
_PRICE_LINK = "../experiments/mu_grpo/TESTBED.md"
_FADE_LINK = "../experiments/fade/README.md"
_STEPS_RUNS = "`steps`, 192 updates, 5 seeds"
_TWO_SEEDS = "`steps`, 192 updates, 2 seeds"
_STEPWISE = "quickstart in written steps, two stages of μ = 96, 3 seeds"
_LARGE = ("GRPO, G = 32", "SALT, sampled, G = 32")
_SIZES = ("GRPO, G = 16", "GRPO, G = 64", "SALT, sampled, G = 16", "SALT, sampled, G = 64")


def _first_entropy(run: Result) -> float:
  """Over the first span of a run on the testbed."""
  return run["train"]["policy/entropy"][0]


def _of_stage(metric: str, stage: int):
  """Mean over one of two stages."""
  half = report.SPANS // 2
  return lambda run: statistics.mean(run["train"][metric][stage * half : (stage + 1) * half])


def _field(name: str):
  """Of a result."""
  return lambda run: run[name]


def _collapsed(label: str) -> str:
  """How many runs end below their start."""
  return f"{sum(rise(run) < 0 for run in MU[label])} of {len(MU[label])}"


def _of_high(label: str, baseline: str, of_run: OfRun) -> str:
  """A difference of two arms of experiments/high_entropy."""
  return paired(HIGH, label, baseline, of_run)


_HIGH_RUNS = "quickstart, 8 seeds, 240 updates, 2500 demonstrations"
_FAR_RUNS = "quickstart, 160 updates, 10 seeds at a rate of 6e-4, 8 at 1e-3"
_WRITTEN_RUNS = "quickstart in written steps, 144 updates, 8 seeds"
_OTHERS_RUNS = "quickstart, 80 updates, 8 seeds"
_PR = average("geometry/participation_ratio")
_CLIP = average("loss/clip_fraction")
_RANK_ONE = report.geometry_value("head_rank_one_fraction", when="last")
_ENTROPY = report.training_mean("policy/entropy")
_AGREEMENT = ("correlation", "permutation_quantile", "noise_quantile")
_ALPHAS = (  # at G = 4, at G = 8, at all larger G
  *(mean(SALT[f"SALT, G = {size}"], average("reweighting/alpha")) for size in (4, 8)),
  mean([r for G in (16, 32, 64) for r in SALT[f"SALT, G = {G}"]], average("reweighting/alpha")),
)
_HEAD_SHARE = report.geometry_value("head_share", when="last")
_MASSES = (GRPO, "FADE", "success-heavy", "failure-heavy")
_LAST_ENTROPY = report.end_mean("policy/entropy")
_HOT = "temperature 1.5"
_ON_POLICY = ("GRPO, on-policy", "P3O, on-policy")
_EPSILON = "GRPO, ε = 0.2"
_ALL_FAR = every(FAR)
_LAGGING = at_lower(f"{_EPSILON}, lag 1")
_AT = (0.0, *hand_over.prices_of_7b().values())
_CEILING = f"{(1 + PRICE / 4) / (1 + PRICE / UPDATES_PER_HAND_OVER):.2f}"  # if updates teach alike
_PRICES = hand_over.quickstart_curves(_AT)
_PRICES_ON_STEPS = price_curves(every(ON_STEPS), _AT)


def _speedups(curves: Sequence[hand_over.Curve]) -> tuple[str, ...]:
  """Of stages, mean over seeds: without a price, and at those of a restart."""
  return tuple(f"{statistics.mean(c.speedup[i] for c in curves):.2f}" for i in (0, 2, 3))


def _break_even(curves: Sequence[hand_over.Curve]) -> tuple[str, str]:
  """The lowest and the highest, in updates."""
  found = [curve.break_even for curve in curves]
  return number(min(found)), number(max(found))


def _speedup(name: str) -> str:
  """Of stale rollouts over fresher ones, of experiments/large_ratios; see `speedups`."""
  race = RACES[name]
  found = speedups(_ALL_FAR, race, PRICE, at_most=race.bounded)
  return f"{statistics.mean(found.values()):.2f}"


def _arrived(race: str) -> str:
  """How many seeds of the stale rollouts reach the level."""
  found = speedups(_ALL_FAR, RACES[race], PRICE)
  return f"{sum(x > 0 for x in found.values())} of {len(found)}"


def _stale_costs(rate: Callable[[str], str], stale: str) -> tuple[str, ...]:
  """Of experiments/large_ratios: P3O less GRPO, then each less its on-policy run.

  Args:
    rate: label → label at a rate.
    stale: label of a method's stale runs, with {} for the method.
  """
  return (
    paired(FAR, rate(stale.format("P3O")), rate(stale.format(_EPSILON)), LATE),
    *(
      paired(FAR, rate(stale.format(method)), rate(f"{method}, on-policy"), LATE)
      for method in ("P3O", _EPSILON)
    ),
  )


def _ess(setting: str) -> str:
  """Of GRPO, over training."""
  return mean(P3O[f"{setting}: {_EPSILON}"], lambda run: run["ess"])


def _against(setting: str) -> str:
  """P3O less GRPO with ε = 0.2 in a setting."""
  return paired(P3O, f"{setting}: P3O", f"{setting}: {_EPSILON}", final_value)


def _each(label: str, of_run: OfRun = LATE, less: str | None = None) -> str:
  """Of every seed on `steps`, less another arm's where that is given: too few for an interval."""
  values = {run["seed"]: of_run(run) for run in ON_STEPS[label]}
  if less is None:
    return " and ".join(f"{value:.3f}" for value in values.values())
  others = {run["seed"]: of_run(run) for run in ON_STEPS[less]}
  return " and ".join(f"{values[seed] - others[seed]:+.3f}" for seed in values if seed in others)


def _lower(label: str, baseline: str, of_run: OfRun) -> str:
  """How many seeds on `steps` have a lower value than the other arm's same seed."""
  others = {run["seed"]: of_run(run) for run in ON_STEPS[baseline]}
  lower = [of_run(run) < others[run["seed"]] for run in ON_STEPS[label]]
  return f"{sum(lower)} of {len(lower)}"


def _cost_of(setting: str, method: str) -> str:
  """Final pass@1 less that of the run with four updates per refresh and nothing else."""
  return paired(P3O, f"{setting}: {method}", f"matched: {method}", final_value)


_OF_SALT = {
  "S1": Verdict(
    "under GRPO gradients are of low rank, and cancel: low n_eff, low PR",
    "With the paper's feature, `score`: in written steps PR is {} and n_eff {}, on the quickstart"
    " {} and {}, on `steps` {} and {}. With `sampled`: {} and {} in written steps, {} and {} on"
    " `steps`. So the rank is low by both, but gradients cancel with `sampled` only. On-policy,"
    " `score` cannot cancel in expectation ([why](../experiments/premises/EXPECTATION.md)).",
    (
      *(mean(SAMPLED[grpo(16)], measured(name)) for name in ("PR, score", "n_eff, score")),
      *(mean(SALT["GRPO, G = 16"], column) for column in (_PR, N_EFF)),
      *(
        mean(ON_STEPS[GRPO], report.geometry_value(metric))
        for metric in ("participation_ratio", "effective_rollouts")
      ),
      *(mean(SAMPLED[grpo(16)], measured(name)) for name in ("PR", "n_eff")),
      *(
        mean(ON_STEPS[GRPO], report.geometry_value(metric, "sampled"))
        for metric in ("participation_ratio", "effective_rollouts")
      ),
    ),
    f"{_WRITTEN_RUNS}, 128 rollouts; quickstart, 256 rollouts, G = 16, 3 seeds; {_STEPS_RUNS}, 128"
    " rollouts",
    _SALT_STEPS_LINK,
    (GRPO,),
    also=_SALT_LINK,
    parts={
      "a": "under GRPO gradients are of low rank: low PR",
      "b": "they cancel: low n_eff, by the paper's feature `score`",
      "c": "the same by `sampled`",
    },
  ),
  "S2": Verdict(
    "SALT raises n_eff, PR and accuracy over GRPO and DAPO",
    "SALT raises n_eff of A′ by construction: it keeps what gradients share. Here that goes with"
    " lower accuracy. In written steps, with `sampled`, by which gradients cancel, with a"
    f" [plan written before]({_SAMPLED_LINK}): SALT minus GRPO has n_eff of A′ {{}}, PR {{}} and"
    " pass@1 {}; SALT on DAPO minus DAPO {}, {} and {}. α is {}, GRPO's n_eff {}. On `steps`, with"
    " `sampled`: α is {}, the shared part has {} of ‖A‖²; n_eff of A′ {}, PR {}, pass@1 {}. On the"
    " quickstart, with `score`: {}, {} and {}; α is 0, since n_eff is above 1.",
    (
      *(
        paired(SAMPLED, arm, control, f)
        for arm, control in ((salt(16), grpo(16)), ("SALT on DAPO", "DAPO"))
        for f in (measured("n_eff of A′"), measured("PR"), LATE)
      ),
      mean(SAMPLED[salt(16)], measured("α")),
      mean(SAMPLED[grpo(16)], measured("n_eff")),
      mean(ON_STEPS["SALT, sampled"], ALPHA_ON_STEPS),
      mean(ON_STEPS["SALT, sampled"], report.training_mean("reweighting/shared_share")),
      *(
        paired(ON_STEPS, "SALT, sampled", GRPO, f)
        for f in (
          report.geometry_value("effective_rollouts_reweighted", "sampled"),
          report.geometry_value("participation_ratio", "sampled"),
          LATE,
        )
      ),
      *(paired(SALT, "SALT, G = 16", "GRPO, G = 16", f) for f in (REWEIGHTED, _PR, final_value)),
    ),
    f"{_WRITTEN_RUNS}, G = 16; {_STEPS_RUNS}; {_QUICKSTART}, G = 16",
    _SAMPLED_LINK,
    ("SALT, sampled", "SALT, score", "DAPO", "SALT on DAPO"),
    also=_SALT_STEPS_LINK,
    parts={
      "a": "SALT raises n_eff over GRPO and DAPO",
      "b": "it raises PR",
      "c": "it raises accuracy",
    },
  ),
  "S3": Verdict(
    "best PR–n_eff trade-off; one channel, no positive part and a random subspace are worse",
    "SALT minus SALT in a random subspace: n_eff of A′ {}, PR {}, pass@1 {}. So the subspace"
    " matters. The shared channel alone is SALT with α fixed at 0, to the digit, which has run: in"
    f" written steps, with `sampled` and a [plan written before]({_SAMPLED_LINK}), SALT minus that"
    " gives pass@1 {}. But α fixed at 1, minus the adaptive one, gives {} on the quickstart. The"
    " residual channel alone and no positive part have not run.",
    (
      *(
        paired(SALT, "SALT, G = 16", "SALT, random subspace, G = 16", f)
        for f in (REWEIGHTED, _PR, final_value)
      ),
      paired(SAMPLED, salt(16), fixed(0), LATE),
      paired(SALT, "SALT, α = 1.0, G = 16", "SALT, G = 16", final_value),
    ),
    f"{_QUICKSTART}, G = 16; {_WRITTEN_RUNS}, G = 16",
    _SALT_LINK,
    (
      *("SALT, random subspace", "SALT, shared channel", "SALT, residual channel"),
      "SALT, no positive part",
    ),
    also=_SAMPLED_LINK,
    parts={
      "a": "SALT has the best PR–n_eff trade-off: a random subspace is worse",
      "b": "the shared channel alone is worse",
      "c": "the residual channel alone and no positive part are worse",
    },
    otherwise="not tested",
  ),
  "S4": Verdict(
    "a fixed α is brittle, the adaptive one is not",
    "In written steps, with `sampled`, where the adaptive α is {}, with a"
    f" [plan written before]({_SAMPLED_LINK}), SALT minus GRPO in pass@1: {{}} with α fixed at 1,"
    " {} with α fixed at 0, {} adaptive. On the quickstart, with `score`: {}, {} and {}. There the"
    " adaptive α is 0 in every measured update.",
    (
      mean(SAMPLED[salt(16)], measured("α")),
      *(paired(SAMPLED, label, grpo(16), LATE) for label in (fixed(1), fixed(0), salt(16))),
      *(
        paired(SALT, label, "GRPO, G = 16", final_value)
        for label in ("SALT, α = 1.0, G = 16", "SALT, α = 0.0, G = 16", "SALT, G = 16")
      ),
    ),
    f"{_WRITTEN_RUNS}, G = 16; {_QUICKSTART}, G = 16",
    _SAMPLED_LINK,
    tuple(f"SALT, α = {alpha}" for alpha in (0.0, 0.5, 1.0)),
    also=_SALT_LINK,
    parts={
      "a": "a fixed α is brittle, the adaptive one is not: better than α fixed at 0",
      "b": "better than α fixed at 1",
    },
  ),
  "S5": Verdict(
    "at a fixed budget SALT uses larger groups better",
    "In written steps, with `sampled`, where α is positive, with a"
    f" [plan written before]({_SAMPLED_LINK}), pass@1 at G = 64 minus that at G = 4: {{}} with"
    " SALT, {} with GRPO. SALT minus GRPO: {} at G = 4, {} at G = 16, {} at G = 64. On `steps`: {}"
    " at G = 8, {} at G = 32; at G = 32 minus that at G = 8 it is {} with GRPO, {} with SALT. On"
    " the quickstart, with `score`: {} at G = 4 and {} at G = 64, where both learn little: pass@1"
    " rises by {} with SALT and {} with GRPO. There α is {} at G = 4, {} at G = 8 and {} from"
    " G = 16 on, so that SALT's residual is nearly or wholly off.",
    (
      *(paired(SAMPLED, label(64), label(4), LATE) for label in (salt, grpo)),
      *(paired(SAMPLED, salt(size), grpo(size), LATE) for size in SIZES),
      paired(ON_STEPS, "SALT, sampled", GRPO, LATE),
      _each("SALT, sampled, G = 32", less="GRPO, G = 32"),
      _each("GRPO, G = 32", less=GRPO),
      _each("SALT, sampled, G = 32", less="SALT, sampled"),
      *(paired(SALT, f"SALT, G = {size}", f"GRPO, G = {size}", final_value) for size in (4, 64)),
      *(mean(SALT[label], rise) for label in ("SALT, G = 64", "GRPO, G = 64")),
      *_ALPHAS,
    ),
    f"{_WRITTEN_RUNS}; {_STEPS_RUNS}, 2 with G = 32, 128 rollouts; {_QUICKSTART}, 256 rollouts",
    _SAMPLED_LINK,
    (GRPO, "SALT, sampled", *_LARGE, *_SIZES),
    also=_SALT_STEPS_LINK,
  ),
  "S6": Verdict(
    "with G shared energy falls and the residual's rises; the bound stays, the norm falls; across"
    " prompts the norm follows the bound",
    "The paper grows G. Here prompts become fewer as G grows, since the rollouts stay as many, so"
    " that no number is of G alone. With this, GRPO's residual energy at G = 64 minus that at"
    " G = 4: in written steps, with `sampled`, with a"
    f" [plan written before]({_SAMPLED_LINK}), {{}}; there the bound of the update's norm goes from"
    " {} to {}, the norm from {} to {}. On the quickstart, with `score`: {}. On `steps`, with"
    " `sampled`, at G = 32 minus that at G = 8: {}. There the bound of the update's norm is {} at"
    " G = 8 and {} at G = 32, the norm {} and {}: both grow. Norms of single prompts' groups have"
    " not been measured.",
    (
      paired(SAMPLED, grpo(64), grpo(4), measured("residual energy")),
      *(
        mean(SAMPLED[grpo(size)], measured(name))
        for name in ("its bound", "update norm")
        for size in (4, 64)
      ),
      paired(SALT, "GRPO, G = 64", "GRPO, G = 4", RESIDUAL),
      _each("GRPO, G = 32", report.geometry_value("residual_energy", "sampled"), GRPO),
      *(
        value
        for metric in ("update_norm_bound", "update_norm")
        for value in (
          mean(ON_STEPS[GRPO], report.geometry_value(metric, "sampled")),
          _each("GRPO, G = 32", report.geometry_value(metric, "sampled")),
        )
      ),
    ),
    f"{_WRITTEN_RUNS}; {_QUICKSTART}; {_STEPS_RUNS}, 2 with G = 32",
    _SAMPLED_LINK,
    (GRPO, *_LARGE, *_SIZES),
    also=_SALT_STEPS_LINK,
    otherwise="not tested",
  ),
  "S7": Verdict(
    "LM-head and last-block geometry agree, nulls do not; signs of large entries agree",
    "Correlation of the two matrices of cosines on the quickstart: {}, against {} for the 95 %"
    " quantile of permutations and {} for that of noise. On `steps`: {}, against {} and {}. There"
    " the signs of the largest tenth agree in a share of {}; by chance it would be {}.",
    (
      *(mean(SALT["GRPO, G = 8"], average(f"geometry/agreement_{name}")) for name in _AGREEMENT),
      *(mean(ON_STEPS[GRPO], report.geometry_value(f"agreement_{name}")) for name in _AGREEMENT),
      *(mean(ON_STEPS[GRPO], _field(name)) for name in ("signs", "signs_by_chance")),
    ),
    f"{_QUICKSTART}, G = 8; {_STEPS_RUNS}",
    _SALT_STEPS_LINK,
    (GRPO, "SALT, sampled"),
    also=_SALT_LINK,
  ),
  "S8": Verdict(
    "low PR and n_eff persist across model families; SALT raises both",
    "The policies here are of one family, from scratch, with under a million parameters. This"
    " needs published checkpoints: see the last section.",
    link="../experiments/full_size.py",
  ),
  "S9": Verdict(
    "the same for code",
    "A policy from scratch of this size writes no programs. The tasks of"
    " [published programs](your_data.md#published-data-sets) and the sandbox are there; this needs a"
    " checkpoint of 7B.",
    link="your_data.md#published-data-sets",
  ),
  "S10": Verdict(
    "α adapts with G, read as: rises; the clip fraction stays low",
    "In written steps, with `sampled`, with a"
    f" [plan written before]({_SAMPLED_LINK}), α is {{}} at G = 4, {{}} at G = 16 and {{}} at"
    " G = 64: it falls, where the plan asked whether it rises. With G = 16 the clip fraction is"
    " {} with SALT and {} without. On the quickstart, with"
    " `score`, α is {} at G = 4, {} at G = 8 and {} from G = 16 on; the clip fraction is {}"
    " with SALT and {} without. On `steps`, with `sampled`, α is {} at G = 8, {} at G = 32; the"
    " clip fractions are {} with SALT and {} without.",
    (
      *(mean(SAMPLED[salt(size)], measured("α")) for size in SIZES),
      *(mean(SAMPLED[label(16)], measured("clipped")) for label in (salt, grpo)),
      *_ALPHAS,
      *(mean(SALT[label], _CLIP) for label in ("SALT, G = 16", "GRPO, G = 16")),
      mean(ON_STEPS["SALT, sampled"], ALPHA_ON_STEPS),
      _each("SALT, sampled, G = 32", ALPHA_ON_STEPS),
      *(
        mean(ON_STEPS[label], report.training_mean("loss/clip_fraction"))
        for label in ("SALT, sampled", GRPO)
      ),
    ),
    f"{_WRITTEN_RUNS}; {_QUICKSTART}, G = 16 for the clip fraction; {_STEPS_RUNS}, 2 with G = 32",
    _SAMPLED_LINK,
    ("SALT, sampled", "SALT, sampled, G = 32", "SALT, sampled, G = 16", "SALT, sampled, G = 64"),
    also=_SALT_STEPS_LINK,
    parts={
      "a": "α adapts with G; the plan read it as: it rises",
      "b": "the clip fraction stays low: not above GRPO's",
    },
  ),
  "S11": Verdict(
    "the exploration share grows with G; an entropy bonus raises PR, not n_eff",
    "In written steps a bonus of 0.05, minus none, with a"
    f" [plan written before]({_SAMPLED_LINK}): PR {{}} and n_eff {{}} by `score`, {{}} and {{}} by"
    " `sampled`, entropy {} nats, pass@1 {}."
    " On the quickstart a bonus of 0.01, minus none: PR {}, n_eff {}, entropy {} nats. So small a"
    " bonus hardly acts, which is no test. On `steps` a bonus of 0.05, minus none, with `score`: PR"
    " {}, n_eff {}, entropy {} nats. The exploration share has not been measured.",
    (
      *(
        paired(SAMPLED, BONUS, grpo(16), measured(name))
        for name in ("PR, score", "n_eff, score", "PR", "n_eff", "entropy")
      ),
      paired(SAMPLED, BONUS, grpo(16), LATE),
      *(
        paired(SALT, "GRPO + entropy bonus, G = 16", "GRPO, G = 16", f)
        for f in (_PR, N_EFF, average("policy/entropy"))
      ),
      *(
        _each("entropy bonus 0.05", f, GRPO)
        for f in (
          report.geometry_value("participation_ratio"),
          report.geometry_value("effective_rollouts"),
          _LAST_ENTROPY,
        )
      ),
    ),
    f"{_WRITTEN_RUNS}, G = 16; {_QUICKSTART}, G = 16; {_TWO_SEEDS}",
    _SAMPLED_LINK,
    (GRPO, "entropy bonus 0.05", "GRPO, G = 32", "entropy bonus 0.05, G = 32"),
    also=_SALT_STEPS_LINK,
    parts={
      "a": "an entropy bonus raises PR, here at G = 16 alone",
      "b": "it does not change n_eff",
      "c": "the exploration share grows with G",
    },
    otherwise="not tested",
  ),
}
_OF_P3O = {
  "P1": Verdict(
    "one P3O run matches or beats the best of GRPO with ε = 0.2, 0.4, 0.6",
    "P3O minus GRPO in pass@1, with sixteen large updates per refresh, with"
    f" [plans written before]({_FAR_LINK}): at a rate of 6e-4, where GRPO has an effective sample"
    " size of {} and learns from {} to {}, {} with ε = 0.2, {} with ε = 0.4, {} with ε = 0.6; at a"
    " rate of 1e-3, with {}, from {} to {}, {}, {} and {}. Which clip is the best was seen in the"
    " same runs, which favors GRPO. With four updates per refresh: {}, {} and {}, and in other"
    " runs {} with ε = 0.2. On `steps`: {} with ε = 0.2, {} with ε = 0.6.",
    (
      *(
        value
        for rate in (at_lower, str)
        for value in (
          mean(FAR[rate(_EPSILON)], measured("ESS")),
          mean(FAR[rate(_EPSILON)], start),
          mean(FAR[rate(_EPSILON)], LATE),
          *(paired(FAR, rate("P3O"), rate(f"GRPO, ε = {e}"), LATE) for e in (0.2, 0.4, 0.6)),
        )
      ),
      *(
        paired(P3O, "matched: P3O", f"matched: GRPO, ε = {epsilon}", final_value)
        for epsilon in (0.2, 0.4, 0.6)
      ),
      paired(OTHERS, "P3O", "GRPO", LATE),
      *(paired(ON_STEPS, "P3O", label, LATE) for label in (GRPO, "GRPO, ε = 0.6")),
    ),
    f"{_FAR_RUNS}; {_MISMATCH}; {_OTHERS_RUNS}; {_STEPS_RUNS}",
    _FAR_LINK,
    (GRPO, "P3O", "GRPO, ε = 0.6", "GRPO, ε = 0.4", *_ON_POLICY),
    also=_P3O_LINK,
  ),
  "P2": Verdict(
    "robust to rollouts sampled at another temperature",
    "Sampled at temperature 1.5, log-probabilities exact, minus its run without this: P3O {}, a"
    " collapse through its KL term, without which it ends at {}; GRPO {}. Log-probabilities"
    " recorded as those of the policy itself, on `steps`: GRPO, minus its run without this, {}; P3O"
    " minus GRPO {}; P3O, minus its run without this, {}. So P3O is not robust where the"
    " log-probabilities see the temperature; where they do not, it is.",
    (
      _cost_of(_HOT, "P3O"),
      mean(P3O[f"{_HOT}: P3O without its KL term"], final_value),
      _cost_of(_HOT, _EPSILON),
      paired(ON_STEPS, f"GRPO, {_HOT}, raw", GRPO, LATE),
      paired(ON_STEPS, f"P3O, {_HOT}, raw", f"GRPO, {_HOT}, raw", LATE),
      paired(ON_STEPS, f"P3O, {_HOT}, raw", "P3O", LATE),
    ),
    f"{_MISMATCH}, GRPO with ε = 0.2; {_STEPS_RUNS}",
    _P3O_LINK,
    tuple(
      f"{method}, temperature {heat}, {recorded}"
      for heat in (1.5, 1.2)
      for recorded in ("raw", "exact")
      for method in ("GRPO", "P3O")
    ),
    also=_P3O_STEPS_LINK,
  ),
  "P3": Verdict(
    "robust to bf16 training with fp8 rollouts, where GRPO degrades",
    f"With a [plan written before]({_LOW_LINK}), each minus its run with the policy's own rollouts:"
    " training in float32 with int8 rollouts P3O {}, GRPO {}; with fp8 rollouts P3O {}, GRPO {};"
    " training in bfloat16 with int8 rollouts P3O {}, GRPO {}; with fp8 rollouts P3O {}, GRPO {}."
    " P3O minus GRPO in these four: {}; {}; {}; {}. In the last of them GRPO without its clip,"
    " minus GRPO, is {}; P3O's cap alone, minus P3O, {}, its pull alone {}. bfloat16 minus"
    " float32, both with the policy's own rollouts: P3O {}, GRPO {}; in written steps the warm"
    " start is in bfloat16 too, and ends at {} instead of {}. With fp8 rollouts GRPO's effective"
    " sample size is {} in float32 and {} in bfloat16. In earlier runs, int8 rollouts and a"
    " policy that computes in bfloat16, warm start included, minus the run with neither: P3O {},"
    " GRPO {}. fp8 rollouts on `steps`, training in float32: P3O {}, GRPO {}. There it is P3O"
    " that loses more, with both seeds, and one of them collapses.",
    (
      *(
        paired(LOW, low.label(method, training, copy), low.label(method, training), LATE)
        for training, copy in low.CELLS
        for method in (low.P3O, low.GRPO)
      ),
      *(
        paired(LOW, low.label(low.P3O, *cell), low.label(low.GRPO, *cell), LATE)
        for cell in low.CELLS
      ),
      *(
        paired(LOW, part, low.label(method, *low.HARDEST), LATE)
        for part, method in zip(low.WHY, (low.GRPO, low.P3O, low.P3O), strict=True)
      ),
      *(
        paired(LOW, low.label(method, "bfloat16"), low.label(method), LATE)
        for method in (low.P3O, low.GRPO)
      ),
      *(mean(LOW[low.label(low.GRPO, training)], start) for training in ("bfloat16", "float32")),
      *(
        mean(LOW[low.label(low.GRPO, training, "fp8 rollouts")], measured("ESS"))
        for training in ("float32", "bfloat16")
      ),
      *(_cost_of("int8 rollouts", method) for method in ("P3O", _EPSILON)),
      *(_each(f"{method}, fp8 rollouts", less=method) for method in ("P3O", GRPO)),
    ),
    f"{_WRITTEN_RUNS}, G = 8, 5 seeds of the parts; {_MISMATCH}, ε = 0.2; {_TWO_SEEDS}",
    _LOW_LINK,
    (
      *("GRPO, fp8 rollouts", "P3O, fp8 rollouts"),
      *("GRPO, fp8 rollouts, bf16 training", "P3O, fp8 rollouts, bf16 training"),
    ),
    also=_P3O_LINK,
  ),
  "P4": Verdict(
    "pass@k matches or beats the averaged GRPO sweep; with fp8 rollouts GRPO collapses",
    f"In written steps, with a [plan written before]({_LOW_LINK}), pass@8: P3O minus the mean of"
    " GRPO's three clips {}, minus GRPO with ε = 0.2 {}, with ε = 0.4 {}, with ε = 0.6 {}. Training"
    " in bfloat16 with fp8 rollouts, minus the run without: GRPO {}, P3O {}: a loss of GRPO's."
    " Whether it ends below where it began is undecided. On `steps`, pass@16: P3O minus GRPO {}"
    " with ε = 0.2, {} with ε = 0.6; with fp8 rollouts {}. With these the last evaluation of"
    " pass@1 is {} with GRPO, and {} with P3O: it is P3O of which a seed collapses.",
    (
      compare.difference_cell(low.less_sweep_mean(every(LOW))),
      *(paired(LOW, low.label(low.P3O), low.clip(x), low.LATE_8) for x in low.CLIPS),
      *(
        paired(
          LOW,
          low.label(method, "bfloat16", "fp8 rollouts"),
          low.label(method, "bfloat16"),
          low.LATE_8,
        )
        for method in (low.GRPO, low.P3O)
      ),
      *(paired(ON_STEPS, "P3O", label, LATE_16) for label in (GRPO, "GRPO, ε = 0.6")),
      _each("P3O, fp8 rollouts", LATE_16, "GRPO, fp8 rollouts"),
      *(_each(f"{method}, fp8 rollouts", final_value) for method in (GRPO, "P3O")),
    ),
    f"{_WRITTEN_RUNS}, G = 8; {_STEPS_RUNS}, 2 with fp8 rollouts",
    _LOW_LINK,
    arms=(GRPO, "P3O", "GRPO, ε = 0.4", "GRPO, ε = 0.6", "GRPO, fp8 rollouts", "P3O, fp8 rollouts"),
    also=_P3O_STEPS_LINK,
    parts={
      "a": "pass@k matches or beats the averaged GRPO sweep",
      "b": "with fp8 rollouts GRPO collapses: it ends below its start",
    },
  ),
  "P5": Verdict(
    "better and steadier than GRPO in one- and two-step asynchronous pipelines",
    f"At a rate of 6e-4, with a [plan written before]({_FAR_LINK}): at lag 1 P3O minus GRPO {{}};"
    " minus its on-policy run P3O {} and GRPO {}, whose effective sample size is {}. On-policy the"
    " two are equal: P3O minus GRPO {}. No other rate has run in that setting at a lag, so that"
    " neither is known at its best rate. A trial at a lower one, which is not committed, had the"
    " difference within the margin. At that lag GRPO without its clip, minus GRPO, is {}, P3O's cap"
    " alone {}, its pull alone {}. With lags up to 15: {}; {} and {}. At a rate of 1e-3: {}; {} and"
    " {}. In earlier runs at a rate of 4e-4 P3O minus GRPO is {} at lag 1 and {} at lag 2. Such"
    " lags are hardly a mismatch: GRPO's effective sample size is {} and {}, the KL to the policy"
    " that sampled {} and {}. On `steps` at lag 8 the effective sample size is {}, and P3O minus"
    " GRPO: pass@1 {}, pass@16 {}.",
    (
      *_stale_costs(at_lower, "{}, lag 1"),
      mean(FAR[_LAGGING], measured("ESS")),
      paired(FAR, at_lower("P3O, on-policy"), at_lower(f"{_EPSILON}, on-policy"), LATE),
      *(paired(FAR, label, _LAGGING, LATE) for label in (FREE, CAP, PULL)),
      *_stale_costs(at_lower, "{}"),
      *_stale_costs(str, "{}"),
      *(_against(setting) for setting in ("lag 1", "lag 2")),
      *(_ess(setting) for setting in ("lag 1", "lag 2")),
      *(mean(P3O[f"{setting}: {_EPSILON}"], _field("kl")) for setting in ("lag 1", "lag 2")),
      _each("GRPO, lag 8", report.training_mean("behavior/ess")),
      *(_each("P3O, lag 8", f, "GRPO, lag 8") for f in (LATE, LATE_16)),
    ),
    f"{_FAR_RUNS}, 5 of GRPO without its clip and of P3O's parts; {_MISMATCH}, ε = 0.2;"
    f" {_TWO_SEEDS}",
    _FAR_LINK,
    (
      *_ON_POLICY,
      *("GRPO, lag 8", "P3O, lag 8", "GRPO, lag 1", "P3O, lag 1", "GRPO, lag 2", "P3O, lag 2"),
      *("GRPO, lag 8, learning rate 1e-3", "P3O, lag 8, learning rate 1e-3"),
    ),
    also=_P3O_STEPS_LINK,
    parts={
      "a": "better than GRPO in a one-step asynchronous pipeline, both at a rate of 6e-4",
      "b": "the same, each at its own best rate",
      "c": "steadier, and in a two-step pipeline",
    },
    otherwise="not tested",
  ),
  "P6": Verdict(
    "robust to half of the rollouts from another model",
    "With half from a larger model, which ends at {} where the learner ends at {}, with a"
    f" [plan written before]({_OTHERS_LINK}), minus the run without them: P3O {{}}, GRPO {{}}; P3O"
    " minus GRPO there {}. GRPO's effective sample size is {}. With half from an equal model: P3O"
    " {}, GRPO {}, P3O minus GRPO {}; GRPO's effective sample size {}. Before, on `steps`, with"
    " half from a finished run of another seed: P3O {},"
    " GRPO {}.",
    (
      number(LATE(OTHERS[LARGER][0])),
      mean(OTHERS["P3O"], LATE),
      *(
        value
        for model in (LARGER, EQUAL_MODEL)
        for value in (
          *(paired(OTHERS, half_from(model, m), m, LATE) for m in ("P3O", "GRPO")),
          paired(OTHERS, half_from(model, "P3O"), half_from(model, "GRPO"), LATE),
          mean(OTHERS[half_from(model, "GRPO")], measured("ESS")),
        )
      ),
      *(_each(f"{method}, half from another policy", less=method) for method in ("P3O", GRPO)),
    ),
    f"{_OTHERS_RUNS}; {_TWO_SEEDS}",
    _OTHERS_LINK,
    ("GRPO, half from another policy", "P3O, half from another policy"),
    also=_P3O_STEPS_LINK,
  ),
  "P7": Verdict(
    "a second anchor, to the reference, collapses at temperature 1.2; P3O does not",
    f"In written steps, with a [plan written before]({_LOW_LINK}), at temperature 1.2, recorded"
    " raw: P3O ends at {}, with the second anchor at {}; minus their runs at temperature 1 {} and"
    " {}. At temperature 1 the second anchor's highest pass@1, minus P3O's, is {}. On `steps` at"
    " temperature 1.2 P3O ends at {}, with the second anchor at {}. Raw log-probabilities do not"
    " see the temperature. Nothing collapses, so nothing can be said of what prevents it. The"
    " paper's formula is not in what we have; ours is P3O with a KL to the first policy.",
    (
      *(mean(LOW[arm], LATE) for arm in (low.HOT_P3O, low.HOT_ANCHORS)),
      paired(LOW, low.HOT_P3O, low.label(low.P3O), LATE),
      paired(LOW, low.HOT_ANCHORS, low.label(low.ANCHORS), LATE),
      paired(LOW, low.label(low.ANCHORS), low.label(low.P3O), report.peak_value()),
      *(_each(f"{label}, temperature 1.2, raw") for label in ("P3O", "P3O, two anchors")),
    ),
    f"{_WRITTEN_RUNS}, G = 8; {_TWO_SEEDS}",
    _LOW_LINK,
    arms=("P3O, temperature 1.2, raw", "P3O, two anchors, temperature 1.2, raw"),
    also=_P3O_STEPS_LINK,
  ),
}
_OF_FADE = {
  "F1": Verdict(
    "success-heavy mass collapses entropy",
    f"[Where entropy is high]({_HIGH_LINK}), from {{}} to {{}} nats under r − r̄, r − r̄ minus"
    " success-heavy: {} over the run; minus failure-heavy: {}. So the other mass lowers it more. On"
    " `steps`, where it is low: under GRPO, of equal masses, entropy falls from {} to {} nats,"
    " with a mean over the run of {}."
    " Success-heavy masses lower this mean: minus GRPO {}, with {} seeds, minus FADE, which is"
    " nearer to r − r̄, {}, with {}. Failure-heavy ones raise it: {} and {}. At the end,"
    " minus GRPO: success-heavy entropy {} nats, pass@1 {}; failure-heavy {} and {}. There the"
    " direction is the paper's; but the change is small, and entropy falls with all masses. The"
    " control, `grpo_mean`, has not run there.",
    (
      *(mean(HIGH[EQUAL], measured(f"entropy {at}")) for at in ("at the start", "over the run")),
      *(
        _of_high(EQUAL, label, measured("entropy over the run"))
        for label in ("success-heavy", "failure-heavy")
      ),
      *(mean(ON_STEPS[GRPO], f) for f in (_first_entropy, _LAST_ENTROPY, _ENTROPY)),
      *(
        value
        for label in (GRPO, "FADE")
        for value in (
          paired(ON_STEPS, "success-heavy", label, _ENTROPY, 5),
          _lower("success-heavy", label, _ENTROPY),
        )
      ),
      *(paired(ON_STEPS, "failure-heavy", label, _ENTROPY, 5) for label in (GRPO, "FADE")),
      *(
        paired(ON_STEPS, label, GRPO, f, digits)
        for label in ("success-heavy", "failure-heavy")
        for f, digits in ((_LAST_ENTROPY, 5), (LATE, 3))
      ),
    ),
    f"{_HIGH_RUNS}; {_STEPS_RUNS}; ratios of masses of 4 and 1/4",
    _FADE_LINK,
    (
      GRPO,
      "grpo_mean",
      "success-heavy",
      "failure-heavy",
      "successes alone",
      "failures mostly, λ = 0.1",
    ),
  ),
  "F2": Verdict(
    "failure-heavy mass drives the head's update to rank one",
    "The share of the output head's change that lies along one direction is σ₁²/Σσ²."
    f" [Where entropy is high]({_HIGH_LINK}) it is {{}} with r − r̄, {{}} failure-heavy and {{}}"
    " success-heavy; failure-heavy minus r − r̄: {}. Failure-heavy runs collapse there: pass@1 ends"
    " at {}. On `steps` it is {} with GRPO and {} with FADE. Minus GRPO: failure-heavy {},"
    " success-heavy {}. But GRPO divides by the"
    " group's deviation too. Minus FADE, which is nearer to r − r̄: {} and {}. So it rises more"
    " with the other kind, and whether it rises with this one is open: the control, `grpo_mean`,"
    " has not run there. The head's share of the squares of all changes is {} with GRPO, {} with"
    " FADE, {} success-heavy, {} failure-heavy.",
    (
      *(mean(HIGH[label], HIGH_RANK) for label in (EQUAL, "failure-heavy", "success-heavy")),
      _of_high("failure-heavy", EQUAL, HIGH_RANK),
      mean(HIGH["failure-heavy"], LATE),
      *(mean(ON_STEPS[label], _RANK_ONE) for label in (GRPO, "FADE")),
      *(
        paired(ON_STEPS, label, baseline, _RANK_ONE)
        for baseline in (GRPO, "FADE")
        for label in ("failure-heavy", "success-heavy")
      ),
      *(mean(ON_STEPS[label], _HEAD_SHARE) for label in _MASSES),
    ),
    f"{_HIGH_RUNS}; {_STEPS_RUNS}; ratios of masses of 4 and 1/4",
    _FADE_LINK,
    (GRPO, "grpo_mean", "success-heavy", "failure-heavy"),
  ),
  "F3": Verdict(
    "peaks earlier in pass@1 than the best static estimator, with the best pass@k curve",
    f"[Where entropy is high]({_HIGH_LINK}), FADE minus success-heavy, which is the best static one"
    " in pass@1: peak {}, its update {}, pass@16 {}; minus training for pass@4, which is the best"
    " in"
    " pass@16: {}, {} and {}. FADE's δ ends at {}: its target is half of the entropy at the start,"
    " which is hardly reached. On `steps`, FADE minus GRPO: peak {}, its update {}, pass@16 {};"
    " minus success-heavy: {}, {} and {}. All these are undecided, as is FADE minus GRPO where"
    " entropy is high, with {} at the peak. On `steps` δ cannot act: by the relative target it"
    " stays above one minus half of the initial entropy, which is small. On the quickstart, minus"
    " the recipe `grpo` in pass@1: FADE {}, pass@4 training {}; but that recipe alone has a KL"
    " term, and averages the loss by response instead of by token. With an absolute target δ can"
    " act; minus GRPO: peak {}, pass@16 {}.",
    (
      *(
        _of_high("FADE", label, f)
        for label in ("success-heavy", "pass@4 training")
        for f in (report.peak_value(), peak_update, LATE_16)
      ),
      mean(HIGH["FADE"], measured("δ at the end")),
      *(
        paired(ON_STEPS, "FADE", label, f)
        for label in (GRPO, "success-heavy")
        for f in (report.peak_value(), peak_update, LATE_16)
      ),
      _of_high("FADE", GRPO, report.peak_value()),
      *(paired(_RECIPES, label, "grpo", final_value) for label in ("fade", "pass_at_k")),
      *(_each("FADE, H* = 0.5", f, GRPO) for f in (report.peak_value(), LATE_16)),
    ),
    f"{_HIGH_RUNS}; {_STEPS_RUNS}, 2 with H* = 0.5, evaluated every 32; quickstart, 3 seeds, 64"
    f" updates, μ = 1",
    _FADE_LINK,
    (
      *(GRPO, "FADE", "FADE, H* = 0.5", "pass@4 training", "success-heavy", "failure-heavy"),
      *ON_TOUR,
    ),
    also=_RECIPES_LINK,
    parts={
      "a": "peaks earlier in pass@1 than the best static estimator",
      "b": "and not lower",
      "c": "has the best pass@k curve",
    },
  ),
}
_OF_MU = {
  "M1": Verdict(
    "reaches GRPO's accuracy 2.2 × sooner in wall-clock with four stages",
    "In written steps GRPO's seconds to a rise of 0.1, over those of stages, are {} as it is; {} if"
    " a hand-over took 30 s of a 7B run, as restarting an engine may, {} if it took 60 s. Stages"
    " win above {} to {} updates a hand-over. On `steps`, to a rise of 0.2, they are {}, {} and {};"
    " stages win above {} to {}. They end lower there: pass@1 minus GRPO's {}. With sixteen large"
    " updates per refresh, at a rate of 6e-4 and for 160 updates, where a hand-over costs {}"
    f" updates, with [plans written before]({_FAR_LINK}): to a rise of 0.1 stale runs are {{}}"
    " times as fast as on-policy GRPO with the suffix vetoed, {} with the tight clip. Against"
    " GRPO with four updates per refresh they are {} and {} times as fast to that rise, which no"
    " plan asked."
    " Stale runs of 256 updates, which cost as much, minus that GRPO in pass@1: {} and {}. To its"
    " late pass@1 get {} and {} seeds; if the others did with their last update, they would be {}"
    " and {} times as fast. If they learned as much per update as GRPO they would be {} times as"
    " fast, by computation, which is the most that this setting allows. So the paper's factor"
    " was out of reach by the plan itself.",
    (
      *(*_speedups(_PRICES), *_break_even(_PRICES)),
      *(*_speedups(_PRICES_ON_STEPS), *_break_even(_PRICES_ON_STEPS)),
      paired(ON_STEPS, _SUFFIX, GRPO, LATE),
      number(PRICE),
      *(_speedup(f"price, {clip}") for clip in ("vetoed", "tight")),
      *(_speedup(f"rise, {clip}, not planned") for clip in ("vetoed", "tight")),
      *(paired(FAR, longer(label), REFRESHED, LATE) for label in (VETOED, _EPSILON)),
      *(_arrived(f"M1, {clip}") for clip in ("vetoed", "tight")),
      *(_speedup(f"M1, {clip}") for clip in ("vetoed", "tight")),
      _CEILING,
    ),
    f"{_STEPWISE}; {_STEPS_RUNS}; quickstart, 10 seeds; suffix veto, κ = 0.1",
    _FAR_LINK,
    (GRPO, "suffix, μ = 96", "suffix, μ = 32"),
    also=_PRICE_LINK,
    parts={
      "a": f"reaches GRPO's accuracy sooner, which here can be by {_CEILING} × at most",
      "b": "by 2.2 × in wall-clock with four stages",
    },
  ),
  "M2": Verdict(
    "at large μ the tight interval plateaus; [0, 5] gains, then collapses",
    "Tight minus GRPO: {}; on `steps` {}, where it has {} after the first stage, {} at its best and"
    " {} at the last evaluation. Relaxed ends below its start with {} seeds, at a higher learning"
    " rate with {}. On `steps` it has {} after the first stage, {} at its best and {} at the last"
    " evaluation, from {} at the start. With sixteen large updates per refresh, with"
    f" [plans written before]({_FAR_LINK}), at a rate of 6e-4: from {{}} at the start relaxed rises"
    " to {} at its best; ε = 0.2 ends at {}, relaxed at {}, with the suffix vetoed at {}, on-policy"
    " GRPO at {}. The suffix vetoed minus ε = 0.2: {}. The fall from the highest, relaxed minus ε ="
    " 0.2: {}. At a rate of 1e-3: from {}, at best {}, they end at {}, {}, {} and {}; the suffix"
    " vetoed minus ε = 0.2 is {}, that fall {}.",
    (
      paired(MU, "tight clip", "GRPO, μ = 4", final_value),
      paired(ON_STEPS, _TIGHT, GRPO, LATE),
      *(
        mean(ON_STEPS[_TIGHT], f)
        for f in (value_after_first_stage, report.peak_value(), final_value)
      ),
      *(_collapsed(label) for label in ("relaxed clip", "relaxed clip, higher rate")),
      *(
        _each("relaxed, μ = 96", f)
        for f in (value_after_first_stage, report.peak_value(), final_value, start)
      ),
      *(
        value
        for rate in (at_lower, str)
        for value in (
          *(mean(FAR[rate("relaxed")], f) for f in (start, report.peak_value())),
          *(
            mean(FAR[rate(label)], LATE)
            for label in (
              *(_EPSILON, "relaxed", "relaxed, suffix vetoed"),
              f"{_EPSILON}, on-policy",
            )
          ),
          paired(FAR, rate("relaxed, suffix vetoed"), rate(_EPSILON), LATE),
          paired(FAR, rate("relaxed"), rate(_EPSILON), fall),
        )
      ),
    ),
    f"{_STEPWISE}; {_STEPS_RUNS}, 2 of the relaxed interval; {_FAR_RUNS}",
    _FAR_LINK,
    (
      *(GRPO, "tight, μ = 96", "relaxed, μ = 96", "tight, μ = 96, learning rate 1e-3"),
      *("relaxed, μ = 96, learning rate 1e-3", "GRPO, learning rate 1e-3"),
    ),
    also=_PRICE_LINK,
    parts={
      "a": "at large μ the tight interval plateaus: it ends below GRPO",
      "b": "[0, 5] gains",
      "c": "and then collapses",
    },
  ),
  "M3": Verdict(
    "masking the triggers alone still collapses; the suffix or broader scopes are stable",
    "Minus the relaxed clip in pass@1, at the higher learning rate: triggers alone {}, suffix {},"
    " both {}. At the lower one: {}, {} and {}; the complete response {}. On `steps` the suffix is"
    " not stable: pass@1 is {} after the first stage and {} at the last evaluation; with triggers"
    " alone {}, then {}; without a veto {}, then {}. With sixteen large updates per refresh, with"
    f" [plans written before]({_FAR_LINK}), the suffix minus the relaxed clip is {{}}, minus"
    " triggers alone {} at a rate of 6e-4; {} and {} at a rate of 1e-3. Other seeds there, against"
    " triggers alone: {}. So the suffix is not better by what would matter. Late pass@1, minus that"
    " at the start: at a rate of 1e-3 the suffix {}, triggers alone {}; at a rate of 6e-4 {} and"
    " {}. So both collapse at the one rate, and neither at the other.",
    (
      *(
        paired(MU, f"veto {scope}, κ = 0.1, higher rate", "relaxed clip, higher rate", final_value)
        for scope in ("trigger", "suffix", "trigger_and_suffix")
      ),
      *(
        paired(MU, f"veto {scope}, κ = 0.1", "relaxed clip", final_value)
        for scope in ("trigger", "suffix", "trigger_and_suffix", "response")
      ),
      *(mean(ON_STEPS[_SUFFIX], f) for f in (value_after_first_stage, final_value)),
      *(
        _each(f"{veto}, μ = 96", f)
        for veto in ("trigger", "relaxed")
        for f in (value_after_first_stage, final_value)
      ),
      *(
        paired(FAR, rate("relaxed, suffix vetoed"), rate(label), LATE)
        for rate in (at_lower, str)
        for label in ("relaxed", "relaxed, trigger vetoed")
      ),
      paired(FAR, with_new_seeds(VETOED), with_new_seeds(TRIGGER), LATE),
      *(
        mean(FAR[rate(label)], lambda run: LATE(run) - start(run))
        for rate in (with_new_seeds, at_lower)
        for label in (VETOED, TRIGGER)
      ),
    ),
    f"{_STEPWISE}; {_STEPS_RUNS}, 2 with triggers alone and without a veto; {_FAR_RUNS}, then 16;"
    " κ = 0.1",
    _FAR_LINK,
    (
      *("relaxed, μ = 96", "suffix, μ = 96", "trigger, μ = 96", "response, μ = 96"),
      *("trigger and suffix, μ = 96", "suffix, μ = 96, learning rate 1e-3"),
      *("trigger, μ = 96, learning rate 1e-3", "relaxed, μ = 96, learning rate 1e-3"),
    ),
    also=_PRICE_LINK,
  ),
  "M4": Verdict(
    "four refreshes against 1024: switching overhead and memory contention go",
    "One process on one device has no engine to switch to: all hand-overs of a GRPO run take {} s,"
    " the run {} s. The price of a hand-over is a curve instead (M1).",
    (
      mean(MU["GRPO, μ = 4"], lambda run: run["phase_seconds"]["sync_weights"]),
      mean(MU["GRPO, μ = 4"], _field("elapsed_seconds")),
    ),
    _STEPWISE,
    _PRICE_LINK,
  ),
  "M5": Verdict(
    "reward dynamics by stage; vetoed token fraction",
    "Vetoed with κ = 0.1: {} of the tokens. The trigger rate grows from {} in the first quarter of"
    " a stage to {} in the last. On `steps` {} of the tokens are vetoed in the first stage and {}"
    " in the second, the solve rate of the rollouts is {} and {}.",
    (
      mean(MU["veto suffix, κ = 0.1"], _field("vetoed")),
      *(
        mean(MU["veto suffix, κ = 0.1"], trigger_rate(part))
        for part in (FIRST_QUARTER, LAST_QUARTER)
      ),
      *(
        mean(ON_STEPS[_SUFFIX], _of_stage(metric, stage))
        for metric in ("veto/token_fraction", "reward/pass_rate")
        for stage in (0, 1)
      ),
    ),
    f"{_STEPWISE}; {_STEPS_RUNS}",
    _MU_LINK,
    ("suffix, μ = 96", "trigger, μ = 96", "suffix, κ = 0.01, μ = 96", "suffix, κ = 0.001, μ = 96"),
    also=_PRICE_LINK,
    otherwise="description",
  ),
}
VERDICTS_BY_ID = {**_OF_SALT, **_OF_P3O, **_OF_FADE, **_OF_MU}
IN_SHORT = {  # of each paper: what held, what did not, and why as far as the runs tell
  "S": (
    "What held: gradients are of low rank, the output head's represent those of the last block, "
    "and an entropy bonus raises PR by `score`. SALT raises n_eff of A′ by construction, since it "
    "keeps what gradients share. What did not: with the paper's feature gradients do not cancel, "
    "and the adaptive α is 0 or nearly so, which costs accuracy. With `sampled` they do cancel, "
    "in written steps. There, with eight seeds and a plan written before, a higher n_eff of A′ "
    "goes with a lower accuracy than GRPO's and DAPO's, by less than what would matter; PR stays. "
    "The adaptive α ends hardly below α fixed at 1, and far above α fixed at 0. α falls as groups "
    "grow, since n_eff grows with them, and SALT loses far more by large groups than GRPO does. "
    "At a fixed number of rollouts shares of energy change less with the group size than what "
    "would matter."
  ),
  "P": (
    "What held: in written steps P3O withstands training in bfloat16 with fp8 rollouts, where "
    "GRPO loses half of what it would learn, with eight seeds and a plan written before. GRPO's "
    "clip has a part in that loss, and either part of P3O does as well alone. int8 rollouts cost "
    "neither method what would matter. On `steps`, with two seeds, it is the other way round: P3O "
    "loses more by fp8 rollouts, and one seed of it collapses. In pass@8 P3O is not worse than "
    "the mean of three clips; whether GRPO falls below its start with fp8 rollouts is undecided. "
    "On `steps` P3O is robust to a hotter sampler whose log-probabilities do not see it. At a "
    "rate of 6e-4, with sixteen large updates per refresh, P3O is not worse than the widest of "
    "three clips; against the best that is undecided, and with four updates per refresh it ends "
    "below it. What did not: at a lag of one, at that rate, it falls far below GRPO, which is "
    "itself better than on-policy, since such a lag lets its clip act: without it GRPO loses that "
    "gain. P3O's cap and its pull, each alone, end far below GRPO as well. With half of the "
    "rollouts from a larger and better model P3O loses most of what it would learn; so does GRPO. "
    "With half from an equal model GRPO loses less than P3O. At temperature 1.2 nothing "
    "collapses, with or without a second anchor. On `steps`, with two seeds, P3O is better at lag "
    "8. At temperature 1.5 it collapses through its KL term on the quickstart."
  ),
  "F": (
    "Where entropy is high and falls, with a plan written before: it falls as much by equal "
    "masses as by success-heavy ones. These keep pass@1 highest, and pass@16 second to training "
    "for pass@4, while failure-heavy ones lose both, and their head's update is the furthest from "
    "rank one. So the two claims on masses do not hold there, and the second is the other way "
    "round. Whether FADE differs from GRPO is undecided: its δ stays at its bound, since entropy "
    "hardly falls below its target. It is below the best static estimator in pass@16, which is "
    "training for pass@4; in pass@1, where that is success-heavy, it is undecided whether by what "
    "matters. On `steps`, whose entropy is low from the start, success-heavy masses lower it a "
    "little, with every seed."
  ),
  "M": (
    "What held: the trigger rate grows within a stage, and with stages of μ = 96 the tight "
    "interval costs accuracy. What did not: on the quickstart with sixteen large updates per "
    "refresh the relaxed interval ends below the tight one, with and without the veto. At a rate "
    "of 6e-4 it gains; with the suffix vetoed two of ten seeds have lost the gain after 256 "
    "updates. At a rate of 1e-3 it collapses without a gain, with the suffix vetoed too. There "
    "vetoing the suffix is not better by what would matter than vetoing the trigger alone; in "
    "written steps that is undecided. On `steps`, where the relaxed interval collapses, the "
    "suffix veto is not stable. Whether stages are sooner depends on the price of a hand-over of "
    "weights, which is free in one process. At an engine's restart of 30 s it is undecided on "
    "`steps`. On the quickstart stale runs are then sooner at a small rise than on-policy GRPO, "
    "but not than GRPO with four updates per refresh. At the same cost they end below it: with "
    "the veto no seed gets to its accuracy, with the tight clip some do."
  ),
}
