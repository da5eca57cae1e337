"""GRPO on rollouts that are a fixed number of updates old: staleness as an independent variable.

Update t trains on rollouts of the policy after update t − lag; from update `lag` on,
`staleness/mean` and `staleness/max` equal the lag.

  python -m rlvr_jax.main --config=configs/fixed_lag.py --workdir=runs/fixed_lag

Another lag, in updates: --config.schedule="fixed_lag(lag=8)".

Other fields are as in configs/grpo.py. Guide: docs/staleness.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import grpo


def get_config() -> ConfigDict:
  c = grpo.get_config()
  c.schedule = "fixed_lag(lag=4)"  # updates
  return c
