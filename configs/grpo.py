"""GRPO as published: clipped ratios, group-normalized rewards, KL to the first policy.

Source: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models"
(arXiv:2402.03300). There is one update per refresh, as in the paper, so that no ratio reaches a
bound of the clip interval. Losses are averaged over each response, then over responses (the 1/|o|
of the paper). Most later recipes omit the KL term. Here it is kept, with β = 0.04 and the estimator
k3, since other recipes are compared with this one. Differs from the paper in scale only: groups of
8 instead of 64, and a learning rate for a small network.

  python -m rlvr_jax.main --config=configs/grpo.py --workdir=runs/grpo

Other fields are as in configs/quickstart.py. Card: docs/methods/grpo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.aggregation = "sequence_mean"
  c.reference.kl_coefficient = 0.04
  return c
