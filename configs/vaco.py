"""VACO's mask: drops tokens that move away from the sampler, in responses far from it.

Source: VACO (arXiv:2603.01365). As in published code, the loss is PPO's with the clip bounds 0.2
and 0.272, and importance weights are at most 2. There are four batches per refresh: from the second
on, the policy that first trains on a batch is no longer its sampler. Difference from the paper: its
bound δ on a response's distance from the sampler is not known; 0.2 is our choice.

  python -m rlvr_jax.main --config=configs/vaco.py --workdir=runs/vaco

Other fields are as in configs/quickstart.py. Card: docs/methods/vaco.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "ppo_clip(epsilon_high=0.272)"
  c.correction = "tv_mask"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
