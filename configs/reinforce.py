"""Plain REINFORCE: A = r, without a baseline or a ratio.

Source: Williams, 1992, Machine Learning 8. With rewards of 0 and 1, only correct rollouts have a
gradient, with the same weight on easy and on hard prompts. This recipe is the reference point for
every baseline.

  python -m rlvr_jax.main --config=configs/reinforce.py --workdir=runs/reinforce

Other fields are as in configs/quickstart.py. Card: docs/methods/reinforce.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "reinforce"
  c.loss = "reinforce"
  c.aggregation = "sequence_sum"
  return c
