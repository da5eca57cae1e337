"""Losses map log-probabilities and coefficients to per-token losses.

Each function in `__all__` makes a loss.
"""

from rlvr_jax.losses.base import Loss as Loss
from rlvr_jax.losses.base import token_loss as token_loss
from rlvr_jax.losses.cispo import cispo as cispo
from rlvr_jax.losses.covariance import clip_cov as clip_cov
from rlvr_jax.losses.covariance import kl_cov as kl_cov
from rlvr_jax.losses.decoupled_ppo import decoupled_ppo as decoupled_ppo
from rlvr_jax.losses.dppo import dppo as dppo
from rlvr_jax.losses.dro import dro as dro
from rlvr_jax.losses.gmpo import gmpo as gmpo
from rlvr_jax.losses.gspo import gspo as gspo
from rlvr_jax.losses.m2po import m2po as m2po
from rlvr_jax.losses.p3o import p3o as p3o
from rlvr_jax.losses.ppo_clip import ppo_clip as ppo_clip
from rlvr_jax.losses.reinforce import reinforce as reinforce
from rlvr_jax.losses.sapo import sapo as sapo
from rlvr_jax.losses.topr import topr as topr
from rlvr_jax.losses.vespo import vespo as vespo

__all__ = [
  "cispo",
  "clip_cov",
  "decoupled_ppo",
  "dppo",
  "dro",
  "gmpo",
  "gspo",
  "kl_cov",
  "m2po",
  "p3o",
  "ppo_clip",
  "reinforce",
  "sapo",
  "topr",
  "vespo",
]
