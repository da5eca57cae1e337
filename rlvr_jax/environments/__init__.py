"""Environments by name: `specs.find_factory("", environments, name)` gives a factory."""

from rlvr_jax.environments.guess import guess

__all__ = ["guess"]
