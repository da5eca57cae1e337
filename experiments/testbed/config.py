"""The base of all experiments on the testbed: GRPO, four updates per refresh, 192 updates.

  --config=experiments/testbed/config.py          configs/steps.py, small
  --config=experiments/testbed/config.py:tour     configs/tour.py, small

This file has all fields that runs do not set, so that the experiments share one baseline and one
warm start per seed. 192 is a multiple of the stage lengths μ = 32 and 96. 64 held-out problems with
16 samples each are evaluated every 32 updates; on tour with 64 samples, every 96. The learning rate
is that of configs/steps.py, which experiments/premises ran with seed 100.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import steps, tour
from rlvr_jax.ops.checks import check_choice

UPDATES = 192
ROLLOUTS = 128  # per update, whatever the group size


def get_config(task: str = "steps") -> ConfigDict:
  check_choice("experiments/testbed/config.py", "task", task, ("steps", "tour"))
  c = {"steps": steps, "tour": tour}[task].get_config("small")
  with c.unlocked():
    c.model.overrides.compute_dtype = "float32"  # a field that some runs set
  c.num_updates = UPDATES
  c.batch.group_size = 8
  c.batch.prompts = ROLLOUTS // c.batch.group_size
  c.schedule = "updates_per_refresh(batches=4)"
  c.loss = "ppo_clip(epsilon_low=0.2, epsilon_high=0.2)"

  c.task.kwargs.held_out_size = 64
  c.evaluation.batch_prompts = 64
  c.evaluation.every = 32 if task == "steps" else 96
  c.evaluation.num_samples = 16 if task == "steps" else 64
  c.evaluation.ks = (1, 2, 4, 8, 16) if task == "steps" else (1, 2, 4, 8, 16, 32, 64)
  c.diagnostics.every = 24
  c.diagnostics.compared = "last_block"
  c.checkpoint.every = 48
  c.store.keep_used = False  # a hundred runs would keep gigabytes
  c.logging.print_every = 16
  c.logging.rollouts_every = 96
  return c
