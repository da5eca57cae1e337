"""IcePop: tokens where sampler and trainer disagree are masked, the others weighted by the ratio.

Source: "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
(arXiv:2510.18855). The paper's interval of 0.5 and 5, around PPO's loss. Four batches per refresh,
so that the policy which first trains on a batch differs from the one that sampled it. Differs from
the paper: no mixture of experts, and no engine of its own that samples.

  python -m rlvr_jax.main --config=configs/icepop.py --workdir=runs/icepop

What is not set below is the quickstart's. Card: docs/methods/mismatch.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.correction = "icepop"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
