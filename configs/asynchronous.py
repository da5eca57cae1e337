"""GRPO with generation and optimisation at the same time, the lag bounded.

A thread draws rollouts with the newest policy it was handed while the trainer goes on; it waits
where a batch would become more than max_lag updates old. Not repeatable: which policy draws a
batch depends on the clock. Its lags can be replayed, see configs/simulated_asynchronous.py.

  python -m rlvr_jax.main --config=configs/asynchronous.py --workdir=runs/asynchronous

With several devices, give generation its own: --config.generation_mesh.data=4 and so on. What is
not set below is the recipe's of GRPO. Guide: docs/staleness.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import grpo


def get_config() -> ConfigDict:
  c = grpo.get_config()
  c.schedule = "asynchronous(max_lag=2)"  # updates
  return c
