"""SALT, P3O, FADE and μ-GRPO on answers of 60 to 90 bytes, alone and together; see README.md."""

from experiments.steps.config import ROLLOUTS, UPDATES

CONFIG = "experiments/steps/config.py"
SEEDS, FEWER_SEEDS = range(5), range(2)
OTHER, OTHER_SEED = "other policy", 1000  # this run's policy samples half the rollouts of some runs
GRPO = "GRPO"  # the baseline: the unchanged configuration
LARGE = 32  # group size, where 8 is usual
MU = 96  # updates of a stage
RELAXED = {"loss": "ppo_clip(epsilon_low=1.0, epsilon_high=4.0)"}  # the interval [0, 5]


def temperature(value, recorded):
  """Fields that sample all rollouts at a temperature; "raw" leaves it out of log-probabilities."""
  settings = {"fraction": 1.0, "temperature": value, "recorded": recorded}
  return {f"sources.temperature.{name}": setting for name, setting in settings.items()}


def quantized(form):
  """Fields that sample all rollouts with a copy of the policy whose weights have 8 bits."""
  return {"sources.quantized.fraction": 1.0, "sources.quantized.format": form}


def clip(epsilon):
  """Fields of GRPO's clip."""
  return {"loss": f"ppo_clip(epsilon_low={epsilon}, epsilon_high={epsilon})"}


def veto(scope):
  """Fields of the interval [0, 5] with a veto; κ is 0.1, since 0.01 is nearly idle here."""
  settings = {"enabled": True, "scope": scope, "threshold": 0.1, "trigger": "below"}
  return {**RELAXED, **{f"veto.{name}": value for name, value in settings.items()}}


P3O = {"loss": "p3o"}
SALT = {"reweighting": "salt", "gram": "streaming(feature='sampled')"}
FADE = {"advantage": "fade"}
STAGES = {"schedule": f"stages(count={UPDATES // MU})"}
GROUPS_OF_32 = {"batch.group_size": LARGE, "batch.prompts": ROLLOUTS // LARGE}
RAW = temperature(1.5, "raw")
TWO_ANCHORS = {**temperature(1.2, "raw"), **P3O, "reference.kl_coefficient": 0.04}
SETTINGS = {  # of rollouts, in which both GRPO and P3O have run
  "temperature 1.5, raw": RAW,
  "half from another policy": {
    "sources.checkpoint.fraction": 0.5,
    "sources.checkpoint.workdir": f"{{workdir}}/other_policy_{OTHER_SEED}",
  },
  "fp8 rollouts": quantized("float8_e4m3fn"),
  "lag 8": {"schedule": "fixed_lag(lag=8)"},
}
FIRST = {  # label → fields, with five seeds
  GRPO: {},
  "SALT, sampled": SALT,
  "P3O": P3O,
  "GRPO, temperature 1.5, raw": RAW,
  "P3O, temperature 1.5, raw": {**P3O, **RAW},
  "GRPO, ε = 0.6": clip(0.6),
  "FADE": FADE,
  "success-heavy": {"advantage": "asym(delta=4.0)"},  # mass of successes over that of failures: 4
  "failure-heavy": {"advantage": "asym(delta=0.25)"},
  f"tight, μ = {MU}": STAGES,
  f"suffix, μ = {MU}": {**STAGES, **veto("suffix")},
  # P3O's loss takes the place of the relaxed clip, and the veto acts on it.
  "all four": {**STAGES, **veto("suffix"), **FADE, **SALT, **P3O},
}
FEWER = {  # with two seeds
  "SALT, score": {"reweighting": "salt"},
  f"GRPO, G = {LARGE}": GROUPS_OF_32,
  f"SALT, sampled, G = {LARGE}": {**SALT, **GROUPS_OF_32},
  "entropy bonus 0.05": {"entropy_bonus": 0.05},
  **{
    f"{method}, {setting}": {**loss, **changes}
    for setting, changes in list(SETTINGS.items())[1:]
    for method, loss in ((GRPO, {}), ("P3O", P3O))
  },
  "P3O, temperature 1.2, raw": {**P3O, **temperature(1.2, "raw")},
  "P3O, two anchors, temperature 1.2, raw": TWO_ANCHORS,
  "FADE, H* = 0.5": {"advantage": "fade(target_is_relative=False, target_entropy=0.5)"},
  "pass@4 training": {"advantage": "pass_at_k"},
  f"relaxed, μ = {MU}": {**STAGES, **RELAXED},
  f"trigger, μ = {MU}": {**STAGES, **veto("trigger")},
}
ARMS = {**FIRST, **FEWER}


def get_sweep():
  other = [{"label": OTHER, "seed": OTHER_SEED}]
  first = [{"label": label, "seed": seed, **f} for seed in SEEDS for label, f in FIRST.items()]
  fewer = [
    {"label": label, "seed": seed, **f} for seed in FEWER_SEEDS for label, f in FEWER.items()
  ]
  return other + first + fewer
