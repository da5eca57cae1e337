"""DAPO: a higher upper clip, token mean, dynamic sampling, and a penalty on overlong responses.

Source: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476). The
recipe has all four parts of the paper and overlong filtering, and no KL term. Differences from the
paper: there are 4 updates per refresh instead of 16. Lengths are scaled: an expected length of 4
tokens and a buffer of 1, instead of the paper's 16384 and 4096. The limit is thus 5 tokens, and no
correct answer is penalized. Rewards are 0 and 1 instead of −1 and 1, so that the full penalty of 1
weighs twice as much.

  python -m rlvr_jax.main --config=configs/dapo.py --workdir=runs/dapo

Other fields are as in configs/quickstart.py. Card: docs/methods/dapo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs import quickstart


def get_config() -> ConfigDict:
  c = quickstart.get_config()
  c.loss = "ppo_clip(epsilon_high=0.28)"
  c.schedule = "updates_per_refresh(batches=4)"
  c.dynamic_sampling.enabled = True
  c.max_response_length = 5  # bytes; the quickstart's 4 and the buffer
  c.overlong.buffer = 1  # tokens
  c.overlong.filter = True
  return c
