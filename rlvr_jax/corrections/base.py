"""The interface of corrections, and the function that applies a correction to a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, proximal_logprobs, shares_by_sign
from rlvr_jax.ops.component_repr import component_repr
from rlvr_jax.ops.masked import for_tokens, mean_metric, upcast
from rlvr_jax.ops.ratios import effective_sample_size, log_ratios
from rlvr_jax.types import Array, Metrics, TrainBatch

# The bound on |log κ| of a token and of a response, nats, as in verl; e²⁰ is finite in float32.
LOG_BOUND = 20.0


class Mismatch(NamedTuple):
  """The inputs of a correction, without gradients and in at least float32."""

  log_weights: Array  # f32[P, G, T], log κ (see `Correction`), nats, within ±20; 0 where masked
  log_ratios: Array  # f32[P, G, T], log ρ = log π − log β, nats; 0 where masked
  coefficients: Array  # f32[P, G, 1] or f32[P, G, T]
  mask: Array  # [P, G, T]


class Correction(NamedTuple):
  """Weights and masks that correct for the sampler's difference from the policy being trained.

  The ratio κ has the sampler β in its denominator. With three policies, κ = π_prox/β, with π_prox
  as in `losses.decoupled_ppo`. With two policies, κ = π/β.

  Attributes:
    apply: (mismatch, statistics) → (weights, kept, capped), each [P, G, T] or [P, G, 1]. `weights`
      are factors of a token's loss. `kept` says whether the token stays in the loss; the constant
      True keeps all tokens. `capped` says whether a bound has changed the weight. `apply` is None
      if nothing is corrected.
    statistics: mismatch of the *full* batch → the `statistics` argument of `apply`; None if `apply`
      needs none.
    weighs: whether weights may differ from 1. A loss whose ratio already has β in the denominator
      needs no weights.
    policies: the number of policies, 3 or 2, see above.
  """

  apply: Callable[[Mismatch, Any], tuple[Array, Array | bool, Array]] | None
  statistics: Callable[[Mismatch], Any] | None = None
  weighs: bool = True
  policies: int = 3

  def __repr__(self) -> str:
    return component_repr(self)


def corrected(loss: Loss, correction: Correction) -> Loss:
  """`loss`, corrected: each token's loss is multiplied by a weight, or the token is dropped.

  With three policies, a loss with PPO's ratio gets the ratio π/π_prox, and κ = π_prox/β. With two
  policies, a loss with PPO's ratio keeps the ratio π/β, and κ = π/β. A loss without a ratio always
  gets κ = π/β. A dropped token has the loss 0, but still counts in the denominator of the
  aggregation.

  Raises:
    ValueError: the loss already corrects for the sampler; or, with two policies, the ratio of the
      loss does so, and the correction has weights.
  """
  apply = correction.apply
  if apply is None:
    return loss
  if loss.ratio_to == "sampler":
    raise ValueError(
      "the loss already accounts for the sampler, and a correction would do so a second time; set"
      " correction = 'none', or choose a loss with PPO's ratio (ppo_clip, cispo, gspo, gmpo, sapo,"
      " clip_cov, kl_cov) or a loss without a ratio (reinforce without truncation); if the loss is"
      " your own, set its field ratio_to to 'old' or 'none'"
    )
  three = loss.ratio_to == "old" and correction.policies == 3
  if loss.ratio_to == "old" and not three and correction.weighs:
    raise ValueError(
      "with policies = 2 the ratio of the loss already corrects for the sampler, and weights would"
      " do so a second time; let the correction only reject (level = 'none' in importance, weight ="
      " 'none' in other corrections), set policies = 3, or choose loss = 'reinforce'"
    )

  def of_old_policy(batch: TrainBatch) -> TrainBatch:
    """The batch; if κ = π_prox/β, the log-probabilities of π_prox replace those of β."""
    if not three:
      return batch
    return dataclasses.replace(batch, behavior_logprobs=proximal_logprobs("correction", batch))

  def mismatch(policy_logprobs: Array, batch: TrainBatch, coefficients: Array) -> Mismatch:
    policy_logprobs = jax.lax.stop_gradient(policy_logprobs)
    numerator = of_old_policy(batch).behavior_logprobs if three else policy_logprobs
    log_kappa = log_ratios(numerator, batch.behavior_logprobs, batch.mask)
    return Mismatch(
      jnp.clip(log_kappa, -LOG_BOUND, LOG_BOUND),
      log_ratios(policy_logprobs, batch.behavior_logprobs, batch.mask),
      jax.lax.stop_gradient(for_tokens(upcast(coefficients))),
      batch.mask,
    )

  def statistics(policy_logprobs: Array, batch: TrainBatch, coefficients: Array) -> Any:
    of_loss = loss.statistics and loss.statistics(
      policy_logprobs, of_old_policy(batch), coefficients
    )
    of_correction = correction.statistics and correction.statistics(
      mismatch(policy_logprobs, batch, coefficients)
    )
    return of_loss, of_correction

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Any
  ) -> tuple[Array, Metrics]:
    of_loss, of_correction = statistics or (None, None)
    losses, metrics = loss.per_token(policy_logprobs, of_old_policy(batch), coefficients, of_loss)
    seen = mismatch(policy_logprobs, batch, coefficients)
    shaped = lambda x: jnp.broadcast_to(x, seen.mask.shape)
    weights, kept, capped = apply(seen, of_correction)
    weights, capped = jax.lax.stop_gradient(shaped(weights)), shaped(capped)
    more = _correction_metrics(weights, kept, capped, seen)
    return jnp.where(kept, weights * losses, 0.0), {**metrics, **more}

  needs_statistics = loss.statistics is not None or correction.statistics is not None
  return loss._replace(
    per_token=per_token,
    statistics=statistics if needs_statistics else None,
    needs_proximal=three or loss.needs_proximal,
    ratio_to="sampler",
  )


def _correction_metrics(
  weights: Array, kept: Array | bool, capped: Array, seen: Mismatch
) -> Metrics:
  """Metrics of a correction: shares of dropped and capped tokens, and statistics of the weights.

  The share of dropped tokens is also reported by the sign of A. The statistics are the mean and the
  effective sample size.
  """
  kept_mask = jnp.where(kept, seen.mask, 0)
  dropped = False if kept is True else jnp.logical_not(kept)
  return {
    **shares_by_sign("correction/dropped", dropped, seen.coefficients, seen.mask),
    "correction/capped": mean_metric(capped, kept_mask),
    "correction/weight_mean": mean_metric(weights, kept_mask),
    "correction/ess": effective_sample_size(weights, kept_mask),
  }
