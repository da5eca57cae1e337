"""SALT on DAPO: the same reweighting under token means, a higher clip and dynamic sampling.

Source: arXiv 2606.05800 for SALT, arXiv 2503.14476 for DAPO. What differs from the papers is in
configs/salt_grpo.py and configs/dapo.py.

  python -m rlvr_jax.main --config=configs/salt_dapo.py --workdir=runs/salt_dapo

What is not set below is DAPO's. Card: docs/methods/salt.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import dapo


def get_config() -> ConfigDict:
  c = dapo.get_config()
  c.reweighting = "salt"
  return c
