"""GSPO: a response has one ratio, the geometric mean of its tokens' ratios, which is clipped once.

Source: "Group Sequence Policy Optimization" (arXiv:2507.18071). The clip interval
[1 − 3e-4, 1 + 4e-4] and the 4 updates per refresh are the paper's. Difference from the paper:
responses have 2 to 4 tokens instead of thousands. The mean log ratio of so few tokens varies far
more, so that the same interval clips far more.

  python -m rlvr_jax.main --config=configs/gspo.py --workdir=runs/gspo

Other fields are as in configs/quickstart.py. Card: docs/methods/gspo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "gspo"
  c.aggregation = "sequence_mean"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
