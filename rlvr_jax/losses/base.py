"""The interface of policy losses, with shared helpers and metrics."""

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
    per_token: (policy_logprobs f32[P, G, T], batch, coefficients f32[P, G], statistics) →
      (losses f32[P, G, T], metrics). `batch` may be one micro-batch of the full batch. Losses of
      masked tokens are finite but have no meaning; the aggregation drops them. Coefficients are
      f32[P, G, T] where the advantage gives each token its own, see `Advantage.per_token`.
    statistics: (policy_logprobs, batch, coefficients) of the *full* batch → the `statistics`
      argument of `per_token`, constant for differentiation; None if the loss needs none.
    needs_proximal: whether the batch must contain `proximal_logprobs`.
    of_responses: whether the formula is one of a full response, with one coefficient for it; each
      token's own are a configuration error.
    ratio_to: the policy that its ratio is to: "old", PPO's old policy, which is the sampler unless
      a correction puts a later one in its place; "sampler", the sampler by the formula's own
      derivation, so that no correction applies; "none", without a ratio.
  """

  per_token: Callable[[Array, TrainBatch, Array, Any], tuple[Array, Metrics]]
  statistics: Callable[[Array, TrainBatch, Array], Any] | None = None
  needs_proximal: bool = False
  of_responses: bool = False
  ratio_to: str = "sampler"

  def __repr__(self) -> str:
    return component_repr(self)


class Tokens(NamedTuple):
  """A loss's inputs in at least float32, with masked entries set to 0."""

  policy_logprobs: Array  # f32[P, G, T], nats; 0 where masked
  log_ratios: Array  # f32[P, G, T], log ρ = log π − log β, nats; 0 where masked
  coefficients: Array  # f32[P, G, 1] or f32[P, G, T], constant for differentiation
  mask: Array  # [P, G, T]

  @property
  def ratios(self) -> Array:
    return jnp.exp(self.log_ratios)


def prepare_tokens(policy_logprobs: Array, batch: TrainBatch, coefficients: Array) -> Tokens:
  """Checks shapes, casts to at least float32, and sets masked entries to 0."""
  chex.assert_rank([policy_logprobs, coefficients], [3, {2, 3}])
  chex.assert_equal_shape_prefix([policy_logprobs, coefficients], 2)
  return Tokens(
    policy_logprobs=masked_fill(policy_logprobs, batch.mask),
    log_ratios=log_ratios(policy_logprobs, batch.behavior_logprobs, batch.mask),
    coefficients=jax.lax.stop_gradient(for_tokens(upcast(coefficients))),
    mask=batch.mask,
  )


def proximal_logprobs(name: str, batch: TrainBatch) -> Array:
  """log π_prox f32[P, G, T], nats, constant: of the policy when the batch is first trained on.

  Args:
    name: the name of the loss or correction that needs them.
  Raises:
    ValueError: the batch has no proximal log-probabilities.
  """
  if batch.proximal_logprobs is None:
    raise ValueError(
      f"{name!r} needs batch.proximal_logprobs f32[P, G, T], got None; take the policy's"
      " log-probabilities when the batch is first trained on"
    )
  return jax.lax.stop_gradient(batch.proximal_logprobs)


def token_loss(function: Callable[[Tokens], tuple[Array, Array | bool]]) -> Loss:
  """Makes a loss that depends only on the tokens' log-probabilities, ratios and coefficients.

  Args:
    function: tokens → (losses f32[P, G, T], clipped [P, G, T] or [P, G, 1], see `clip_metrics`).
  Raises:
    ValueError: at trace time, the function returns anything else.
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
  """Raises ValueError unless `result` is losses and clipped, as `token_loss` asks for."""
  P, G, T = tokens.mask.shape
  if isinstance(result, tuple) and len(result) == 2:
    losses, clipped = (jnp.shape(part) for part in result)
    if losses == (P, G, T) and (clipped in ((P, G, T), (P, G, 1)) or result[1] is False):
      return
  raise ValueError(
    f"the function of token_loss returns {describe(result)}; it must return (losses [P, G, T],"
    f" clipped [P, G, T] or [P, G, 1], or False), here [P, G, T] = {[P, G, T]}"
  )


def clip_metrics(clipped: Array | bool, tokens: Tokens) -> Metrics:
  """Share of loss tokens whose ratio was clipped or capped: of all, with A > 0, and with A < 0.

  Args:
    clipped: [P, G, T] or [P, G, 1], 1 where the bound takes effect; False: there is no bound.
  """
  return shares_by_sign("loss/clip_fraction", clipped, tokens.coefficients, tokens.mask)


def shares_by_sign(name: str, marked: Array | bool, coefficients: Array, mask: Array) -> Metrics:
  """Share of loss tokens that are marked: of all, with A > 0, and with A < 0.

  The metric of all tokens has the tokens' marks, see `types.Mean`.

  Args:
    name: the name of the metric of all tokens; the others are name_positive and name_negative.
    marked: [P, G, T] or [P, G, 1], 1 where a token counts; False: none ever does, and there are no
      marks.
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
  """eˣ, and where it is infinite a constant: 0 times its derivative there would be NaN.

  So a token that is dropped from the loss has no gradient, however large its ratio; one that stays
  makes the loss infinite, and the update is skipped and counted.
  """
  is_infinite = jnp.isinf(jnp.exp(jax.lax.stop_gradient(x)))
  return jnp.exp(jnp.where(is_infinite, jax.lax.stop_gradient(x), x))


def score_function(weights: Array | float, tokens: Tokens) -> Array:
  """−sg(w)·A·log π, whose gradient is −w·A·∇log π; f32[P, G, T]."""
  return -jax.lax.stop_gradient(weights) * tokens.coefficients * tokens.policy_logprobs


def follow(values: Array, terms: Array) -> Array:
  """`values` at every token, with the gradient of `terms`: sg(v) + (x − sg(x)), sg stops gradients.

  Of the logarithm v of a ratio of the full response, the exponential is the token form: its sum
  over the tokens has the response's value and gradient times the token count, and dropping a token
  from the loss drops exactly that token's gradient.

  Args:
    values: f32[P, G, 1], constant for differentiation.
    terms: f32[P, G, T], each token's own contribution.
  Returns:
    f32[P, G, T].
  """
  return jax.lax.stop_gradient(values) + (terms - jax.lax.stop_gradient(terms))
