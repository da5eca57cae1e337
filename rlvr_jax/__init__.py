"""Reinforcement learning from verifiable rewards, in JAX, readable end to end."""

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
