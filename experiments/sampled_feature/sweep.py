"""SALT by the sampled feature, by which gradients cancel: sizes, bases, α; see README.md."""

CONFIG = "experiments/mu_grpo/config.py:refresh"  # the quickstart in written steps
SEEDS = range(8)
UPDATES = 144  # of the comparison; of the pilot as the configuration has it, 192
ROLLOUTS = 128  # per update, whatever the group size
SIZES = (4, 16, 64)
BASE_SIZE = 16  # of all arms but those of other sizes
FIELDS = {
  "config": CONFIG,
  "gram": "streaming(feature='sampled')",
  "evaluation.num_samples": 4,
  "diagnostics.every": 24,
  "store.keep_used": False,
}
PILOT_SEEDS = (100, 101, 102, 103)  # which no comparison uses
DAPO = {"loss": "ppo_clip(epsilon_low=0.2, epsilon_high=0.28)", "dynamic_sampling.enabled": True}
ALPHAS = (0.0, 1.0)


def grpo(size: int) -> str:
  """Label of GRPO with a group size."""
  return f"GRPO, G = {size}"


def salt(size: int) -> str:
  """Label of SALT with a group size."""
  return f"SALT, G = {size}"


def fixed(alpha: float) -> str:
  """Label of SALT with a fixed α."""
  return f"SALT, α = {alpha:g}"


def _size(size: int) -> dict[str, int]:
  return {"batch.group_size": size, "batch.prompts": ROLLOUTS // size}


PILOT = {
  "written steps, G = 16": (_size(16), PILOT_SEEDS),
  "written steps, G = 8": (_size(8), PILOT_SEEDS[:1]),
  "written steps, G = 32": (_size(32), PILOT_SEEDS[:1]),
  "quickstart, G = 8": (
    {"config": "experiments/p3o_mismatch/config.py:grpo,refresh", "num_updates": 160}
    | {"batch.group_size": 8, "batch.prompts": 32, "diagnostics.every": 20},
    PILOT_SEEDS[:1],
  ),
}
SALT = {"reweighting": "salt"}
BONUS = "GRPO, entropy bonus 0.05"
RUNS = {  # label → fields
  **{
    label(size): {**_size(size), **fields}
    for size in SIZES
    for label, fields in ((grpo, {}), (salt, SALT))
  },
  "DAPO": {**_size(BASE_SIZE), **DAPO},
  "SALT on DAPO": {**_size(BASE_SIZE), **DAPO, **SALT},
  **{
    fixed(alpha): {
      **_size(BASE_SIZE),
      "reweighting": f"salt(alpha_min={alpha}, alpha_max={alpha})",
    }
    for alpha in ALPHAS
  },
  BONUS: {**_size(BASE_SIZE), "entropy_bonus": 0.05},
}


def get_sweep():
  """The pilot, then the comparison, whose outer loop are the seeds."""
  pilot = [
    {"label": label, "seed": seed, **FIELDS, **fields}
    for label, (fields, seeds) in PILOT.items()
    for seed in seeds
  ]
  compared = [
    {"label": label, "seed": seed, **FIELDS, "num_updates": UPDATES, **fields}
    for seed in SEEDS
    for label, fields in RUNS.items()
  ]
  return pilot + compared
