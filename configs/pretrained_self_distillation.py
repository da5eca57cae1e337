"""A pretrained language model teaches itself sums: it imitates itself with the solution in view.

Policy and task are those of configs/pretrained.py. The teacher is the policy before the first
update, at half the temperature. It reads "What is 23 + 8? Hint: 23 + 8 = 31. Answer:" before the
same response. A token gains probability if the teacher finds it more probable than the policy
does. The reward is not used.

  python -m rlvr_jax.models.pretrained
  python -m rlvr_jax.main --config=configs/pretrained_self_distillation.py \
    --workdir=runs/self_distillation

Hardware: 2 CPU cores. Results and time: experiments/pretrained/README.md. Card:
docs/methods/opd.md.

Source: self-distillation from a privileged context as in "Self-Distilled Reasoner: On-Policy
Self-Distillation for Large Language Models" (arXiv:2601.18734), with sampled tokens.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import pretrained


def get_config() -> ConfigDict:
  c = pretrained.get_config()
  c.distillation = "opd"
  c.teacher.checkpoint = "initial"
  c.teacher.privileged = "solution"
  c.teacher.prompt = "{question} Hint: {privileged}. Answer:"
  c.teacher.max_prompt_length = 64  # tokens; the longest has 47
  c.teacher.temperature = 0.5
  c.teacher.reward_weight = 0.0
  return c
