"""OTB: a baseline of least variance for each position of a response.

Source: "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL" (arXiv:2602.07078).
One update per refresh, so that the rollouts are the policy's own and the energies have no weights.
Differs from the paper: responses of 2 to 4 tokens, over which energies hardly add up.

  python -m rlvr_jax.main --config=configs/otb.py --workdir=runs/otb

What is not set below is the quickstart's. Card: docs/methods/otb.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "otb"
  return c
