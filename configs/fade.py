"""FADE: hard prompts weigh more, and failures weigh more once entropy is below a target.

Source: "Don't Let Gains FADE: Breaking Down Policy Gradient Weights in RL" (arXiv:2607.01490). The
target entropy H* is half of the initial entropy, the paper's default. The advantages of failures
are divided by δ = 1 + Ĥ − H*, clipped to [0.3, 1], where Ĥ is a moving average of the entropy. If
the initial entropy is a few tenths of a nat, δ stays near 1 and has little effect, so sweep an
absolute H* (0.25, 0.5, 1.0 nats):

  --config.advantage="fade(target_is_relative=False, target_entropy=0.5)"

Ablations: `fade(alpha_max=1.0)`, `fade(delta_min=1.0)`, `fade(schedule='entropy')` and
`fade(schedule='logarithmic', decay_updates=…)`.

  python -m rlvr_jax.main --config=configs/fade.py --workdir=runs/fade

Other fields are as in configs/quickstart.py. Card: docs/methods/fade.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "fade"
  return c
