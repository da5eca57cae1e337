"""Dr. GRPO: GRPO without the two divisions that bias it, by the deviation and by the length.

Source: "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783). The
advantage is the reward minus its mean over the group. Token losses are summed over the batch of B
rollouts and divided by the constant B·max_response_length. As in the paper, there is no KL term.

  python -m rlvr_jax.main --config=configs/dr_grpo.py --workdir=runs/dr_grpo

Other fields are as in configs/quickstart.py. Card: docs/methods/dr_grpo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "grpo_mean"
  c.aggregation = "constant"
  return c
