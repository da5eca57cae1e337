"""MaxRL: dividing by the solve rate gives the gradient of the log-likelihood of success.

Source: "Maximum Likelihood Reinforcement Learning" (arXiv:2602.02710). Only the advantage changes,
to (r − r̄)/r̄ for a reward r and its mean r̄ over the group; the loss is the quickstart's.

  python -m rlvr_jax.main --config=configs/maxrl.py --workdir=runs/maxrl

Other fields are as in configs/quickstart.py. Card: docs/methods/maxrl.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "maxrl"
  return c
