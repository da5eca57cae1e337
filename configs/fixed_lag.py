"""GRPO on rollouts that are exactly so many updates old: staleness as an independent variable.

Update t trains on rollouts of the policy after update t − lag; `staleness/mean` and
`staleness/max` are the lag itself from update lag on.

  python -m rlvr_jax.main --config=configs/fixed_lag.py --workdir=runs/fixed_lag

The lag in updates is --config.schedule.kwargs.lag=8.

What is not set below is the recipe's of GRPO. Guide: docs/staleness.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import grpo


def get_config() -> ConfigDict:
  c = grpo.get_config()
  c.schedule = dict(name="fixed_lag", kwargs=dict(lag=4), proximal_every=0)  # updates
  return c
