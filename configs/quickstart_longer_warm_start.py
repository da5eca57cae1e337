"""The quickstart's time spent on more of its warm start, and none on reinforcement learning.

  python -m rlvr_jax.main --config=configs/quickstart_longer_warm_start.py \\
    --workdir=runs/quickstart_longer_warm_start

TODO
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.num_updates = 0
  c.warm_start.num_steps = 3000
  return c
