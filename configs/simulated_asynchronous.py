"""GRPO with lags as in an asynchronous run, random or replayed, but reproducible bit for bit.

Each batch is sampled by a policy that is 0 to 4 updates old (`max_lag`). To replay the
recorded run in WORKDIR, with the policy version of each token, set
--config.schedule="simulated_asynchronous(recorded='WORKDIR')".

  python -m rlvr_jax.main --config=configs/simulated_asynchronous.py --workdir=runs/simulated

Other fields are as in configs/grpo.py. Guide: docs/staleness.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import grpo


def get_config() -> ConfigDict:
  c = grpo.get_config()
  c.schedule = "simulated_asynchronous"
  return c
