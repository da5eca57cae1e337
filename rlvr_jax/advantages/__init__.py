"""Advantages map rewards [P, G] to coefficients [P, G]; functions in `__all__` make these maps."""

from rlvr_jax.advantages.base import Advantage as Advantage
from rlvr_jax.advantages.base import stateless as stateless
from rlvr_jax.advantages.fade import fade as fade
from rlvr_jax.advantages.gdpo import gdpo as gdpo
from rlvr_jax.advantages.grpo import grpo as grpo
from rlvr_jax.advantages.grpo import grpo_mean as grpo_mean
from rlvr_jax.advantages.log_mean_exp import log_mean_exp as log_mean_exp
from rlvr_jax.advantages.masses import gradient_masses as gradient_masses
from rlvr_jax.advantages.maxrl import maxrl as maxrl
from rlvr_jax.advantages.mt_grpo import mt_grpo as mt_grpo
from rlvr_jax.advantages.opo import opo as opo
from rlvr_jax.advantages.opob import opob as opob
from rlvr_jax.advantages.otb import otb as otb
from rlvr_jax.advantages.pass_at_k import pass_at_k as pass_at_k
from rlvr_jax.advantages.power import asym as asym
from rlvr_jax.advantages.power import power as power
from rlvr_jax.advantages.power import power_asym as power_asym
from rlvr_jax.advantages.reinforce import asymmetric_reinforce as asymmetric_reinforce
from rlvr_jax.advantages.reinforce import reinforce as reinforce
from rlvr_jax.advantages.reinforce import reinforce_signed as reinforce_signed
from rlvr_jax.advantages.reinforce import weighted_reinforce as weighted_reinforce
from rlvr_jax.advantages.reinforce_plus_plus import reinforce_plus_plus as reinforce_plus_plus
from rlvr_jax.advantages.rloo import rloo as rloo

# The estimators that a config may name.
__all__ = [
  "asym",
  "asymmetric_reinforce",
  "fade",
  "gdpo",
  "grpo",
  "grpo_mean",
  "log_mean_exp",
  "maxrl",
  "mt_grpo",
  "opo",
  "opob",
  "otb",
  "pass_at_k",
  "power",
  "power_asym",
  "reinforce",
  "reinforce_plus_plus",
  "reinforce_signed",
  "rloo",
  "weighted_reinforce",
]
