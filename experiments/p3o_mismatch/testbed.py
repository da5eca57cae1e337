"""P3O and GRPO's clip on the testbed, on rollouts from other policies; see TESTBED.md."""

from experiments.testbed.arms import BASE, runs

OTHER, OTHER_SEED = "other policy", 1000  # this run's policy samples half the rollouts of some runs
HOTTER = 1.5


def temperature(value, recorded):
  settings = {"fraction": 1.0, "temperature": value, "recorded": recorded}
  return {f"sources.temperature.{name}": setting for name, setting in settings.items()}


def quantized(form):
  return {"sources.quantized.fraction": 1.0, "sources.quantized.format": form}


def clip(epsilon):
  return {"loss": f"ppo_clip(epsilon_low={epsilon}, epsilon_high={epsilon})"}


def both_methods(setting, changes):
  """Arms of GRPO and P3O in the same setting."""
  return {f"GRPO, {setting}": changes, f"P3O, {setting}": {**P3O, **changes}}


P3O = {"loss": "p3o"}
RAW, EXACT = temperature(HOTTER, "raw"), temperature(HOTTER, "sampled")
HALF = {
  "sources.checkpoint.fraction": 0.5,
  "sources.checkpoint.workdir": f"{{workdir}}/other_policy_{OTHER_SEED}",
}
FAST = {"schedule": "fixed_lag(lag=8)", "learning_rate": "constant(peak=1e-3)"}
CLAIMS = {
  **BASE,
  "P3O": P3O,
  "GRPO, ε = 0.6": clip(0.6),
  **both_methods(f"temperature {HOTTER}, raw", RAW),
  **both_methods("half from another policy", HALF),
  **both_methods("fp8 rollouts", quantized("float8_e4m3fn")),
  **both_methods("lag 8", {"schedule": "fixed_lag(lag=8)"}),
  **both_methods("on-policy", {"schedule": "on_policy"}),
}
ABLATIONS = {
  "GRPO, ε = 0.4": clip(0.4),
  **both_methods(f"temperature {HOTTER}, exact", EXACT),
  "P3O, cap only, temperature 1.5, exact": {**EXACT, "loss": "p3o(kl_term=False)"},
  "P3O, KL only, temperature 1.5, exact": {**EXACT, "loss": "p3o(cap='none')"},
  "P3O, ESS by sequence, temperature 1.5, exact": {**EXACT, "loss": "p3o(ess='sequence')"},
  "P3O, cap only, temperature 1.5, raw": {**RAW, "loss": "p3o(kl_term=False)"},
  "P3O, KL only, temperature 1.5, raw": {**RAW, "loss": "p3o(cap='none')"},
  "P3O, ESS by sequence, temperature 1.5, raw": {**RAW, "loss": "p3o(ess='sequence')"},
  **both_methods("temperature 1.2, raw", temperature(1.2, "raw")),
  "P3O, two anchors, temperature 1.2, raw": {
    **temperature(1.2, "raw"),
    **P3O,
    "reference.kl_coefficient": 0.04,
  },
  **both_methods("temperature 1.2, exact", temperature(1.2, "sampled")),
  **both_methods("lag 8, learning rate 1e-3", FAST),
  **both_methods(
    "fp8 rollouts, bf16 training",
    {**quantized("float8_e4m3fn"), "model.overrides.compute_dtype": "bfloat16"},
  ),
  **both_methods("int8 rollouts", quantized("int8")),
  **both_methods("lag 1", {"schedule": "fixed_lag(lag=1)"}),
  **both_methods("lag 2", {"schedule": "fixed_lag(lag=2)"}),
}
FIRST = [{"label": OTHER, "seed": OTHER_SEED}]  # runs before the arms that need its checkpoint


def get_sweep():
  return FIRST + runs(CLAIMS) + runs(ABLATIONS)
