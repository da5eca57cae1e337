"""No teacher."""

from rlvr_jax.distillation.base import Distillation


def none() -> Distillation:
  """There is no teacher: the update is that of the reward alone."""
  return Distillation()
