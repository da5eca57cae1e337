"""Decoupled PPO: clips around a recent policy; a capped importance weight corrects for the sampler.

Source: "Batch size-invariance for policy optimization" (arXiv:2110.00641). The recent policy π_prox
is the policy before the first update on a batch. In the first pass π/π_prox is therefore 1, and
clipping can occur in the second pass only, so there are two epochs over the 4 batches of a refresh.
Differs from the paper: its π_prox is a moving average of the parameters, and its advantages come
from a critic.

  python -m rlvr_jax.main --config=configs/decoupled_ppo.py --workdir=runs/decoupled_ppo

Other fields are as in configs/quickstart.py. Card: docs/methods/decoupled_ppo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "decoupled_ppo"
  c.schedule = "updates_per_refresh(batches=4, epochs=2)"
  return c
