"""Ratios that leave every clip range: P3O, and the veto of μ-GRPO; see README.md."""

CONFIG = "experiments/p3o_mismatch/config.py"
SEEDS = range(8)
RATE = "1e-3"  # chosen by the pilot
STALE = {  # 16 updates on the rollouts of one policy, ten times
  "schedule": "updates_per_refresh(batches=16)",
  "num_updates": 160,
  "evaluation.every": 16,
}
PILOT = {  # rate → seeds, which no comparison uses
  "3e-4": (100,),
  "6e-4": (101, 102, 103),
  "1e-3": (100, 101, 102, 103),
  "2e-3": (100, 101, 102, 103),
  "4e-3": (100,),
}
CLIPS = (0.2, 0.4, 0.6)


def grpo(epsilon: float) -> str:
  """Label of GRPO with a clip range."""
  return f"GRPO, ε = {epsilon}"


P3O, RELAXED = "P3O", "relaxed"
SUFFIX, TRIGGER = "relaxed, suffix vetoed", "relaxed, trigger vetoed"
ON_POLICY = "on-policy"


def _veto(scope: str) -> dict[str, object]:
  return {"veto.enabled": True, "veto.scope": scope, "veto.threshold": 0.1}


_GRPO, _P3O = f"{CONFIG}:grpo,refresh", f"{CONFIG}:p3o,refresh"
_RELAXED = {"config": _GRPO, "loss": "ppo_clip(epsilon_low=1.0, epsilon_high=4.0)"}
RUNS = {  # label → fields of the configuration
  **{
    grpo(epsilon): {
      "config": _GRPO,
      "loss": f"ppo_clip(epsilon_low={epsilon}, epsilon_high={epsilon})",
    }
    for epsilon in CLIPS
  },
  P3O: {"config": _P3O},
  RELAXED: _RELAXED,
  SUFFIX: _RELAXED | _veto("suffix"),
  TRIGGER: _RELAXED | _veto("trigger"),
  f"{grpo(0.2)}, {ON_POLICY}": {"config": _GRPO, "schedule": "on_policy"},
  f"{P3O}, {ON_POLICY}": {"config": _P3O, "schedule": "on_policy"},
}


def get_sweep():
  """The pilot, then the comparison, whose outer loop are the seeds."""
  pilot = [
    {"label": rate, "seed": seed, **STALE, "config": _GRPO}
    | {"learning_rate": f"constant(peak={rate})"}
    for rate, seeds in PILOT.items()
    for seed in seeds
  ]
  compared = [
    {"label": label, "seed": seed, **STALE, "learning_rate": f"constant(peak={RATE})", **fields}
    for seed in SEEDS
    for label, fields in RUNS.items()
  ]
  return pilot + compared
