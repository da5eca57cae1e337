"""GRPO on walks through four goals on a grid with walls: many right answers to every problem.

A from-scratch transformer over bytes reads a start, four goals and the walls of an 8 × 8 grid, one
character per cell. It lists the cells of a walk that visits the goals in order, with a line for
each goal. Any such walk of at most 1.5 times the shortest length is right. The demonstrations make
detours.

  python -m rlvr_jax.main --config=configs/tour.py --workdir=runs/tour
  python -m rlvr_jax.main --config=configs/tour.py:long --workdir=runs/tour_long

small: 0.21 M parameters, 4 walls, for 2 CPU cores. long: 3.2 M parameters, 12 walls, for an
accelerator; without one a run takes hours. Other fields are as in configs/steps.py.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import steps


def get_config(size: str = "small") -> ConfigDict:
  c = steps.get_config(size)
  small = size == "small"
  c.task = dict(
    name="tour",
    kwargs=dict(
      width=8,
      walls=4 if small else 12,
      goals=4,
      slack=1.5,
      longest=60,
      detour_share=0.05 if small else 0.15,
      train_size=1_000_000,
      warm_start_size=16_384,
      held_out_size=256,
      train_seed=1,
      warm_start_seed=2,
      held_out_seed=3,
    ),
  )
  c.max_prompt_length = 11 if small else 19
  c.max_response_length = 64
  if small:
    c.model.overrides.num_layers = 4
  c.warm_start.num_steps = 6000 if small else 4000
  return c
