"""GRPO on walks through four goals on a grid with walls: many right answers to every problem.

A from-scratch transformer over bytes reads a start, four goals and the walls of an 8 × 8 grid, one
character per cell, and lists the cells of a walk that visits the goals in order. Any walk within
1.5 times the shortest counts. Its demonstrations make detours. Which premise of which paper it has:
experiments/premises/README.md.

  python -m rlvr_jax.main --config=configs/tour.py --workdir=runs/tour
  python -m rlvr_jax.main --config=configs/tour.py:long --workdir=runs/tour_long

small: 0.8 M parameters, 6 walls, for 2 CPU cores. long: 3.2 M parameters, 12 walls, for an
accelerator, or hours.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import base
from rlvr_jax.ops.checks import check_choice


def get_config(size: str = "small") -> ConfigDict:
  check_choice("configs/tour.py", "size", size, ("small", "long"))
  small = size == "small"
  c = base.get_config()
  c.num_updates = 200
  c.task = dict(
    name="tour",
    kwargs=dict(
      width=8,
      walls=6 if small else 12,
      goals=4,
      slack=1.5,
      longest=60,
      detour_share=0.15,
      train_size=1_000_000,
      warm_start_size=16_384,
      held_out_size=256,
      train_seed=1,
      warm_start_seed=2,
      held_out_seed=3,
    ),
  )
  c.max_prompt_length = 13 if small else 19
  c.max_response_length = 61
  c.model.preset = "tiny" if small else "small"
  c.warm_start.num_steps = 1000 if small else 4000
  c.warm_start.learning_rate = "linear(peak=2e-3, warmup=50)"
  c.batch.prompts = 32
  c.batch.tokens_per_micro_batch = 8192
  c.learning_rate = "constant(peak=2e-4)"
  c.evaluation.batch_prompts = 256
  c.checkpoint.every = 50
  c.logging.print_every = 10
  return c
