"""A small policy that works out sums step by step; each stage samples the rollouts of 96 updates.

The quickstart's sums of three digits, answered step by step ("4-1=3", "3-7=-4", "#### -4"; 19 to 25
bytes), so that a response has a suffix to veto. The policy has 0.14 M parameters.

  --config=experiments/mu_grpo/config.py:stages   two stages, the interval [0, 5], no veto
  --config=experiments/mu_grpo/config.py:refresh  GRPO: four updates per refresh, clip 0.2

Nothing else differs between the two. All other fields are those of the μ-GRPO recipe.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import mu_grpo
from rlvr_jax.ops.checks import check_choice


def get_config(schedule: str = "stages") -> ConfigDict:
  check_choice("get_config", "schedule", schedule, ("stages", "refresh"))
  c = mu_grpo.get_config()
  c.veto.enabled = False
  if schedule == "refresh":
    c.schedule = "updates_per_refresh(batches=4)"
    c.loss = "ppo_clip(epsilon_low=0.2, epsilon_high=0.2)"
  else:
    c.schedule = "stages(count=2)"
  c.num_updates = 192

  with c.unlocked():
    c.model.overrides = dict(width=64, num_layers=2, mlp_width=192, unroll_layers=2)
  c.task.kwargs.solution = "steps"
  c.max_response_length = 26  # bytes, such as "4-9=-5\n-5-8=-13\n#### -13" and the stop token
  c.warm_start.num_steps = 200
  c.warm_start.learning_rate = "constant(peak=3e-3)"
  c.batch.prompts = 16
  c.learning_rate = "constant(peak=3e-4)"

  c.evaluation.every = 24
  c.evaluation.num_samples = 2
  c.evaluation.ks = (1,)
  c.checkpoint.every = 1000
  c.logging.print_every = 1000
  c.logging.rollouts_every = 1000
  return c
