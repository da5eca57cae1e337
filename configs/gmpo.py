"""GMPO: the geometric mean of a response's token ratios, each of which is clipped first.

Source: "Geometric-Mean Policy Optimization" (arXiv:2507.20673). The clip interval [e^−0.4, e^0.4]
is the paper's. It is far wider than GRPO's, because a single token hardly changes a geometric mean.

  python -m rlvr_jax.main --config=configs/gmpo.py --workdir=runs/gmpo

Other fields are as in configs/quickstart.py. Card: docs/methods/gmpo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "gmpo"
  c.aggregation = "sequence_mean"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
