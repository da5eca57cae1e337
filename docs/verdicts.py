"""The verdicts of docs/reproduction.md, by hand; their numbers come from files of results."""

from __future__ import annotations

import statistics

from docs.reproduction import Result, Verdict, mean, number, paired, results
from experiments.fade.tables import peak_update
from experiments.fade.testbed import ON_TOUR
from experiments.mu_grpo import hand_over
from experiments.mu_grpo.testbed_tables import SUFFIX as _SUFFIX
from experiments.mu_grpo.testbed_tables import TIGHT as _TIGHT
from experiments.mu_grpo.testbed_tables import after_a_stage
from experiments.testbed import report
from experiments.testbed.arms import GRPO
from rlvr_jax.evaluate.compare import METRIC, final, rise

_SALT = results("salt_geometry")
_P3O = results("p3o_mismatch")
_MU = results("mu_grpo")
_ON_STEPS = {
  **results("salt_geometry/testbed.json"),
  **results("p3o_mismatch/testbed.json"),
  **results("fade/testbed.json"),
  **results("mu_grpo/testbed.json"),
  **results("together/testbed.json"),
}
_RECIPES = results("recipes")

_QUICKSTART = "quickstart, 3 seeds, 95 % t intervals"
_SALT_LINK = "../experiments/salt_geometry/README.md"
_SALT_STEPS_LINK = "../experiments/salt_geometry/TESTBED.md"
_P3O_LINK = "../experiments/p3o_mismatch/README.md"
_MU_LINK = "../experiments/mu_grpo/README.md"
_PRICE_LINK = "../experiments/mu_grpo/TESTBED.md"
_FADE_LINK = "../experiments/fade/README.md"
_STEPS_RUNS = "`steps`, 192 updates, 5 seeds"
_STEPWISE = "quickstart in written steps, μ = 96, 3 seeds"
_LARGE = ("GRPO, G = 32", "SALT, sampled, G = 32")
_SIZES = ("GRPO, G = 16", "GRPO, G = 64", "SALT, sampled, G = 16", "SALT, sampled, G = 64")


def _average(metric: str):
  """Mean over a run's measurements, of experiments/salt_geometry."""
  return lambda run: statistics.mean(value for _, value in run["curves"][metric])


def _fall(run: Result) -> float:
  """The best evaluation less the last."""
  return max(run["evaluations"][METRIC]) - final(run)


def _first_entropy(run: Result) -> float:
  """Over the first span of a run on the testbed."""
  return run["train"]["policy/entropy"][0]


def _of_stage(metric: str, stage: int):
  """Mean over one of two stages."""
  half = report.SPANS // 2
  return lambda run: statistics.mean(run["train"][metric][stage * half : (stage + 1) * half])


def _of_mu(name: str):
  return lambda run: run[name]


def _collapsed(label: str) -> str:
  """How many runs end below their start."""
  return f"{sum(rise(run) < 0 for run in _MU[label])} of {len(_MU[label])}"


_PR = _average("geometry/participation_ratio")
_N_EFF = _average("geometry/effective_rollouts")
_REWEIGHTED = _average("geometry/effective_rollouts_reweighted")
_RESIDUAL = _average("geometry/residual_energy")
_CLIP = _average("loss/clip_fraction")
_RANK_ONE = report.of_geometry("head_rank_one_fraction", when="last")
_HEAD_SHARE = report.of_geometry("head_share", when="last")
_MASSES = (GRPO, "success-heavy", "failure-heavy")
_LAST_ENTROPY = report.end("policy/entropy")
_HOT = "temperature 1.5"
_EPSILON = "GRPO, ε = 0.2"
_PRICES = hand_over.of_quickstart((0.0, *hand_over.prices_of_7b().values()))


def _speedup(index: int) -> str:
  """Of stages, mean over seeds; 0: no price, 1: resharding, then restarts."""
  return f"{statistics.mean(curve.speedup[index] for curve in _PRICES):.2f}"


def _against(setting: str) -> str:
  """P3O less GRPO with ε = 0.2 in a setting."""
  return paired(_P3O, f"{setting}: P3O", f"{setting}: {_EPSILON}", final)


def _cost_of(setting: str, method: str) -> str:
  """Final pass@1 less that of the matched run."""
  return paired(_P3O, f"{setting}: {method}", f"matched: {method}", final)


_OF_SALT = {
  "S1": Verdict(
    "under GRPO gradients are of low rank, and cancel: low n_eff, low PR",
    "in part",
    "On the quickstart PR is {} and n_eff {}. On `steps`, by the score, PR is {} and n_eff {}, by"
    " the sampled tokens alone {} and {}. So the rank is low; gradients cancel by the sampled"
    " tokens only.",
    (
      *(mean(_SALT["GRPO, G = 16"], column) for column in (_PR, _N_EFF)),
      *(
        mean(_ON_STEPS[GRPO], report.of_geometry(metric, feature))
        for feature in ("score", "sampled")
        for metric in ("participation_ratio", "effective_rollouts")
      ),
    ),
    f"quickstart, 256 rollouts, G = 16, 3 seeds; {_STEPS_RUNS}, 128 rollouts",
    _SALT_STEPS_LINK,
    (GRPO,),
  ),
  "S2": Verdict(
    "SALT raises n_eff, PR and accuracy over GRPO and DAPO",
    "in part",
    "SALT less GRPO: n_eff in the loss {}, PR {}, pass@1 {}. The adaptive α is 0 there, since n_eff"
    " is above 1. On `steps`, by the sampled tokens, α is {}; n_eff in the loss {}, PR {}, pass@1"
    " {}. So n_eff rises; PR and accuracy do not.",
    (
      *(paired(_SALT, "SALT, G = 16", "GRPO, G = 16", f) for f in (_REWEIGHTED, _PR, final)),
      mean(_ON_STEPS["SALT, sampled"], report.over_training("reweighting/alpha")),
      *(
        paired(_ON_STEPS, "SALT, sampled", GRPO, f)
        for f in (
          report.of_geometry("effective_rollouts_reweighted", "sampled"),
          report.of_geometry("participation_ratio", "sampled"),
          report.late(),
        )
      ),
    ),
    f"{_QUICKSTART}, G = 16; {_STEPS_RUNS}; DAPO not tried",
    _SALT_STEPS_LINK,
    ("SALT, sampled", "SALT, score", "DAPO", "SALT on DAPO"),
  ),
  "S3": Verdict(
    "best PR–n_eff trade-off; one channel, no positive part and a random subspace are worse",
    "in part",
    "SALT less SALT in a random subspace: n_eff {}, PR {}, pass@1 {}. With α fixed at 1, less the"
    " adaptive one: pass@1 {}.",
    (
      *(
        paired(_SALT, "SALT, G = 16", "SALT, random subspace, G = 16", f)
        for f in (_REWEIGHTED, _PR, final)
      ),
      paired(_SALT, "SALT, α = 1.0, G = 16", "SALT, G = 16", final),
    ),
    f"{_QUICKSTART}; positive part not tried",
    _SALT_LINK,
    (
      *("SALT, random subspace", "SALT, shared channel", "SALT, residual channel"),
      "SALT, no positive part",
    ),
  ),
  "S4": Verdict(
    "a fixed α is brittle, the adaptive one is not",
    "not",
    "SALT less GRPO in pass@1: {} with α fixed at 1, {} with α fixed at 0. The adaptive α is 0 in"
    " nearly every update: {}.",
    tuple(
      paired(_SALT, label, "GRPO, G = 16", final)
      for label in ("SALT, α = 1.0, G = 16", "SALT, α = 0.0, G = 16", "SALT, G = 16")
    ),
    _QUICKSTART,
    _SALT_LINK,
    tuple(f"SALT, α = {alpha}" for alpha in (0.0, 0.5, 1.0)),
  ),
  "S5": Verdict(
    "at a fixed budget SALT uses larger groups better",
    "not",
    "SALT less GRPO in pass@1: {} at G = 4 and {} at G = 64. Both rise less with larger groups.",
    tuple(paired(_SALT, f"SALT, G = {size}", f"GRPO, G = {size}", final) for size in (4, 64)),
    f"{_QUICKSTART}, 256 rollouts",
    _SALT_LINK,
    (GRPO, "SALT, sampled", *_LARGE, *_SIZES),
  ),
  "S6": Verdict(
    "with G shared energy falls and the residual's rises; the bound stays, the norm falls",
    "not",
    "GRPO's residual energy is {} at G = 4 and {} at G = 64: it falls. Bound and norm against G"
    " were not tabulated.",
    tuple(mean(_SALT[f"GRPO, G = {size}"], _RESIDUAL) for size in (4, 64)),
    _QUICKSTART,
    _SALT_LINK,
    (GRPO, *_LARGE, *_SIZES),
  ),
  "S7": Verdict(
    "LM-head and last-block geometry agree, nulls do not; signs of large entries agree",
    "reproduced",
    "Correlation {} on the quickstart and {} on `steps`, against {} and {} for the 95 % quantile of"
    " permutations, {} and {} of noise. On `steps` signs of the largest tenth agree in a share of"
    " {}.",
    (
      *(
        value
        for name in ("correlation", "permutation_quantile", "noise_quantile")
        for value in (
          mean(_SALT["GRPO, G = 8"], _average(f"geometry/agreement_{name}")),
          mean(_ON_STEPS[GRPO], report.of_geometry(f"agreement_{name}")),
        )
      ),
      mean(_ON_STEPS[GRPO], lambda run: run["signs"]),
    ),
    f"{_QUICKSTART}, G = 8; {_STEPS_RUNS}",
    _SALT_STEPS_LINK,
    (GRPO, "SALT, sampled"),
  ),
  "S8": Verdict(
    "low PR and n_eff persist across model families; SALT raises both",
    "not testable",
    "The policies here are of one family, from scratch, with under a million parameters. It takes"
    " published checkpoints: see the last section.",
    link="../experiments/full_size.py",
  ),
  "S9": Verdict(
    "the same for code",
    "not testable",
    "A policy from scratch of this size writes no programs. The tasks of"
    " [published programs](models.md) and the sandbox are there; it takes a checkpoint of 7B.",
    link="models.md",
  ),
  "S10": Verdict(
    "α adapts with G; the clip fraction stays low",
    "in part",
    "On the quickstart α is 0 in nearly every update at every G; the clip fraction is {} with SALT"
    " and {} without. On `steps`, by the sampled tokens, α is {}, the clip fraction {} and {}.",
    (
      *(mean(_SALT[label], _CLIP) for label in ("SALT, G = 16", "GRPO, G = 16")),
      mean(_ON_STEPS["SALT, sampled"], report.over_training("reweighting/alpha")),
      *(
        mean(_ON_STEPS[label], report.over_training("loss/clip_fraction"))
        for label in ("SALT, sampled", GRPO)
      ),
    ),
    f"{_QUICKSTART}, G = 16; {_STEPS_RUNS}",
    _SALT_LINK,
    ("SALT, sampled", "SALT, sampled, G = 32", "SALT, sampled, G = 16", "SALT, sampled, G = 64"),
  ),
  "S11": Verdict(
    "the exploration share grows with G; an entropy bonus raises PR, not n_eff",
    "not",
    "A bonus of 0.01 less none: PR {}, n_eff {}, entropy {} nats. So small a bonus hardly acts.",
    tuple(
      paired(_SALT, "GRPO + entropy bonus, G = 16", "GRPO, G = 16", f)
      for f in (_PR, _N_EFF, _average("policy/entropy"))
    ),
    _QUICKSTART,
    _SALT_LINK,
    (GRPO, "entropy bonus 0.05", "GRPO, G = 32", "entropy bonus 0.05, G = 32"),
  ),
}
_OF_P3O = {
  "P1": Verdict(
    "one P3O run matches or beats the best of GRPO with ε = 0.2, 0.4, 0.6",
    "not",
    "P3O less GRPO in pass@1: {} with ε = 0.2, {} with ε = 0.6.",
    tuple(
      paired(_P3O, "matched: P3O", f"matched: GRPO, ε = {epsilon}", final) for epsilon in (0.2, 0.6)
    ),
    f"{_QUICKSTART}, 80 updates",
    _P3O_LINK,
    (GRPO, "P3O", "GRPO, ε = 0.6", "GRPO, ε = 0.4"),
  ),
  "P2": Verdict(
    "robust to rollouts sampled at another temperature",
    "in part",
    "At temperature 1.5, with exact log-probabilities, less its matched run: P3O {}, a collapse;"
    " GRPO {}. Without its KL term P3O ends at {}. With raw ones, on `steps`, neither collapses:"
    " GRPO less its matched run {}, P3O less GRPO at that temperature {}.",
    (
      _cost_of(_HOT, "P3O"),
      _cost_of(_HOT, _EPSILON),
      mean(_P3O[f"{_HOT}: P3O without its KL term"], final),
      paired(_ON_STEPS, f"GRPO, {_HOT}, raw", GRPO, report.late()),
      paired(_ON_STEPS, f"P3O, {_HOT}, raw", f"GRPO, {_HOT}, raw", report.late()),
    ),
    f"{_QUICKSTART}, 80 updates; {_STEPS_RUNS}",
    _P3O_LINK,
    tuple(
      f"{method}, temperature {heat}, {recorded}"
      for heat in (1.5, 1.2)
      for recorded in ("raw", "exact")
      for method in ("GRPO", "P3O")
    ),
  ),
  "P3": Verdict(
    "robust to bf16 training with fp8 rollouts, where GRPO degrades",
    "in part",
    "int8 rollouts and bfloat16 training, less the matched run: P3O {}, GRPO {}. Neither degrades.",
    (_cost_of("int8 rollouts", "P3O"), _cost_of("int8 rollouts", _EPSILON)),
    f"{_QUICKSTART}; int8 in place of fp8",
    _P3O_LINK,
    (
      *("GRPO, fp8 rollouts", "P3O, fp8 rollouts"),
      *("GRPO, fp8 rollouts, bf16 training", "P3O, fp8 rollouts, bf16 training"),
    ),
  ),
  "P4": Verdict(
    "pass@k matches or beats the averaged GRPO sweep; with fp8 rollouts GRPO collapses",
    "queued",
    "No run with pass@k and fp8 rollouts has finished.",
    arms=(GRPO, "P3O", "GRPO, ε = 0.4", "GRPO, ε = 0.6", "GRPO, fp8 rollouts", "P3O, fp8 rollouts"),
  ),
  "P5": Verdict(
    "better and steadier than GRPO in one- and two-step asynchronous pipelines",
    "not",
    "P3O less GRPO: {} at lag 1, {} at lag 2. GRPO less its matched run: {} and {}. The lags are"
    " hardly a mismatch.",
    (
      *(_against(setting) for setting in ("lag 1", "lag 2")),
      *(_cost_of(setting, _EPSILON) for setting in ("lag 1", "lag 2")),
    ),
    f"{_QUICKSTART}, ε = 0.2",
    _P3O_LINK,
    (
      *("GRPO, lag 8", "P3O, lag 8", "GRPO, lag 1", "P3O, lag 1", "GRPO, lag 2", "P3O, lag 2"),
      *("GRPO, lag 8, learning rate 1e-3", "P3O, lag 8, learning rate 1e-3"),
    ),
  ),
  "P6": Verdict(
    "robust to half of the rollouts from another model",
    "not",
    "Less its matched run: P3O {}, GRPO {}. P3O loses more.",
    tuple(_cost_of("half from another policy", method) for method in ("P3O", _EPSILON)),
    f"{_QUICKSTART}; another seed's policy",
    _P3O_LINK,
    ("GRPO, half from another policy", "P3O, half from another policy"),
  ),
  "P7": Verdict(
    "a second anchor, to the reference, collapses at temperature 1.2; P3O does not",
    "queued",
    "The paper's formula is not in what we have; ours is P3O with a KL to the first policy.",
    arms=("P3O, temperature 1.2, raw", "P3O, two anchors, temperature 1.2, raw"),
  ),
}
_OF_FADE = {
  "F1": Verdict(
    "success-heavy mass collapses entropy",
    "not",
    "Under GRPO, of equal masses, entropy falls from {} to {} nats. Less GRPO at the end:"
    " success-heavy entropy {} nats, pass@1 {}; failure-heavy {} and {}. It falls with all masses.",
    (
      *(mean(_ON_STEPS[GRPO], f) for f in (_first_entropy, _LAST_ENTROPY)),
      *(
        paired(_ON_STEPS, label, GRPO, f)
        for label in ("success-heavy", "failure-heavy")
        for f in (_LAST_ENTROPY, report.late())
      ),
    ),
    f"{_STEPS_RUNS}, ratios of masses of 4 and 1/4",
    _FADE_LINK,
    (GRPO, "success-heavy", "failure-heavy", "successes alone", "failures mostly, λ = 0.1"),
  ),
  "F2": Verdict(
    "failure-heavy mass drives the head's update to rank one",
    "not",
    "The largest singular value's share of the squares of the head's change, at the end: GRPO {},"
    " success-heavy {}, failure-heavy {}; failure-heavy less GRPO {}. The head's share of the"
    " squares of all changes is {}, {} and {}.",
    (
      *(mean(_ON_STEPS[label], _RANK_ONE) for label in _MASSES),
      paired(_ON_STEPS, "failure-heavy", GRPO, _RANK_ONE),
      *(mean(_ON_STEPS[label], _HEAD_SHARE) for label in _MASSES),
    ),
    f"{_STEPS_RUNS}, ratios of masses of 4 and 1/4",
    _FADE_LINK,
    (GRPO, "success-heavy", "failure-heavy"),
  ),
  "F3": Verdict(
    "peaks earlier in pass@1 than the best static estimator, with the best pass@k curve",
    "not",
    "FADE less GRPO: peak {}, update of the peak {}, pass@16 at the end {}. Less failure-heavy:"
    " {}, {} and {}. On the quickstart, less GRPO in pass@1: FADE {}, pass@4 training {}.",
    (
      *(
        paired(_ON_STEPS, "FADE", label, f)
        for label in (GRPO, "failure-heavy")
        for f in (report.peak(), peak_update, report.late("eval/pass@16"))
      ),
      *(paired(_RECIPES, label, "grpo", final) for label in ("fade", "pass_at_k")),
    ),
    f"{_STEPS_RUNS}; {_QUICKSTART}, 64 updates",
    _FADE_LINK,
    (
      *(GRPO, "FADE", "FADE, H* = 0.5", "pass@4 training", "success-heavy", "failure-heavy"),
      *ON_TOUR,
    ),
  ),
}
_OF_MU = {
  "M1": Verdict(
    "reaches GRPO's accuracy 2.2 × sooner in wall-clock with four stages",
    "not",
    "GRPO's seconds to a rise of 0.1, over those of stages: {}, so that stages are slower. If a"
    " hand-over cost what restarting an engine takes: {} to {}. Break-even is at {} to {} updates."
    " On `steps` stages end elsewhere: pass@1 less GRPO's {}.",
    (
      *(_speedup(0), _speedup(2), _speedup(3)),
      number(min(curve.break_even for curve in _PRICES)),
      number(max(curve.break_even for curve in _PRICES)),
      paired(_ON_STEPS, _SUFFIX, GRPO, report.late()),
    ),
    f"{_STEPWISE}; {_STEPS_RUNS}; suffix veto, κ = 0.1",
    _PRICE_LINK,
    (GRPO, "suffix, μ = 96", "suffix, μ = 32"),
  ),
  "M2": Verdict(
    "at large μ the tight interval plateaus; [0, 5] gains, then collapses",
    "in part",
    "Tight less GRPO with μ = 4: {}. Relaxed, its best less its end: {}. It ends below its start"
    " with {} seeds, at a higher learning rate with {}. On `steps`, tight less GRPO: {}, after a"
    " first stage that ends at {}; its peak is {}.",
    (
      paired(_MU, "tight clip", "GRPO, μ = 4", final),
      mean(_MU["relaxed clip"], _fall),
      *(_collapsed(label) for label in ("relaxed clip", "relaxed clip, higher rate")),
      paired(_ON_STEPS, _TIGHT, GRPO, report.late()),
      *(mean(_ON_STEPS[_TIGHT], f) for f in (after_a_stage, report.peak())),
    ),
    f"{_STEPWISE}; {_STEPS_RUNS}",
    _MU_LINK,
    (
      *(GRPO, "tight, μ = 96", "relaxed, μ = 96", "tight, μ = 96, learning rate 1e-3"),
      *("relaxed, μ = 96, learning rate 1e-3", "GRPO, learning rate 1e-3"),
    ),
  ),
  "M3": Verdict(
    "masking the triggers alone still collapses; the suffix or broader scopes are stable",
    "in part",
    "Less the relaxed clip in pass@1, at the higher learning rate: suffix {}, triggers alone {}. At"
    " the lower one: {} and {}. On `steps` the suffix is not stable: pass@1 is {} after the first"
    " stage and {} at the end, less the tight clip {}.",
    (
      *(
        paired(_MU, f"veto {scope}, κ = 0.1, higher rate", "relaxed clip, higher rate", final)
        for scope in ("suffix", "trigger")
      ),
      *(
        paired(_MU, f"veto {scope}, κ = 0.1", "relaxed clip", final)
        for scope in ("suffix", "trigger")
      ),
      *(mean(_ON_STEPS[_SUFFIX], f) for f in (after_a_stage, report.late())),
      paired(_ON_STEPS, _SUFFIX, _TIGHT, report.late()),
    ),
    f"{_STEPWISE}; {_STEPS_RUNS}; κ = 0.1",
    _MU_LINK,
    (
      *("relaxed, μ = 96", "suffix, μ = 96", "trigger, μ = 96", "response, μ = 96"),
      *("trigger and suffix, μ = 96", "suffix, μ = 96, learning rate 1e-3"),
      *("trigger, μ = 96, learning rate 1e-3", "relaxed, μ = 96, learning rate 1e-3"),
    ),
  ),
  "M4": Verdict(
    "four refreshes against 1024: switching overhead and memory contention go",
    "not testable",
    "One process on one device has no engine to switch to: all hand-overs of a GRPO run take {} of"
    " its {} seconds. The price of a hand-over is a curve instead (M1).",
    (
      mean(_MU["GRPO, μ = 4"], lambda run: run["phase_seconds"]["sync_weights"]),
      mean(_MU["GRPO, μ = 4"], _of_mu("elapsed_seconds")),
    ),
    _STEPWISE,
    _PRICE_LINK,
  ),
  "M5": Verdict(
    "reward dynamics by stage; vetoed token fraction",
    "in part",
    "Vetoed with κ = 0.1: {} of the tokens. The trigger rate grows from {} in the first quarter of"
    " a stage to {} in the last. On `steps` {} of the tokens are vetoed in the first stage and {}"
    " in the second, the solve rate of the rollouts is {} and {}.",
    (
      mean(_MU["veto suffix, κ = 0.1"], _of_mu("vetoed")),
      *(
        mean(
          _MU["veto suffix, κ = 0.1"],
          lambda run, part=part: statistics.mean(run["trigger_rate_by_age"][part]),
        )
        for part in (slice(0, 24), slice(72, 96))
      ),
      *(
        mean(_ON_STEPS[_SUFFIX], _of_stage(metric, stage))
        for metric in ("veto/token_fraction", "reward/pass_rate")
        for stage in (0, 1)
      ),
    ),
    f"{_STEPWISE}; {_STEPS_RUNS}",
    _MU_LINK,
    ("suffix, μ = 96", "trigger, μ = 96", "suffix, κ = 0.01, μ = 96", "suffix, κ = 0.001, μ = 96"),
  ),
}
VERDICTS_BY_ID = {**_OF_SALT, **_OF_P3O, **_OF_FADE, **_OF_MU}
IN_SHORT = {  # of each paper: what held, what did not, and why as far as the runs tell
  "S": (
    "What held: the geometry. Gradients are of low rank, the output head's stand for those of the"
    " last block, and SALT raises n_eff in the loss. What did not: that PR and accuracy follow. By"
    " the score gradients do not cancel here, n_eff is above 1, so that the adaptive α is 0 and"
    " costs accuracy on the quickstart. By the sampled tokens they cancel; there SALT acts, and"
    " accuracy is GRPO's."
  ),
  "P": (
    "What held: training goes on under each mismatch, but for one collapse. What did not: P3O is"
    " nowhere better than GRPO. Policies of this size change little between sampling and update, so"
    " that the effective sample size stays near its maximum, and there is hardly a mismatch to"
    " adapt to."
  ),
  "F": (
    "None of the three held. Entropy is low after the warm start, and falls under every estimator,"
    " so that there is little to keep. FADE's controllers hardly move there. Unequal masses do move"
    " the output head far more than equal ones, but not along one direction."
  ),
  "M": (
    "What held: at large μ the tight interval plateaus, and the relaxed one gains first, then"
    " falls. What did not: the suffix veto keeps it stable on the quickstart only. Stages are"
    " slower by the clock, since a hand-over of weights is free in one process. They win where it"
    " costs several updates, about what restarting an inference engine takes."
  ),
}
