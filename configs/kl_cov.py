"""KL-Cov: on tokens that reduce the entropy most, a penalty keeps the policy near the sampler.

Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
(arXiv:2505.22617). The share of these tokens is 2e-3, the authors' choice for small models; there
are four updates per refresh. Differs from the paper: means and ranks are over the full batch.

  python -m rlvr_jax.main --config=configs/kl_cov.py --workdir=runs/kl_cov

Other fields are as in configs/quickstart.py. Card: docs/methods/covariance.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "kl_cov(share=2e-3)"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
