"""CISPO: clips importance weights instead of tokens, so that every token keeps a gradient.

Source: "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention"
(arXiv:2506.13585). As in the paper, there is no lower bound (ε_low = 1 allows ratios down to 0) and
no KL term, and the loss is a token mean. **open**: the paper tunes ε_high but does not state its
value; here ε_high is 0.2. Difference from the paper: DAPO's dynamic sampling and length penalty are
left out.

  python -m rlvr_jax.main --config=configs/cispo.py --workdir=runs/cispo

Other fields are as in configs/quickstart.py. Card: docs/methods/cispo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "cispo(epsilon_low=1.0)"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
