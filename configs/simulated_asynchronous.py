"""GRPO with the lags of an asynchronous run, drawn or replayed, and repeated bit for bit.

Each batch is drawn by a policy of 0 to max_lag updates before; a recorded run's own sequence is
replayed by --config.schedule.kwargs.recorded=WORKDIR.

  python -m rlvr_jax.main --config=configs/simulated_asynchronous.py --workdir=runs/simulated

What is not set below is the recipe's of GRPO. Guide: docs/staleness.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import grpo


def get_config() -> ConfigDict:
  c = grpo.get_config()
  c.schedule = dict(
    name="simulated_asynchronous",
    kwargs=dict(max_lag=4, recorded=""),  # updates; the workdir of a run to replay
    proximal_every=0,
  )
  return c
