"""IcePop: masks tokens on which sampler and trainer disagree; weights other tokens by the ratio.

Source: "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
(arXiv:2510.18855). The loss is PPO's. A token is kept if its ratio of trainer to sampler is in the
paper's interval [0.5, 5]. There are four batches per refresh: from the second on, the policy that
first trains on a batch is no longer its sampler. Differs from the paper: no mixture of experts, and
no separate inference engine.

  python -m rlvr_jax.main --config=configs/icepop.py --workdir=runs/icepop

Other fields are as in configs/quickstart.py. Card: docs/methods/mismatch.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.correction = "icepop"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
