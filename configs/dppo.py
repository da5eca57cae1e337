"""DPPO: masks tokens by the change of their probability, not by their ratio.

Source: "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv:2602.04879). As in the
authors' example, the total variation has the bound 0.15, and the sum of token losses is divided by
a constant. There are four updates per refresh, so that probabilities move. Differences from the
paper: the task, and weights of at most 20 instead of 10⁴.

  python -m rlvr_jax.main --config=configs/dppo.py --workdir=runs/dppo

Other fields are as in configs/quickstart.py. Card: docs/methods/dppo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "dppo"
  c.aggregation = "constant"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
