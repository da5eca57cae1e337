"""On-policy distillation: the advantage is the teacher's minus the policy's log-probability.

Source: "On-Policy Distillation of Language Models" (arXiv:2306.13649), here with the
log-probabilities of sampled tokens only. The teacher is the policy before the first update, at
temperature 0.5 instead of 1, which makes its answers right more often. The reward is only measured.
To use another run's policy as the teacher, set, say,
--config.teacher.checkpoint=runs/quickstart/checkpoints/300 and --config.teacher.temperature=1.0.

  python -m rlvr_jax.main --config=configs/opd.py --workdir=runs/opd

Other fields are as in configs/quickstart.py. Card: docs/methods/opd.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.distillation = "opd"
  c.teacher.checkpoint = "initial"
  c.teacher.temperature = 0.5
  c.teacher.reward_weight = 0.0
  return c
