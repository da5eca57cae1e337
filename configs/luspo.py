"""LUSPO: GSPO with each response's loss times its length.

Source: "Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length
Variation in RLVR" (arXiv:2602.05261). The clip interval [1 − 2e-3, 1 + 2.5e-3] is the paper's;
there are four updates per refresh. Difference from the paper: responses have 2 to 4 tokens instead
of thousands, so that the mean log ratio varies far more.

  python -m rlvr_jax.main --config=configs/luspo.py --workdir=runs/luspo

Other fields are as in configs/quickstart.py. Card: docs/methods/luspo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "gspo(epsilon_low=2e-3, epsilon_high=2.5e-3)"
  c.aggregation = "sequence_sum"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
