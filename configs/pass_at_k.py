"""The gradient of pass@4 instead of pass@1.

Source: "Pass@K Policy Optimization: Solving Harder Reinforcement Learning Problems"
(arXiv:2505.15201) and "Pass@k Training for Adaptively Balancing Exploration and Exploitation of
Large Reasoning Models" (arXiv:2508.10751). Here k = 4 and a group has G = 8 rollouts. The estimator
is unbiased at finite G up to a factor; `--config.advantage="pass_at_k(form='plug_in')"` is its
limit for infinite groups. The loss is the quickstart's. Compare held-out pass@4 with pass@1.

  python -m rlvr_jax.main --config=configs/pass_at_k.py --workdir=runs/pass_at_k

Other fields are as in configs/quickstart.py. Card: docs/methods/pass_at_k.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "pass_at_k"
  return c
