"""Stages of stale rollouts, relaxed clipping, the veto's scopes and κ; see README.md."""

CONFIG = "experiments/mu_grpo/config.py"
SCOPES = ("suffix", "trigger", "trigger_and_suffix", "response")
THRESHOLD = 0.1  # κ of the scopes
THRESHOLDS = (1e-4, 1e-3, 1e-2)  # further κ of the suffix
HIGHER_RATE = 4e-4  # learning rate of some runs; the others have 3e-4
HIGHER = ", higher rate"


def veto(scope, threshold):
  settings = {"enabled": True, "scope": scope, "threshold": threshold}
  fields = {f"veto.{name}": value for name, value in settings.items()}
  return {"config": f"{CONFIG}:stages", **fields}


def veto_label(scope, threshold=THRESHOLD):
  return f"veto {scope}, κ = {threshold:g}"


GRPO, TIGHT, RELAXED = "GRPO, μ = 4", "tight clip", "relaxed clip"
SUFFIX = veto_label("suffix")
RUNS = {  # label → fields; all except the first train in stages
  GRPO: {"config": f"{CONFIG}:refresh"},
  TIGHT: {"config": f"{CONFIG}:stages", "loss": "ppo_clip(epsilon_low=0.2, epsilon_high=0.2)"},
  RELAXED: {"config": f"{CONFIG}:stages"},
  **{veto_label(scope): veto(scope, THRESHOLD) for scope in SCOPES},
  **{veto_label("suffix", threshold): veto("suffix", threshold) for threshold in THRESHOLDS},
}
AT_HIGHER_RATE = (RELAXED, SUFFIX, veto_label("trigger"), veto_label("trigger_and_suffix"))
RUNS |= {
  f"{label}{HIGHER}": {**RUNS[label], "learning_rate": f"constant(peak={HIGHER_RATE})"}
  for label in AT_HIGHER_RATE
}


def get_sweep():
  return [
    {"label": label, "seed": seed, **fields} for label, fields in RUNS.items() for seed in range(3)
  ]
