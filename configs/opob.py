"""VCPO: truncated importance weights, and an off-policy baseline to minimize gradient variance.

Source: "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs" (arXiv:2602.17616). As in
the authors' runs, there is no clip; importance weights of full responses are at most 8; the
advantage is divided by the group's deviation; and the loss is a mean over each response and then
over responses. There are four updates per refresh. Differences from the paper: gradient norms are
those of the output head, and the learning rate has no factor √(ESS/B), with the effective sample
size ESS of the B rollouts.

  python -m rlvr_jax.main --config=configs/opob.py --workdir=runs/opob

Other fields are as in configs/quickstart.py. Card: docs/methods/opob.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.advantage = "opob(by_deviation=True)"
  c.loss = "reinforce"
  c.correction = "importance(level='sequence', high=8.0, policies=2)"
  c.aggregation = "sequence_mean"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
