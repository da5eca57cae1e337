"""On-policy distillation with a score function at each of the student's most probable tokens."""

from __future__ import annotations

from rlvr_jax.distillation.base import Distillation, divergences
from rlvr_jax.ops.divergence import Divergence
from rlvr_jax.types import Array, TrainBatch


def top_k_opd(*, top_k: int = 16) -> Distillation:
  """ℓ = Σ_{v∈S} −sg(w_v·(log τ_v − log π_v))·π_v/sg(π_v), S the student's top k tokens.

  w is π conditioned on S. Its gradient is that of the conditioned KL, plus f·∇log π(S) with
  f = Σ w·(log π − log τ): S as a whole is pushed too.

  Args:
    top_k: k ≥ 1.
  Source: "Rethinking On-Policy Distillation of Large Language Models" (arXiv:2604.13016), authors'
    `compute_distillation_reward`. The scalar Σ w·(log π − log τ) as an advantage of the sampled
    token, as other code has it, has the expected gradient 0 at its place.
  """
  made = Divergence(support="student", top_k=top_k, rest="score")

  def per_token(policy_logprobs: Array, batch: TrainBatch) -> Array:
    del policy_logprobs
    return divergences(batch)

  return Distillation(per_token=per_token, divergence=made)
