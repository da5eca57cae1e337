"""VESPO: a smooth weight as a function of the full response's ratio, narrower for failures.

Source: "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM
Training" (arXiv:2602.10693). A response whose ratio is W has the weight W^k·exp(λ(1 − W)), with the
authors' k and λ. There are four updates per refresh. Difference from the paper: responses have 2 to
4 tokens instead of thousands.

  python -m rlvr_jax.main --config=configs/vespo.py --workdir=runs/vespo

Other fields are as in configs/quickstart.py. Card: docs/methods/vespo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "vespo"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
