"""SALT on the testbed: feature, group size, channels, α, scope, entropy bonus; see TESTBED.md."""

from experiments.testbed.arms import BASE, group_size_fields, runs

SAMPLED = {"gram": "streaming(feature='sampled')"}
SALT = {"reweighting": "salt", **SAMPLED}
LARGE = 32
DAPO = {"loss": "ppo_clip(epsilon_low=0.2, epsilon_high=0.28)", "dynamic_sampling.enabled": True}


def salt(arguments):
  return {**SALT, "reweighting": f"salt({arguments})"}


CLAIMS = {
  **BASE,
  "SALT, sampled": SALT,
  "SALT, score": {"reweighting": "salt"},
  f"GRPO, G = {LARGE}": group_size_fields(LARGE),
  f"SALT, sampled, G = {LARGE}": {**SALT, **group_size_fields(LARGE)},
  "entropy bonus 0.05": {"entropy_bonus": 0.05},
}
ABLATIONS = {
  "SALT, random subspace": salt("random_subspace=True"),
  "SALT, shared channel": salt("channels='shared'"),
  "SALT, residual channel": salt("channels='residual'"),
  "SALT, no positive part": salt("positive_part=False"),
  **{f"SALT, α = {x}": salt(f"alpha_min={x}, alpha_max={x}") for x in (0.0, 0.5, 1.0)},
  "SALT, per group": salt("scope='group'"),
  "SALT, as released": salt("scope=8"),
  **{f"GRPO, G = {size}": group_size_fields(size) for size in (16, 64)},
  **{f"SALT, sampled, G = {size}": {**SALT, **group_size_fields(size)} for size in (16, 64)},
  "DAPO": DAPO,
  "SALT on DAPO": {**SALT, **DAPO},
  f"entropy bonus 0.05, G = {LARGE}": {"entropy_bonus": 0.05, **group_size_fields(LARGE)},
  "entropy bonus 0.01": {"entropy_bonus": 0.01},
}


def get_sweep():
  return runs(CLAIMS) + runs(ABLATIONS)
