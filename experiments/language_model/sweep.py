"""Training runs on the real language model; README.md has their rules and results.

  python -m rlvr_jax.main --mode=sweep --config=experiments/language_model/config.py \\
    --sweep=experiments/language_model/sweep.py --workdir=runs/language_model

from the repository root. Products are of bfloat16 in all runs, as in P3O's claim.
"""

from experiments.steps.sweep import quantized

FIELDS = {
  "schedule": "updates_per_refresh(batches=4)",
  "model.overrides.compute_dtype": "bfloat16",
  # A group with a mean response fills half a row: see "rows/filled".
  "batch.tokens_per_row": 300,
  "batch.tokens_per_micro_batch": 300,
  "store.keep_used": False,
}
METHODS = {  # label → fields
  "GRPO": {"loss": "ppo_clip(epsilon_low=0.2, epsilon_high=0.2)"},
  "P3O": {"loss": "p3o(ess_scope=16)"},
}
SAMPLERS = {"own sampler": {}, "fp8 sampler": quantized("float8_e4m3fn")}
FADE = "FADE"
# H* is 0.8 of the initial entropy.
FADE_FIELDS = {"schedule": "on_policy", "advantage": "fade(target_entropy=0.8)"}
PILOT_SEED = 100  # which no comparison uses
PILOT_RATES = ("3e-6", "1e-5")
PILOT = {
  f"pilot, {method}, {rate}": {
    **fields,
    "num_updates": 40,
    "learning_rate": f"constant(peak={rate})",
  }
  for rate in PILOT_RATES
  for method, fields in {**METHODS, FADE: FADE_FIELDS}.items()
}
RATES = {"GRPO": "1e-5", "P3O": "1e-5", FADE: "1e-5"}  # method → the best of its pilot
SEEDS = range(5)


def label(method: str, sampler: str = "own sampler") -> str:
  """Label of a method with a sampler of `SAMPLERS`."""
  return f"{method}, {sampler}"


PRECISION = {  # question 2
  label(method, sampler): {
    **fields,
    **sampling,
    "learning_rate": f"constant(peak={RATES[method]})",
  }
  for method, fields in METHODS.items()
  for sampler, sampling in SAMPLERS.items()
}

# Which part of P3O fails with fp8 rollouts: asked after the first seed of question 2 was seen.
WHY_SEEDS = range(3)
NO_PULL = label("P3O without its KL term", "fp8 sampler")
WHY = {
  NO_PULL: {**PRECISION[label("P3O", "fp8 sampler")], "loss": "p3o(ess_scope=16, kl_term=False)"}
}

# Question 4. FADE's control has constant weights, the means of α and δ over FADE's own updates.
FADE_SEEDS = range(3)
ADAPTING = {FADE: {**FADE_FIELDS, "learning_rate": f"constant(peak={RATES[FADE]})"}}
FADE_MEANS = {0: (1.276, 0.9323), 1: (1.385, 0.9533), 2: (1.392, 0.9515)}  # seed → α, δ
AVERAGED = "FADE's averages, constant"


def averaged_label(seed: int) -> str:
  """Label of FADE's control with a seed; all runs of a label must have the same fields."""
  return f"{AVERAGED}, seed {seed}"


def averaged(seed: int) -> dict[str, dict[str, str]]:
  """FADE's control with a seed."""
  alpha, delta = FADE_MEANS[seed]
  advantage = f"power_asym(alpha={alpha}, delta={delta})"
  return {averaged_label(seed): {**ADAPTING[FADE], "advantage": advantage}}


# Question 3: four stages of 32 updates, measured at the start and after each stage.
STAGES = {
  "schedule": "stages",
  "num_updates": 128,
  "evaluation.every": 32,
  "loss": "ppo_clip(epsilon_low=1.0, epsilon_high=4.0)",  # the interval [0, 5]
}
STAGE_SEEDS = range(5)
RELAXED = "relaxed clip"
SUFFIX = f"{RELAXED}, suffix veto"
STAGE_PILOT = {  # two stages of 32
  f"pilot, {RELAXED}, {rate}": {
    **STAGES,
    "schedule": "stages(count=2)",
    "num_updates": 64,
    "evaluation.every": 16,
    "learning_rate": f"constant(peak={rate})",
  }
  for rate in ("1e-5", "3e-5")
}
STAGE_RATE = {"learning_rate": "constant(peak=3e-5)"}  # by the rule for the pilot
VETO = {"veto.enabled": True, "veto.scope": "suffix", "veto.threshold": 0.01}
STAGED = {RELAXED: {**STAGES, **STAGE_RATE}, SUFFIX: {**STAGES, **STAGE_RATE, **VETO}}


def get_sweep():
  """The pilots, then the arms of each question; the seeds are the outer loop."""
  arms = [
    (PILOT_SEED, {**PILOT, **STAGE_PILOT}),
    *((seed, PRECISION) for seed in SEEDS),
    *((seed, WHY) for seed in WHY_SEEDS),
    *((seed, STAGED) for seed in STAGE_SEEDS),
    *((seed, {**ADAPTING, **averaged(seed)}) for seed in FADE_SEEDS),
  ]
  return [
    {"label": name, "seed": seed, **FIELDS, **fields}
    for seed, of_seed in arms
    for name, fields in of_seed.items()
  ]
