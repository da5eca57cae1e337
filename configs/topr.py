"""TOPR: off-policy REINFORCE that tapers only failures, by the ratio of the complete response.

Source: "Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs"
(arXiv:2503.14286). Rewards are ±1 without a baseline, and token losses are summed over the
response. Difference from the paper: there are 4 updates per refresh, whereas the paper collects a
data set per iteration.

  python -m rlvr_jax.main --config=configs/topr.py --workdir=runs/topr

Other fields are as in configs/quickstart.py. Card: docs/methods/topr.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "reinforce_signed"
  c.loss = "topr"
  c.aggregation = "sequence_sum"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
