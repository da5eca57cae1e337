"""The gradient of pass@4 instead of pass@1.

Source: arXiv 2505.15201 and 2508.10751. k = 4 of G = 8, the estimator that is unbiased at finite G;
`--config.advantage="pass_at_k(form='plug_in')"` is the infinite-group form. The loss is the
quickstart's. Look at held-out pass@4 beside pass@1.

  python -m rlvr_jax.main --config=configs/pass_at_k.py --workdir=runs/pass_at_k

What is not set below is the quickstart's. Card: docs/methods/pass_at_k.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "pass_at_k"
  return c
