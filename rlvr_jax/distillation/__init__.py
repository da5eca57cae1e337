"""Distillation: terms that a teacher's distribution adds to the advantages or to the loss."""

from rlvr_jax.distillation.base import Distillation as Distillation
from rlvr_jax.distillation.estimate import kl_estimate as kl_estimate
from rlvr_jax.distillation.iw_opd import iw_opd as iw_opd
from rlvr_jax.distillation.kl import kl as kl
from rlvr_jax.distillation.none import none as none
from rlvr_jax.distillation.opd import opd as opd
from rlvr_jax.distillation.opd_ratio import opd_ratio as opd_ratio
from rlvr_jax.distillation.opd_score import opd_score as opd_score
from rlvr_jax.distillation.top_k_opd import top_k_opd as top_k_opd
from rlvr_jax.distillation.vopd import vopd as vopd

__all__ = [
  "iw_opd",
  "kl",
  "kl_estimate",
  "none",
  "opd",
  "opd_ratio",
  "opd_score",
  "top_k_opd",
  "vopd",
]
