"""DPPO masks tokens by the change of their probability, not by their ratio."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.losses.base import (
  Loss,
  clip_metrics,
  exp_or_constant,
  prepare_tokens,
  proximal_logprobs,
  score_function,
)
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.ops.masked import masked_fill, mean_metric
from rlvr_jax.types import Array, Metrics, TrainBatch

# Divergence → the bound in the authors' examples.
DELTAS = {"tv": 0.15, "kl": 0.05}
TRUNCATION = 20.0  # default truncation of the score form

# The least 1 − p that float32 can represent for p < 1. If float32 rounds p to 1, with log p = 0,
# then 1 − p ≤ 2⁻²⁴. With 1 − p = 0 the divergence from any q < 1 would be infinite, even from the
# largest such q.
_LEAST_REST = 2.0**-24


def binary_divergence(logprobs: Array, anchor_logprobs: Array, *, kind: str) -> Array:
  """The divergence D(p, q) of two Bernoulli distributions: "this token or another token".

  Args:
    logprobs: f32[...], log p, nats; p is the token's probability under the first distribution.
    anchor_logprobs: f32[...], log q, nats; q is the token's probability under the second.
    kind: "tv", |p − q|; or "kl", q·log(q/p) + (1−q)·log((1−q)/(1−p)), nats.
  Returns:
    f32[...], ≥ 0, finite where log p and log q are finite: "kl" replaces 1 − p by
    max(1 − p, 2⁻²⁴).
  """
  log_p, log_q = jnp.minimum(logprobs, 0.0), jnp.minimum(anchor_logprobs, 0.0)
  if kind == "tv":
    return jnp.abs(jnp.exp(log_p) - jnp.exp(log_q))
  others_p, others_q = jnp.maximum(-jnp.expm1(log_p), _LEAST_REST), -jnp.expm1(log_q)
  of_others = jnp.where(others_q > 0, others_q * (jnp.log(others_q) - jnp.log(others_p)), 0.0)
  divergence = jnp.exp(log_q) * (log_q - log_p) + of_others
  return jnp.where(log_p == log_q, 0.0, jnp.maximum(divergence, 0.0))


def dppo(
  *,
  divergence: str = "tv",
  delta_low: float | None = None,
  delta_high: float | None = None,
  truncation: float | None = TRUNCATION,
  form: str = "score",
  anchor: str = "sampler",
  symmetric: bool = False,
  log_ratio_penalty: float = 0.0,
) -> Loss:
  """ℓ = −sg(min(ρ, c))·A·log π, or ℓ = −A·ρ, at kept tokens; ℓ = 0 at dropped tokens.

  ρ = π/β, and sg stops gradients. A token is dropped if its probability has moved too far in the
  direction in which A pushes it: A > 0, p > q and D(p, q) > δ_high, or A < 0, p < q and
  D(p, q) > δ_low. Here p is π's probability of the token, and q is the anchor's. D is the total
  variation or the KL divergence, see `binary_divergence`. The loss is intended for the aggregation
  `constant`.

  Args:
    divergence: D, "tv" or "kl".
    delta_low, delta_high: δ_low and δ_high, above 0; None: 0.15 for tv, 0.05 for kl (nats). With
      `symmetric`, only δ_high is used.
    truncation: c > 0, for the score form; None does not truncate.
    form: "score", the first formula above, or "ratio", the second; where ρ < c, their gradients are
      equal.
    anchor: the policy that gives q: "sampler", β; or "proximal", π_prox as in `decoupled_ppo`.
      ρ is π/β in both cases.
    symmetric: whether a token is dropped wherever D(p, q) > δ_high, whatever the sign of A is and
      in whichever direction the token's probability has moved.
    log_ratio_penalty: λ ≥ 0 adds λ·(log ρ)² to every loss token, also to dropped tokens.
  Source: "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv:2602.04879);
    `symmetric` and the penalty are from prime-rl's `ipo_loss_fn`. **open**: c, which is 20 in
    verl's function, 10⁴ in its example and 10 as the authors' fallback.
  """
  check_choice("dppo", "divergence", divergence, tuple(DELTAS))
  bounds = {"delta_low": delta_low, "delta_high": delta_high}
  for name, value in bounds.items():
    if value is not None:
      check_between("dppo", name, value, low=0.0, open_low=True)
  if truncation is not None:
    check_between("dppo", "truncation", truncation, low=0.0, open_low=True)
  check_choice("dppo", "form", form, ("score", "ratio"))
  check_choice("dppo", "anchor", anchor, ("sampler", "proximal"))
  check_choice("dppo", "symmetric", symmetric, (True, False))
  check_between("dppo", "log_ratio_penalty", log_ratio_penalty, low=0.0)
  if symmetric and delta_low is not None:
    raise ValueError(
      f"dppo: delta_low = {delta_low} has no effect with symmetric = True, where delta_high is the"
      " bound in either direction; leave out delta_low or symmetric"
    )
  if form == "ratio" and truncation not in (None, TRUNCATION):
    raise ValueError(
      f"dppo: truncation = {truncation} has no effect with form = 'ratio', whose ratio is not"
      " truncated; leave out truncation, or set form = 'score'"
    )
  low, high = (DELTAS[divergence] if value is None else value for value in bounds.values())

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Any = None
  ) -> tuple[Array, Metrics]:
    del statistics
    tokens = prepare_tokens(policy_logprobs, batch, coefficients)
    if anchor == "proximal":
      anchor_logprobs = proximal_logprobs("dppo", batch)
    else:
      anchor_logprobs = batch.behavior_logprobs
    log_p = jax.lax.stop_gradient(tokens.policy_logprobs)
    log_q = masked_fill(anchor_logprobs, tokens.mask)
    distance = binary_divergence(log_p, log_q, kind=divergence)
    A = tokens.coefficients
    if symmetric:
      dropped = jnp.broadcast_to(distance > high, log_p.shape)
    else:
      dropped = (A > 0) & (log_p > log_q) & (distance > high)
      dropped |= (A < 0) & (log_p < log_q) & (distance > low)
    if form == "score":
      limit = jnp.inf if truncation is None else truncation
      losses = score_function(jnp.minimum(tokens.ratios, limit), tokens)
    else:
      # 0 times an infinite ratio would be NaN.
      losses = -A * exp_or_constant(jnp.where(A == 0, 0.0, tokens.log_ratios))
    losses = jnp.where(dropped, 0.0, losses)
    if log_ratio_penalty:
      losses += log_ratio_penalty * jnp.square(tokens.log_ratios)
    metrics = clip_metrics(dropped, tokens)
    if form == "score" and truncation is not None:
      truncated = ~dropped & (tokens.ratios > truncation)
      metrics["loss/weight_capped"] = mean_metric(truncated, tokens.mask)
    return losses, metrics

  return Loss(per_token, needs_proximal=anchor == "proximal")
