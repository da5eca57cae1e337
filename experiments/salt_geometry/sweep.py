"""Gradient geometry with and without SALT, over group sizes and seeds; see README.md."""

BUDGET = 256  # rollouts per update, whatever the group size
GROUP_SIZES = (4, 8, 16, 32, 64)
ALPHAS = (0.0, 0.5, 1.0)
ENTROPY_BONUS = 0.01
MIDDLE = 16  # group size of the ablations
COMPARED = 8  # group size of the runs that compare the head's Gram matrix with the last block's


def fields(recipe, group_size, **more):
  """Fields of one run, with four updates per refresh, so that ratios can be clipped."""
  return {
    "config": f"configs/{recipe}.py",
    "num_updates": 100,
    "batch.group_size": group_size,
    "batch.prompts": BUDGET // group_size,
    "schedule": "updates_per_refresh(batches=4)",
    "diagnostics.every": 10,
    **more,
  }


def runs():
  """Label → fields."""
  fields_by_label = {}
  for group_size in GROUP_SIZES:
    compared = {"diagnostics.compared": "last_block"} if group_size == COMPARED else {}
    for name, recipe in (("GRPO", "grpo"), ("SALT", "salt_grpo")):
      fields_by_label[f"{name}, G = {group_size}"] = fields(recipe, group_size, **compared)
  for alpha in ALPHAS:
    reweighting = f"salt(alpha_min={alpha}, alpha_max={alpha})"
    fields_by_label[f"SALT, α = {alpha}, G = {MIDDLE}"] = fields(
      "salt_grpo", MIDDLE, reweighting=reweighting
    )
  bonus = fields("grpo", MIDDLE, entropy_bonus=ENTROPY_BONUS)
  fields_by_label[f"GRPO + entropy bonus, G = {MIDDLE}"] = bonus
  random = fields("salt_grpo", MIDDLE, reweighting="salt(random_subspace=True)")
  fields_by_label[f"SALT, random subspace, G = {MIDDLE}"] = random
  return fields_by_label


def get_sweep():
  return [
    {"label": label, "seed": seed, **fields}
    for label, fields in runs().items()
    for seed in range(3)
  ]
