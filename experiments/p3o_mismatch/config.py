"""GRPO's clip and P3O on the same batches, for rollouts from another policy.

The quickstart's sums of three digits, with a policy of 0.20 M parameters. The two methods differ
only in the loss: same advantages, optimizer and aggregation, and no KL to a reference policy (P3O
has its own KL, to β; a KL to the first policy in GRPO would obscure the effect of the clip).

  --config=experiments/p3o_mismatch/config.py:METHOD,SCHEDULE

METHOD is grpo (ppo_clip) or p3o; SCHEDULE is refresh (four updates per refresh, as in the recipes)
or lag (rollouts that are a fixed number of updates old).
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import p3o, quickstart
from rlvr_jax.ops.checks import check_choice


def get_config(choice: str = "p3o,refresh") -> ConfigDict:
  method, _, schedule = choice.partition(",")
  check_choice("get_config", "method", method, ("grpo", "p3o"))
  check_choice("get_config", "schedule", schedule, ("refresh", "lag"))
  c = {"grpo": quickstart, "p3o": p3o}[method].get_config()
  if method == "grpo":
    c.loss = "ppo_clip(epsilon_low=0.2, epsilon_high=0.2)"
  c.schedule = {"refresh": "updates_per_refresh(batches=4)", "lag": "fixed_lag(lag=1)"}[schedule]
  c.num_updates = 80

  with c.unlocked():
    c.model.overrides = dict(width=64, num_layers=3, mlp_width=192, unroll_layers=3)
    c.model.overrides.compute_dtype = "float32"
  c.warm_start.num_steps = 250
  c.warm_start.learning_rate = "constant(peak=3e-3)"
  c.batch.prompts = 32
  c.learning_rate = "constant(peak=4e-4)"

  c.evaluation.every = 20
  c.checkpoint.every = 1000
  c.logging.print_every = 1000
  c.logging.rollouts_every = 1000
  return c
