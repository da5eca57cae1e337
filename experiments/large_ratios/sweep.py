"""Ratios that leave every clip range: P3O, and the veto of μ-GRPO; see README.md."""

CONFIG = "experiments/p3o_mismatch/config.py"
RATE, SEEDS = "1e-3", range(8)  # chosen by the pilot
LOWER, LOWER_SEEDS = "6e-4", range(10)  # where GRPO learns well
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


def at_lower(label: str) -> str:
  """Label of an arm at the lower rate."""
  return f"{label}, rate {LOWER}"


P3O, RELAXED = "P3O", "relaxed"
SUFFIX, TRIGGER = "relaxed, suffix vetoed", "relaxed, trigger vetoed"
ON_POLICY, LAG = "on-policy", "lag 1"


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
_LAGGING = {"schedule": "fixed_lag(lag=1)"}
LOWER_RUNS = {
  at_lower(label): fields
  for label, fields in {
    **RUNS,
    f"{grpo(0.2)}, {LAG}": {"config": _GRPO, **_LAGGING},
    f"{P3O}, {LAG}": {"config": _P3O, **_LAGGING},
  }.items()
}

REFRESHED = at_lower(f"{grpo(0.2)}, four updates per refresh")
REFRESHED_RUNS = {REFRESHED: {"config": _GRPO, "schedule": "updates_per_refresh(batches=4)"}}
FREE, CAP, PULL = (
  at_lower(f"{label}, {LAG}") for label in ("GRPO without a clip", "P3O's cap", "P3O's pull")
)
WHY_RUNS = {  # of what a lag of one does
  FREE: {"config": _GRPO, **_LAGGING, "loss": "ppo_clip(epsilon_low=1.0, epsilon_high=1e6)"},
  CAP: {"config": _P3O, **_LAGGING, "loss": "p3o(kl_term=False)"},
  PULL: {"config": _P3O, **_LAGGING, "loss": "p3o(cap='none')"},
}
WHY_SEEDS = range(5)
LONGER = 256  # updates of a stale run that cost as much as GRPO's 160 with four per refresh


def longer(label: str) -> str:
  """Label of a stale run at the lower rate that goes on for as long as GRPO."""
  return at_lower(f"{label}, {LONGER} updates")


LONGER_RUNS = {
  longer(label): {**RUNS[label], "num_updates": LONGER} for label in (grpo(0.2), SUFFIX)
}
NEW_SEEDS = range(8, 24)  # which the first comparison has not seen


def with_new_seeds(label: str) -> str:
  """Label of an arm of the first comparison, with other seeds."""
  return f"{label}, seeds {NEW_SEEDS[0]} to {NEW_SEEDS[-1]}"


VETO_RUNS = {with_new_seeds(label): RUNS[label] for label in (SUFFIX, TRIGGER)}


def _seed_by_seed(arms, seeds, rate):
  fields_of_all = {**STALE, "learning_rate": f"constant(peak={rate})"}
  return [
    {"label": label, "seed": seed, **fields_of_all, **fields}
    for seed in seeds
    for label, fields in arms.items()
  ]


def get_sweep():
  """The pilot, then the comparisons at the two rates."""
  pilot = [
    run
    for rate, seeds in PILOT.items()
    for run in _seed_by_seed({rate: {"config": _GRPO}}, seeds, rate)
  ]
  return (
    pilot
    + _seed_by_seed(RUNS, SEEDS, RATE)
    + _seed_by_seed(LOWER_RUNS, LOWER_SEEDS, LOWER)
    + _seed_by_seed(REFRESHED_RUNS, LOWER_SEEDS, LOWER)
    + _seed_by_seed(WHY_RUNS, WHY_SEEDS, LOWER)
    + _seed_by_seed(LONGER_RUNS, LOWER_SEEDS, LOWER)
    + _seed_by_seed(VETO_RUNS, NEW_SEEDS, RATE)
  )
