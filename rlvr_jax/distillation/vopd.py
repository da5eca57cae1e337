"""On-policy distillation with the divergence at each token as the baseline."""

from __future__ import annotations

import jax

from rlvr_jax.distillation.base import Distillation, divergences, prepare
from rlvr_jax.ops.divergence import Divergence
from rlvr_jax.types import Array, TrainBatch


def vopd(*, top_k: int = 0) -> Distillation:
  """Adds to A_t, at each token t, the term sg(log τ − log π) + sg(KL(π‖τ)), which has mean 0.

  The KL depends on the prefix alone, so the expected gradient equals that of `opd`, at any
  staleness, with less variance.

  Args:
    top_k: if 0, the baseline is the KL of the whole distributions. Otherwise it is the KL of both
      distributions conditioned on the student's top_k tokens.
  Source: vOPD (arXiv:2605.07865), the authors' `opd_trainer.py`, which uses 100 tokens.
  """
  support = "student" if top_k else "all"
  made = Divergence(support=support, top_k=top_k)

  def advantage(policy_logprobs: Array, batch: TrainBatch) -> Array:
    return prepare(policy_logprobs, batch).gap + jax.lax.stop_gradient(divergences(batch))

  return Distillation(advantage=advantage, divergence=made)
