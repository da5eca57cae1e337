"""GRPO with the lags of an asynchronous run, drawn or replayed, and repeated bit for bit.

Each batch is drawn by a policy of 0 to 4 updates before (`max_lag`). A recorded run's own sequence
is replayed by --config.schedule="simulated_asynchronous(recorded='WORKDIR')".

  python -m rlvr_jax.main --config=configs/simulated_asynchronous.py --workdir=runs/simulated

What is not set below is the recipe's of GRPO. Guide: docs/staleness.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import grpo


def get_config() -> ConfigDict:
  c = grpo.get_config()
  c.schedule = "simulated_asynchronous"
  return c
