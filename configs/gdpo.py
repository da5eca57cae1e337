"""GDPO: normalizes each of several rewards within the group, then their sum over the batch.

Source: "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL
Optimization" (arXiv:2601.05242). The two rewards are the paper's rewards for mathematics that apply
here: whether the answer is right, and whether it is an integer and nothing else. Differences from
the paper: there is no reward for the form of a thought, since responses here have no thoughts;
answers have at most four bytes, so that their form is learned soon.

  python -m rlvr_jax.main --config=configs/gdpo.py --workdir=runs/gdpo

Other fields are as in configs/quickstart.py. Card: docs/methods/gdpo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "gdpo"
  c.grading.extra = (("pattern(regex='^-?[0-9]+$')", 1.0),)
  c.grading.outcomes.wrong = "score"  # of the sum, which is reported as the reward
  c.grading.outcomes.unparseable = "score"
  return c
