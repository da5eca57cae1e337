"""Distillation by whole distributions: the loss is a divergence at every token of the response."""

from __future__ import annotations

from rlvr_jax.distillation.base import Distillation, divergences
from rlvr_jax.ops.divergence import Divergence
from rlvr_jax.types import Array, TrainBatch


def kl(
  *,
  alpha: float = 1.0,
  support: str = "all",
  top_k: int = 0,
  rest: str = "renormalize",
  floor: float | None = None,
) -> Distillation:
  """ℓ = KL(π‖τ) (α = 1), KL(τ‖π) (α = 0) or their mixture, at each token of the response.

  After each prefix of a sampled response, the loss compares π and τ at all possible next tokens,
  not only at the sampled token. With `top_k`, it compares them at the tokens of the support. A
  token's effect on later tokens has no gradient. No array of the vocabulary's size is kept: the
  head is computed in chunks, for student and teacher together.

  Args:
    alpha, support, top_k, rest, floor: see `ops.divergence.Divergence`.
  Source: "On-Policy Distillation of Language Models" (arXiv:2306.13649). SDPO (arXiv:2601.20802)
    uses support = "student", top_k = 100 and rest = "tail". OPSD (arXiv:2601.18734) uses α = 0.5.
    verl uses support = "teacher", top_k = 32, rest = "drop" and floor = 0.
  """
  made = Divergence(alpha=alpha, support=support, top_k=top_k, rest=rest, floor=floor)

  def per_token(policy_logprobs: Array, batch: TrainBatch) -> Array:
    del policy_logprobs
    return divergences(batch)

  return Distillation(per_token=per_token, divergence=made)
