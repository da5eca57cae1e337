"""CISPO: importance weights are clipped, tokens are not, so that every token keeps a gradient.

Source: "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention"
(arXiv:2506.13585). No lower bound, as in the paper (ε_low = 1 reaches down to a ratio of 0), token
mean, no KL term. **open**: the paper tunes ε_high and does not give it; here it is 0.2. Differs
from the paper: no dynamic sampling and no length penalty, which are DAPO's.

  python -m rlvr_jax.main --config=configs/cispo.py --workdir=runs/cispo

What is not set below is the quickstart's. Card: docs/methods/cispo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "cispo(epsilon_low=1.0)"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
