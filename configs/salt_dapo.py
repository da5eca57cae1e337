"""SALT on DAPO: salt_grpo's reweighting with token means, a higher clip and dynamic sampling.

Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make Them
Matter" (arXiv:2606.05800) and "DAPO: An Open-Source LLM Reinforcement Learning System at Scale"
(arXiv:2503.14476). The differences from the papers are listed in configs/salt_grpo.py and
configs/dapo.py.

  python -m rlvr_jax.main --config=configs/salt_dapo.py --workdir=runs/salt_dapo

Other fields are as in configs/dapo.py. Card: docs/methods/salt.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import dapo


def get_config() -> ConfigDict:
  c = dapo.get_config()
  c.reweighting = "salt"
  return c
