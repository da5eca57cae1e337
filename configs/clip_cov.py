"""Clip-Cov: excludes from the loss a random few of the tokens that reduce the entropy most.

Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
(arXiv:2505.22617). The excluded share is the authors' 2e-4 of the loss tokens; there are four
updates per refresh. Differs from the paper: means, ranks and draws are over the full batch.

  python -m rlvr_jax.main --config=configs/clip_cov.py --workdir=runs/clip_cov

Other fields are as in configs/quickstart.py. Card: docs/methods/covariance.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "clip_cov"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
