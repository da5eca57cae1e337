"""M2PO: the clip interval follows from a budget on the second moment of the log ratio.

Source: "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?"
(arXiv:2510.01161). The budget is the paper's, 0.04. Difference from the paper: here the rollouts of
one refresh serve 16 updates; in the paper rollouts are up to 256 updates old.

  python -m rlvr_jax.main --config=configs/m2po.py --workdir=runs/m2po

Other fields are as in configs/quickstart.py. Card: docs/methods/m2po.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "m2po"
  c.schedule = "updates_per_refresh(batches=16)"
  return c
