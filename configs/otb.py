"""OTB: a baseline for each token position, chosen to minimize the gradient's variance.

Source: "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL" (arXiv:2602.07078).
In the baseline, a rollout's weight is its energy: squared gradient norms, summed up to the token.
There is one update per refresh, so that the policy itself has sampled the rollouts and the energies
need no importance weights. Difference from the paper: responses have only 2 to 4 tokens to sum
over.

  python -m rlvr_jax.main --config=configs/otb.py --workdir=runs/otb

Other fields are as in configs/quickstart.py. Card: docs/methods/otb.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "otb"
  return c
