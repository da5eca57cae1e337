"""GRPO and distillation together teach a pretrained language model sums.

This combines the teacher of configs/pretrained_self_distillation.py with the reward of
configs/pretrained.py. The advantage of a token is GRPO's advantage of its response plus the
teacher's term for this token.

  python -m rlvr_jax.models.pretrained
  python -m rlvr_jax.main --config=configs/pretrained_distillation.py \
    --workdir=runs/distillation

Hardware: 2 CPU cores. Results and time: experiments/pretrained/README.md. Card:
docs/methods/opd.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import pretrained_self_distillation


def get_config() -> ConfigDict:
  c = pretrained_self_distillation.get_config()
  c.teacher.reward_weight = 1.0
  return c
