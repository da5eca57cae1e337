"""Off-policy sequence masking: failures that the policy has left are dropped.

Source: "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models" (arXiv:2512.02556).
Around PPO's loss with four updates per refresh. Differs from the report: its bound is not
published, 0.5 nats per token is TRL's suggestion.

  python -m rlvr_jax.main --config=configs/opsm.py --workdir=runs/opsm

What is not set below is the quickstart's. Card: docs/methods/opsm.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.correction = "opsm"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
