"""What answers a policy within a rollout, turn by turn. One factory per environment, found by name.

`base` has the interface, `pool.EnvironmentPool` runs dialogues in processes of their own.
"""

from rlvr_jax.environments.base import Environment as Environment
from rlvr_jax.environments.base import Refused as Refused
from rlvr_jax.environments.base import TimedOut as TimedOut
from rlvr_jax.environments.base import Turn as Turn
from rlvr_jax.environments.base import waiting as waiting
from rlvr_jax.environments.guess import guess as guess
from rlvr_jax.environments.openenv import openenv as openenv
from rlvr_jax.environments.python import python as python
from rlvr_jax.environments.retry import retry as retry

# The environments that a config may name.
__all__ = [
  "guess",
  "openenv",
  "python",
  "retry",
]
