"""The quickstart with shuffled rewards: a control that shows what is learned without a signal.

The rewards of each batch are permuted over its rollouts, so that they no longer say which answer
was right. Held-out pass@1 must not rise.

  python -m rlvr_jax.main --config=configs/quickstart_control.py --workdir=runs/quickstart_control

Hardware and time are those of configs/quickstart.py. Expected held-out pass@1, start to end: 0.25
to 0.04 (means of seeds 0, 1, 2; experiments/quickstart/README.md).
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.permute_rewards = True
  return c
