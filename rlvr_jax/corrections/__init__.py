"""Weights and masks that correct a loss for a sampler that differs from the trainer."""

from rlvr_jax.corrections.base import Correction as Correction
from rlvr_jax.corrections.base import corrected as corrected
from rlvr_jax.corrections.importance import geometric_rejection as geometric_rejection
from rlvr_jax.corrections.importance import icepop as icepop
from rlvr_jax.corrections.importance import importance as importance
from rlvr_jax.corrections.importance import k3_rejection as k3_rejection
from rlvr_jax.corrections.importance import mis as mis
from rlvr_jax.corrections.importance import sequence_rejection as sequence_rejection
from rlvr_jax.corrections.importance import tis as tis
from rlvr_jax.corrections.none import none as none
from rlvr_jax.corrections.opsm import opsm as opsm
from rlvr_jax.corrections.tv_mask import tv_mask as tv_mask

__all__ = [
  "geometric_rejection",
  "icepop",
  "importance",
  "k3_rejection",
  "mis",
  "none",
  "opsm",
  "sequence_rejection",
  "tis",
  "tv_mask",
]
