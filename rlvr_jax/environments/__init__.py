"""Environments answer a policy within a rollout, turn by turn.

Each environment has a factory, which a config names.

`base` has the interface, `dialogues.EnvironmentPool` runs dialogues in worker processes.
"""

from rlvr_jax.environments.base import Environment as Environment
from rlvr_jax.environments.base import Refused as Refused
from rlvr_jax.environments.base import TimedOut as TimedOut
from rlvr_jax.environments.base import Turn as Turn
from rlvr_jax.environments.guess import guess as guess
from rlvr_jax.environments.openenv import openenv as openenv
from rlvr_jax.environments.python import python as python
from rlvr_jax.environments.retry import retry as retry
from rlvr_jax.workers.worker import waiting as waiting

# The environments that a config may name.
__all__ = [
  "guess",
  "openenv",
  "python",
  "retry",
]
