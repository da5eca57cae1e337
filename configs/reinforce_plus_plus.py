"""REINFORCE++ with the group's mean as baseline and the batch's deviation as scale.

Source: "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
Normalization" (arXiv:2501.03262), in its variant for groups of rollouts, which the paper uses for
reasoning. The KL to the first policy is a term of the loss with the estimator k2; its coefficient
of 1e-4 is that of the authors' examples. Differences from the paper: groups of 8, and a learning
rate for a small network. Also, the deviation is over the rollouts of the batch, so that a group
with equal rewards has no gradient. The paper's choice is over="tokens", in which long responses
weigh more.

  python -m rlvr_jax.main --config=configs/reinforce_plus_plus.py --workdir=runs/reinforce_plus_plus

Other fields are as in configs/quickstart.py. Card: docs/methods/reinforce_plus_plus.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "reinforce_plus_plus(baseline=True)"
  c.reference.kl_coefficient = 1e-4
  c.reference.estimator = "k2"
  return c
