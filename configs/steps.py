"""GRPO on sums and products in worked steps: responses of 50 to 110 tokens that share some lines.

A from-scratch transformer over bytes works "3+4*5+6=" out, a step in each line. Some steps of its
demonstrations are wrong, so that the policy is right only sometimes. A response makes many
decisions, and one wrong decision makes the response wrong. experiments/steps/README.md compares
four methods on this task.

  python -m rlvr_jax.main --config=configs/steps.py --workdir=runs/steps
  python -m rlvr_jax.main --config=configs/steps.py:long --workdir=runs/steps_long

small: 0.16 M parameters, 8 terms, for 2 CPU cores. long: 3.2 M parameters, 16 terms, for an
accelerator; without one a run takes hours.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import base
from rlvr_jax.ops.checks import check_choice


def get_config(size: str = "small") -> ConfigDict:
  check_choice("configs/steps.py", "size", size, ("small", "long"))
  small = size == "small"
  c = base.get_config()
  c.num_updates = 200
  c.task = dict(
    name="steps",
    kwargs=dict(
      terms=8 if small else 16,
      product_share=0.2,
      wrong_step_share=0.08 if small else 0.03,
      train_size=1_000_000,
      warm_start_size=8192,
      held_out_size=256,
      train_seed=1,
      warm_start_seed=2,
      held_out_seed=3,
    ),
  )
  c.max_prompt_length = 32 if small else 64
  c.max_response_length = 144 if small else 304
  if small:
    c.model.overrides = dict(
      num_layers=3, width=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=192
    )
  else:
    c.model.preset = "small"
  c.warm_start.num_steps = 2000
  c.warm_start.batch_size = 16 if small else 64
  c.warm_start.learning_rate = "linear(peak=3e-3, warmup=50)"
  c.batch.prompts = 16 if small else 32
  c.batch.tokens_per_micro_batch = 8192
  c.learning_rate = "constant(peak=3e-4)"
  c.evaluation.batch_prompts = 256
  c.checkpoint.every = 50
  c.logging.print_every = 10
  return c
