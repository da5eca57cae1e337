"""The interface of distillation, with shared helpers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax

from rlvr_jax.ops.component_repr import component_repr
from rlvr_jax.ops.divergence import Divergence
from rlvr_jax.ops.masked import masked_fill
from rlvr_jax.ops.ratios import log_ratios
from rlvr_jax.types import Array, TrainBatch


class Distillation(NamedTuple):
  """The terms that a teacher adds to an update; τ is the teacher's distribution, a constant.

  Attributes:
    advantage: (policy_logprobs f32[P, G, T], batch) → a term f32[P, G, T], nats, constant for
      differentiation. The update adds λ times the term to each token's coefficient (its advantage
      after reweighting), whatever the loss; λ is `config.teacher.weight`. None: no term.
    per_token: (policy_logprobs, batch) → losses f32[P, G, T], nats. The update adds λ times these
      losses to the tokens' policy-gradient losses. None: no losses. The results of `advantage` and
      of `per_token` are 0 where `batch.mask` is 0.
    divergence: the divergence between the whole distributions. The forward pass computes it at each
      token position, as the batch's `teacher_divergence`. None: only log-probabilities of sampled
      tokens are needed.
  """

  advantage: Callable[[Array, TrainBatch], Array] | None = None
  per_token: Callable[[Array, TrainBatch], Array] | None = None
  divergence: Divergence | None = None

  @property
  def distills(self) -> bool:
    """Whether a teacher adds a term to the advantage or the loss."""
    return self.advantage is not None or self.per_token is not None

  def __repr__(self) -> str:
    return component_repr(self)


class Tokens(NamedTuple):
  """Log-probabilities under three policies, [P, G, T], at least float32, nats; 0 if mask is 0."""

  policy: Array  # log π
  behavior: Array  # log β, constant for differentiation
  teacher: Array  # log τ, constant for differentiation
  mask: Array

  @property
  def log_ratios(self) -> Array:
    """The log ratios log ρ = log π − log β."""
    return log_ratios(self.policy, self.behavior, self.mask)

  @property
  def gap(self) -> Array:
    """The gap g = log τ − log π, constant for differentiation."""
    return jax.lax.stop_gradient(self.teacher - self.policy)


def prepare(policy_logprobs: Array, batch: TrainBatch) -> Tokens:
  """Log-probabilities under the policy, the sampler and the teacher, set to 0 where the mask is 0.

  Raises:
    ValueError: the batch has no teacher's log-probabilities.
  """
  chex.assert_rank(policy_logprobs, 3)
  if batch.teacher_logprobs is None:
    raise ValueError(
      "distillation needs batch.teacher_logprobs f32[P, G, T], got None; set it to the teacher's"
      " log-probabilities of the batch's tokens"
    )
  fill = lambda x: masked_fill(x, batch.mask)
  behavior, teacher = fill(batch.behavior_logprobs), fill(batch.teacher_logprobs)
  return Tokens(fill(policy_logprobs), *jax.lax.stop_gradient((behavior, teacher)), mask=batch.mask)


def divergences(batch: TrainBatch) -> Array:
  """The divergence at each token position, f32[P, G, T], nats; 0 where the mask is 0.

  Raises:
    ValueError: the batch has no divergences.
  """
  if batch.teacher_divergence is None:
    raise ValueError(
      "distillation by whole distributions needs batch.teacher_divergence f32[P, G, T], got None;"
      " compute it from the student's and the teacher's logits, see ops.divergence"
    )
  return masked_fill(batch.teacher_divergence, batch.mask)
