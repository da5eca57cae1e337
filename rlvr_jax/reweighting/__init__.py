"""Coefficients + Gram matrix → coefficients. One factory per rule, looked up here by name."""

from rlvr_jax.reweighting.base import Reweighting as Reweighting
from rlvr_jax.reweighting.none import none as none

__all__ = ["none"]
