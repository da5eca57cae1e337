"""GRPO with generation and optimization at the same time, and a bounded lag.

A thread samples rollouts with the newest policy that it has received, while the trainer continues.
The thread waits if a batch would become more than max_lag updates old. A run is not reproducible,
since timing decides which policy samples a batch. The lags of a run can be replayed, see
configs/simulated_asynchronous.py.

  python -m rlvr_jax.main --config=configs/asynchronous.py --workdir=runs/asynchronous

With several devices, generation can have devices of its own, such as four with
--config.generation_mesh.data=4.
Other fields are as in configs/grpo.py. Guide: docs/staleness.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import grpo


def get_config() -> ConfigDict:
  c = grpo.get_config()
  c.schedule = "asynchronous(max_lag=2)"  # updates
  return c
