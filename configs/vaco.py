"""VACO's mask: in responses that are far from the sampler, tokens that move away are dropped.

Source: VACO (arXiv:2603.01365), as published code has it: PPO's loss with 0.2 and 0.272, and
weights of at most 2. Four batches per refresh, so that the policy which first trains on a batch
differs from the one that sampled it. Differs from the paper: its bound is not known, 0.2 is ours.

  python -m rlvr_jax.main --config=configs/vaco.py --workdir=runs/vaco

What is not set below is the quickstart's. Card: docs/methods/vaco.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "ppo_clip(epsilon_high=0.272)"
  c.correction = "tv_mask"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
