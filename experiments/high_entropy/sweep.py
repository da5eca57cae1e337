"""Advantages of unequal masses, and FADE, where entropy is high and falls; see README.md."""

CONFIG = "configs/quickstart.py"
SEEDS = range(8)
UPDATES = 240
FIELDS = {  # of all runs, but for what a try of the pilot sets
  "num_updates": UPDATES,
  "batch.prompts": 32,
  "learning_rate": "constant(peak=3e-4)",
  "task.kwargs.warm_start_size": 2500,
  "warm_start.num_steps": 250,
  "evaluation.num_samples": 16,
  "evaluation.ks": (1, 2, 4, 8, 16),
  "evaluation.every": 30,
  "diagnostics.every": 60,
  "checkpoint.every": UPDATES,
  "store.keep_used": False,
  "logging.print_every": 60,
  "logging.rollouts_every": UPDATES,
}
SMALLER = "0.2 M parameters, 1024 demonstrations, 250 steps, rate 4e-4"
FEW = "0.8 M, 1024 demonstrations, 200 steps"
LONG = "0.8 M, 1024 demonstrations, 300 steps"
CHOSEN = "0.8 M, 2500 demonstrations, 250 steps"
PILOT = {  # try → fields, seeds that no comparison uses
  SMALLER: (
    {
      "config": "experiments/p3o_mismatch/config.py:grpo,refresh",
      "schedule": "on_policy",
      "learning_rate": "constant(peak=4e-4)",
      "task.kwargs.warm_start_size": 1024,
    },
    (100,),
  ),
  FEW: ({"task.kwargs.warm_start_size": 1024, "warm_start.num_steps": 200}, (100,)),
  LONG: ({"task.kwargs.warm_start_size": 1024, "warm_start.num_steps": 300}, (100,)),
  CHOSEN: ({}, (100, 101, 102, 103)),
}

GRPO, EQUAL, FADE = "GRPO", "r − r̄", "FADE"
SUCCESS_HEAVY, FAILURE_HEAVY = "success-heavy", "failure-heavy"
STATIC = {  # label → advantage
  GRPO: "grpo",
  EQUAL: "grpo_mean",
  SUCCESS_HEAVY: "asym(delta=4.0)",  # m_S / m_F = 4
  FAILURE_HEAVY: "asym(delta=0.25)",  # m_S / m_F = 1/4
  "pass@4 training": "pass_at_k",
}
ADVANTAGES = STATIC | {FADE: "fade"}  # H* is half of the entropy at the start


def get_sweep():
  """The pilot, then the comparison, whose outer loop are the seeds."""
  pilot = [
    {"label": label, "seed": seed, "config": CONFIG, **FIELDS, **fields}
    for label, (fields, seeds) in PILOT.items()
    for seed in seeds
  ]
  compared = [
    {"label": label, "seed": seed, "config": CONFIG, **FIELDS, "advantage": advantage}
    for seed in SEEDS
    for label, advantage in ADVANTAGES.items()
  ]
  return pilot + compared
