"""DPPO: tokens are masked by how far their probability has moved, not by their ratio.

Source: "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv:2602.04879). Total
variation with a bound of 0.15 and the sum over tokens divided by a constant, as in the authors'
example. Four updates per refresh, so that probabilities move. Differs from the paper: the task, and
weights of at most 20, not 10⁴.

  python -m rlvr_jax.main --config=configs/dppo.py --workdir=runs/dppo

What is not set below is the quickstart's. Card: docs/methods/dppo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "dppo"
  c.aggregation = "constant"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
