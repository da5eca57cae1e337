"""GRPO on `configs/steps.py`, small: the base of all arms, with four updates per refresh.

This file has all fields that runs do not set, so that arms share one baseline and, per seed, one
warm start. 192 updates are two stages of 96. 64 held-out problems with 16 samples each are
evaluated every 32 updates. The learning rate is that of `configs/steps.py`.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import steps

UPDATES = 192
ROLLOUTS = 128  # per update, whatever the group size


def get_config() -> ConfigDict:
  c = steps.get_config("small")
  with c.unlocked():
    c.model.overrides.compute_dtype = "float32"  # a field that runs of other experiments set
  c.num_updates = UPDATES
  c.batch.group_size = 8
  c.batch.prompts = ROLLOUTS // c.batch.group_size
  c.schedule = "updates_per_refresh(batches=4)"
  c.loss = "ppo_clip(epsilon_low=0.2, epsilon_high=0.2)"

  c.task.kwargs.held_out_size = 64
  c.evaluation.batch_prompts = 64
  c.evaluation.every = 32
  c.evaluation.num_samples = 16
  c.evaluation.ks = (1, 2, 4, 8, 16)
  c.diagnostics.every = 24
  c.diagnostics.compared = "last_block"
  c.checkpoint.every = 48
  c.store.keep_used = False  # all runs would keep gigabytes
  c.logging.print_every = 16
  c.logging.rollouts_every = 96
  return c
