"""A teacher's terms in the advantages, the losses and the metrics."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.ops import kl
from rlvr_jax.ops.logprobs import Taught, TeacherHead
from rlvr_jax.ops.masked import for_tokens, mean_metric
from rlvr_jax.types import Array, Metrics, Rows, TrainBatch


class Teaching(NamedTuple):
  """The settings of a teacher's part in an update.

  Attributes:
    distillation: see `distillation.Distillation`.
    weight: λ ≥ 0, the weight of distillation; 0: the teacher enters only metrics, and
      `reward_weight` counts as 1.
    reward_weight: w ≥ 0, the weight of the reward's advantages or losses; 0: distillation alone.
    temperature: the temperature of the teacher's distribution.
    names: the names of the teachers.
    model: the teacher's model, if its forward pass is a part of the update; None if the teacher's
      scores are computed before the update.
  """

  distillation: Any
  weight: float
  reward_weight: float
  temperature: float
  names: tuple[str, ...]
  model: Any = None

  def coefficients(self, logprobs: Array, batch: TrainBatch, coefficients: Array) -> Array:
    """The coefficients w·A + λ·g, f32[P, G, T], if λ > 0 and the teacher gives terms g; else A.

    Args:
      logprobs: f32[P, G, T], log π.
      coefficients: A, f32[P, G] or f32[P, G, T].
    """
    added = self.distillation.advantage
    if added is None or not self.weight:
      return coefficients
    of_teacher = self.weight * added(jax.lax.stop_gradient(logprobs), batch)
    return self.reward_weight * for_tokens(coefficients) + of_teacher

  def losses(self, logprobs: Array, batch: TrainBatch, losses: Array) -> Array:
    """The losses w·ℓ + λ·ℓ_τ, f32[P, G, T], if λ > 0 and the teacher gives losses ℓ_τ; else ℓ."""
    per_token = self.distillation.per_token
    if per_token is None or not self.weight:
      return losses
    of_teacher = self.weight * per_token(logprobs, batch)
    # 0 times a loss that is not finite would be NaN.
    return self.reward_weight * losses + of_teacher if self.reward_weight else of_teacher

  def forward(self, teacher: Any, tokens: Array, rows: Rows) -> TeacherHead | None:
    """The teacher's results for rows of a micro-batch; None if this pass does not need them.

    Args:
      teacher: the teacher's (trained, frozen) parameters; None if this pass makes no comparison.
      tokens, rows: i32[R, L], see `Packed`.
    """
    if self.distillation.divergence is None or teacher is None:
      return None
    params = self.model.combine(*jax.lax.stop_gradient(teacher))
    if self.model.config.num_experts:
      hidden, *_ = self.model.row_routed(params, tokens, rows, None)
    else:
      hidden = self.model.row_hidden(params, tokens, rows)
    head = self.model.head(params)
    return TeacherHead(hidden, head, self.temperature, self.distillation.divergence)

  def metrics(self, logprobs: Array, batch: TrainBatch) -> Metrics:
    """Metrics over the loss tokens, in nats: estimates of KL(π‖τ), and the teacher's entropy."""
    mask, teacher, entropy = batch.mask, batch.teacher_logprobs, batch.teacher_entropy
    assert teacher is not None and entropy is not None, "the batch has no teacher's scores"
    values = {
      "kl_k1": kl.k1(logprobs, teacher, mask),
      "kl_k3": kl.k3(logprobs, teacher, mask),
      "entropy": entropy,
    }
    if batch.teacher_divergence is not None:
      values["divergence"] = batch.teacher_divergence
    metrics: Metrics = {f"teacher/{name}": mean_metric(x, mask) for name, x in values.items()}
    for number, teacher_name in enumerate(self.names if len(self.names) > 1 else ()):
      tokens = (mask > 0) & (jnp.asarray(batch.teachers) == number)[:, None, None]
      metrics[f"teacher/{teacher_name}/token_share"] = mean_metric(tokens, mask)
      for name, x in values.items():
        metrics[f"teacher/{teacher_name}/{name}"] = mean_metric(x, tokens)
    return metrics


def add_taught(batch: TrainBatch, taught: Taught | None) -> TrainBatch:
  """The batch, with the teacher's values if the update's forward pass has computed them."""
  if taught is None:
    return batch
  logprobs, entropy = jax.lax.stop_gradient((taught.logprobs, taught.entropy))
  return dataclasses.replace(
    batch,
    teacher_logprobs=logprobs,
    teacher_entropy=entropy,
    teacher_divergence=taught.divergence,
  )
