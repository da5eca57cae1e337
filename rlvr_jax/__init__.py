"""Reinforcement learning from verifiable rewards, in JAX, readable end to end."""

import sys

__all__ = [
  "advantages",
  "data",
  "evaluate",
  "geometry",
  "losses",
  "models",
  "ops",
  "parts",
  "reweighting",
  "rewards",
  "rollouts",
  "train",
]
__version__ = "0.1.0"

# Tests of programs have long integers, in data and in messages between processes: as many digits as
# codejudge allows.
if 0 < sys.get_int_max_str_digits() < 50_000:
  sys.set_int_max_str_digits(50_000)
