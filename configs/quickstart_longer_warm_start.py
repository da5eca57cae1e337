"""The quickstart's time, spent on a longer warm start instead of reinforcement learning.

The 1024 worked sums are memorized: held-out pass@1 peaks early, near 0.36 at about 350 steps, and
ends below the quickstart's start.

  python -m rlvr_jax.main --config=configs/quickstart_longer_warm_start.py \\
    --workdir=runs/quickstart_longer_warm_start

Hardware and time are those of configs/quickstart.py. Expected held-out pass@1 at the end: 0.20
(mean of seeds 0, 1, 2; experiments/quickstart/README.md).
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.num_updates = 0
  c.warm_start.num_steps = 2200  # about as long as 150 steps and 300 updates take
  return c
