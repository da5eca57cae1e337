"""x"""

from ml_collections import ConfigDict

from rlvr_jax.configs import pretrained


def get_config() -> ConfigDict:
  c = pretrained.get_config()
  c.distillation = "opd"
  c.teacher.checkpoint = "initial"
  c.teacher.privileged = "solution"
  c.teacher.prompt = "{question} ({privileged})"
  c.teacher.max_prompt_length = 64
  return c
