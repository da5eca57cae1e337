"""SAPO: a soft gate on the ratio instead of a clip.

Source: "Soft Adaptive Policy Optimization" (arXiv:2511.20347). With the paper's temperatures, used
here, the gate closes faster for negative advantages.

  python -m rlvr_jax.main --config=configs/sapo.py --workdir=runs/sapo

Other fields are as in configs/quickstart.py. Card: docs/methods/sapo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "sapo"
  c.aggregation = "sequence_mean"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
