"""P3O against GRPO's clip sweep on mismatched rollouts, over seeds; see README.md."""

CONFIG = "experiments/p3o_mismatch/config.py"
OTHER, OTHER_SEED = "other policy", 1000  # this run's policy samples half the rollouts of some runs
METHODS = {  # label → (method of the configuration, fields)
  **{
    f"GRPO, ε = {epsilon}": (
      "grpo",
      {"loss": f"ppo_clip(epsilon_low={epsilon}, epsilon_high={epsilon})"},
    )
    for epsilon in (0.2, 0.4, 0.6)
  },
  "P3O": ("p3o", {}),
}
ABLATED = "temperature 1.5"
CAP_ONLY = f"{ABLATED}: P3O without its KL term"
SETTINGS = {  # label → (schedule, changed fields)
  "matched": ("refresh", {}),
  "temperature 1.5": (
    "refresh",
    {"sources.temperature.fraction": 1.0, "sources.temperature.temperature": 1.5},
  ),
  "int8 rollouts": (
    "refresh",
    {"sources.quantized.fraction": 1.0, "model.overrides.compute_dtype": "bfloat16"},
  ),
  "lag 1": ("lag", {"schedule": "fixed_lag(lag=1)"}),
  "lag 2": ("lag", {"schedule": "fixed_lag(lag=2)"}),
  "half from another policy": (
    "refresh",
    {
      "sources.checkpoint.fraction": 0.5,
      "sources.checkpoint.workdir": f"{{workdir}}/other_policy_{OTHER_SEED}",
    },
  ),
}


def runs():
  """ "setting: method" → fields."""
  fields_by_label = {
    f"{setting}: {label}": {"config": f"{CONFIG}:{method},{schedule}", **fields, **changes}
    for setting, (schedule, changes) in SETTINGS.items()
    for label, (method, fields) in METHODS.items()
  }
  schedule, changes = SETTINGS[ABLATED]
  cap_only = {"config": f"{CONFIG}:p3o,{schedule}", "loss": "p3o(kl_term=False)", **changes}
  return fields_by_label | {CAP_ONLY: cap_only}


def get_sweep():
  other = {"label": OTHER, "seed": OTHER_SEED, "config": f"{CONFIG}:grpo,refresh"}
  return [other] + [
    {"label": label, "seed": seed, **fields}
    for label, fields in runs().items()
    for seed in range(3)
  ]
