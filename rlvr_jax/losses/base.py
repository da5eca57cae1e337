"""The interface of policy losses, with shared helpers and metrics.

π is the policy that is trained, β the policy that sampled the tokens, and A the coefficient. The
ratio is ρ = π/β. Arrays [P, G, T] are for P prompts with G responses each, padded to T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops.checks import describe
from rlvr_jax.ops.component_repr import component_repr
from rlvr_jax.ops.masked import for_tokens, masked_fill, mean_metric, token_share, upcast
from rlvr_jax.ops.ratios import log_ratios
from rlvr_jax.types import Array, Metrics, TrainBatch


class Loss(NamedTuple):
  """A policy loss on log-probabilities; it does not depend on the model.

  Attributes:
    per_token: (policy_logprobs f32[P, G, T], batch, coefficients f32[P, G], statistics) → (losses
      f32[P, G, T], metrics). `batch` may be one micro-batch of the full batch. Losses of masked
      tokens are finite but arbitrary; the aggregation drops them. Coefficients are f32[P, G, T] if
      the advantage gives each token its own coefficient, see `Advantage.per_token`.
    statistics: (policy_logprobs, batch, coefficients) of the *full* batch → the `statistics`
      argument of `per_token`, constant for differentiation; None if the loss needs no statistics.
    needs_proximal: whether the batch must contain `proximal_logprobs`.
    of_responses: whether the formula takes one coefficient for a full response; with such a loss,
      coefficients per token are a configuration error.
    ratio_to: the policy in the denominator of the loss's ratio. "old": PPO's old policy, which is
      the sampler unless a correction replaces it with a later policy. "sampler": the formula itself
      accounts for the sampler, so that no correction applies. "none": the loss has no ratio.
  """

  per_token: Callable[[Array, TrainBatch, Array, Any], tuple[Array, Metrics]]
  statistics: Callable[[Array, TrainBatch, Array], Any] | None = None
  needs_proximal: bool = False
  of_responses: bool = False
  ratio_to: str = "sampler"

  def __repr__(self) -> str:
    return component_repr(self)


class Tokens(NamedTuple):
  """The inputs of a loss: a mask, and three arrays in at least float32."""

  policy_logprobs: Array  # f32[P, G, T], nats; 0 where masked
  log_ratios: Array  # f32[P, G, T], log ρ = log π − log β, nats; 0 where masked
  coefficients: Array  # f32[P, G, 1] or f32[P, G, T], constant for differentiation
  mask: Array  # [P, G, T]

  @property
  def ratios(self) -> Array:
    return jnp.exp(self.log_ratios)


def prepare_tokens(policy_logprobs: Array, batch: TrainBatch, coefficients: Array) -> Tokens:
  """The `Tokens` of a batch. Checks the shapes of log-probabilities and coefficients."""
  chex.assert_rank([policy_logprobs, coefficients], [3, {2, 3}])
  chex.assert_equal_shape_prefix([policy_logprobs, coefficients], 2)
  return Tokens(
    policy_logprobs=masked_fill(policy_logprobs, batch.mask),
    log_ratios=log_ratios(policy_logprobs, batch.behavior_logprobs, batch.mask),
    coefficients=jax.lax.stop_gradient(for_tokens(upcast(coefficients))),
    mask=batch.mask,
  )


def proximal_logprobs(name: str, batch: TrainBatch) -> Array:
  """The log-probabilities log π_prox, f32[P, G, T], nats, as a constant.

  π_prox is the policy just before the first update on the batch. With `config.proximal_every` = n
  above 0, a newer policy may replace π_prox before a later update on the batch: the current policy
  becomes π_prox if π_prox was last set at least n updates ago.

  Args:
    name: the name of the loss or correction that needs these log-probabilities.
  Raises:
    ValueError: the batch has no proximal log-probabilities.
  """
  if batch.proximal_logprobs is None:
    raise ValueError(
      f"{name!r} needs batch.proximal_logprobs, f32[P, G, T], but this field is None; set it to the"
      " log-probabilities that the policy has before the first update on the batch"
    )
  return jax.lax.stop_gradient(batch.proximal_logprobs)


def token_loss(function: Callable[[Tokens], tuple[Array, Array | bool]]) -> Loss:
  """Makes a loss that depends only on the tokens' log-probabilities, ratios and coefficients.

  Args:
    function: tokens → (losses f32[P, G, T], clipped [P, G, T] or [P, G, 1], see `clip_metrics`).
  Raises:
    ValueError: at trace time, if the function returns anything else.
  """

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Any = None
  ) -> tuple[Array, Metrics]:
    del statistics
    tokens = prepare_tokens(policy_logprobs, batch, coefficients)
    result = function(tokens)
    _check_result(result, tokens)
    losses, clipped = result
    return losses, clip_metrics(clipped, tokens)

  return Loss(per_token)


def _check_result(result: Any, tokens: Tokens) -> None:
  """Raises ValueError unless `result` has the form (losses, clipped) that `token_loss` requires."""
  P, G, T = tokens.mask.shape
  if isinstance(result, tuple) and len(result) == 2:
    losses, clipped = (jnp.shape(part) for part in result)
    if losses == (P, G, T) and (clipped in ((P, G, T), (P, G, 1)) or result[1] is False):
      return
  raise ValueError(
    f"the function given to token_loss returns {describe(result)}; it must return (losses,"
    " clipped): losses has the shape [P, G, T]; clipped has the shape [P, G, T] or [P, G, 1], or is"
    f" False; here [P, G, T] = {[P, G, T]}"
  )


def clip_metrics(clipped: Array | bool, tokens: Tokens) -> Metrics:
  """Metrics: the share of loss tokens with a clipped or capped ratio.

  The share is computed for all loss tokens, for those with A > 0, and for those with A < 0.

  Args:
    clipped: [P, G, T] or [P, G, 1], 1 where the bound takes effect; False if there is no bound.
  """
  return shares_by_sign("loss/clip_fraction", clipped, tokens.coefficients, tokens.mask)


def shares_by_sign(name: str, marked: Array | bool, coefficients: Array, mask: Array) -> Metrics:
  """Metrics: the share of loss tokens that are marked, overall and by the sign of A.

  The metric over all loss tokens also stores each token's mark, for diagnostics (`types.Mean`).

  Args:
    name: the name of the metric over all tokens; the metrics by sign are called name_positive and
      name_negative.
    marked: [P, G, T] or [P, G, 1], 1 where a token is marked; False: no token can be marked, and no
      marks are kept.
    coefficients: A, f32[P, G, 1] or f32[P, G, T].
    mask: [P, G, T], loss tokens.
  """
  marks = jnp.broadcast_to(marked, mask.shape)
  signs = {"_positive": coefficients > 0, "_negative": coefficients < 0}
  return {
    name: mean_metric(marks, mask) if marked is False else token_share(marks, mask),
    **{f"{name}{suffix}": mean_metric(marks, (mask > 0) & sign) for suffix, sign in signs.items()},
  }


def exp_or_constant(x: Array) -> Array:
  """eˣ, with derivative 0 where eˣ is infinite, since 0 times an infinite derivative is NaN.

  So a token that is dropped from the loss has no gradient, however large its ratio is. If a token
  in the loss has an infinite ratio, the loss is infinite, and the update is skipped and counted.
  """
  is_infinite = jnp.isinf(jnp.exp(jax.lax.stop_gradient(x)))
  return jnp.exp(jnp.where(is_infinite, jax.lax.stop_gradient(x), x))


def score_function(weights: Array | float, tokens: Tokens) -> Array:
  """The loss −sg(w)·A·log π, f32[P, G, T], whose gradient is −w·A·∇log π; sg stops gradients."""
  return -jax.lax.stop_gradient(weights) * tokens.coefficients * tokens.policy_logprobs


def follow(values: Array, terms: Array) -> Array:
  """sg(v) + x − sg(x): an array with the value v at every token and the gradient of the terms x.

  sg stops gradients. Let x be the log-ratios of a response's n tokens, and v their mean. Then
  the exponential of the result is the response's ratio at every token, as in GSPO-token. The sum
  of this exponential over the n tokens has n times the ratio's value and n times the ratio's
  gradient. Dropping a token from the loss drops exactly this token's gradient.

  Args:
    values: f32[P, G, 1], constant for differentiation.
    terms: f32[P, G, T], each token's own contribution.
  Returns:
    f32[P, G, T].
  """
  return jax.lax.stop_gradient(values) + (terms - jax.lax.stop_gradient(terms))
