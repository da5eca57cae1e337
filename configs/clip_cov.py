"""Clip-Cov: a random share of the tokens that reduce the entropy most is left out.

Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
(arXiv:2505.22617). The authors' share of 2e-4; four updates per refresh. Differs from the paper:
means, ranks and draws are of the full batch.

  python -m rlvr_jax.main --config=configs/clip_cov.py --workdir=runs/clip_cov

What is not set below is the quickstart's. Card: docs/methods/covariance.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "clip_cov"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
