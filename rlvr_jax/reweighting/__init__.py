"""Reweightings map coefficients and a Gram matrix to coefficients. `__all__` names factories."""

from rlvr_jax.reweighting.base import Reweighting as Reweighting
from rlvr_jax.reweighting.none import none as none
from rlvr_jax.reweighting.salt import salt as salt

__all__ = ["none", "salt"]
