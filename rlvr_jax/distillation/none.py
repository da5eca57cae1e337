"""Training without a teacher."""

from rlvr_jax.distillation.base import Distillation


def none() -> Distillation:
  """No teacher: the reward alone decides the update."""
  return Distillation()
