"""On-policy distillation with a score function for each of the student's top k tokens."""

from __future__ import annotations

from rlvr_jax.distillation.base import Distillation, divergences
from rlvr_jax.ops.divergence import Divergence
from rlvr_jax.types import Array, TrainBatch


def top_k_opd(*, top_k: int = 16) -> Distillation:
  """ℓ = Σ_{v∈S} −sg(w_v·(log τ_v − log π_v))·π_v/sg(π_v) over the student's top k tokens S.

  w is π conditioned on S. The gradient of ℓ is the gradient of the KL between π and τ, both
  conditioned on S, plus f·∇log π(S) with f = Σ w·(log π − log τ). This second term changes the
  total probability of S.

  Args:
    top_k: k ≥ 1.
  Source: "Rethinking On-Policy Distillation of Large Language Models" (arXiv:2604.13016), the
    authors' `compute_distillation_reward`. Other code takes the scalar Σ w·(log π − log τ) as the
    advantage of the sampled token. This scalar does not depend on the sampled token, so its
    expected gradient at that token is 0.
  """
  made = Divergence(support="student", top_k=top_k, rest="score")

  def per_token(policy_logprobs: Array, batch: TrainBatch) -> Array:
    del policy_logprobs
    return divergences(batch)

  return Distillation(per_token=per_token, divergence=made)
