"""Off-policy sequence masking: drops failures that the policy has become unlikely to sample.

Source: "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models" (arXiv:2512.02556).
The loss is PPO's, with four updates per refresh. Difference from the report: its bound on
the mean of log(β/π) is not published; here it is 0.5 nats per token, as TRL suggests.

  python -m rlvr_jax.main --config=configs/opsm.py --workdir=runs/opsm

Other fields are as in configs/quickstart.py. Card: docs/methods/opsm.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.correction = "opsm"
  c.schedule = "updates_per_refresh(batches=4)"
  return c
