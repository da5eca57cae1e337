"""Reweightings map coefficients and a Gram matrix to coefficients.

Each function in `__all__` makes a reweighting.
"""

from rlvr_jax.reweighting.base import Reweighting as Reweighting
from rlvr_jax.reweighting.none import none as none
from rlvr_jax.reweighting.salt import salt as salt

__all__ = ["none", "salt"]
