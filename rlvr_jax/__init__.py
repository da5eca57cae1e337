"""Reinforcement learning from verifiable rewards, in JAX, readable end to end."""

__version__ = "0.1.0"
