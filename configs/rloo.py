"""RLOO: REINFORCE with the mean reward of the other rollouts as baseline.

Source: "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
LLMs" (arXiv:2402.14740). The response is one action: its token losses are summed, and there is no
ratio and no clip. Differences from the paper: the reward, which is verified here and not learned,
has no KL penalty; groups have 8 rollouts instead of 2 or 4.

  python -m rlvr_jax.main --config=configs/rloo.py --workdir=runs/rloo

Other fields are as in configs/quickstart.py. Card: docs/methods/rloo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "rloo"
  c.loss = "reinforce"
  c.aggregation = "sequence_sum"
  return c
