"""P3O: the batch's effective sample size caps the weights, and scales a KL term between π and β."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, clip_metrics, prepare_tokens, score_function
from rlvr_jax.ops import kl
from rlvr_jax.ops.checks import check_choice, check_integer
from rlvr_jax.ops.masked import mean_metric
from rlvr_jax.ops.ratios import log_ratios, normalized_ess
from rlvr_jax.types import Array, Metrics, TrainBatch

# The authors clip log(β/π) to ± this bound inside the exponential of k3; nats.
K3_LOG_RATIO_BOUND = 10.0


def p3o(
  *,
  ess: str = "batch",
  ess_scope: str | int = "batch",
  cap: str = "ess",
  kl_term: bool = True,
) -> Loss:
  """ℓ = −sg(min(ρ, e))·A·log π + (1 − e)·k3.

  Here ρ = π/β, sg stops gradients, e is the normalized effective sample size of the batch's token
  ratios, and k3 = log π − log β + exp(clip(log β − log π, −10, 10)) − 1. On samples of β, k3 is not
  an unbiased estimate of KL(π‖β). The method has no clip range, no snapshot of the policy and no
  coefficient to choose. The loss is intended for the aggregation `token_mean`. A ratio that is not
  finite makes the loss NaN, so that the update is skipped.

  These arguments give the paper's ablations: `kl_term=False` (cap only), `cap="none"` (KL only),
  `ess="sequence"` (ESS per sequence), `ess="one"` (e fixed at 1), `cap="inverse_ess"` (cap 1/e).

  Args:
    ess: the set over which e is computed: "batch" (global) or "sequence" (each response); "one"
      sets e = 1.
    ess_scope: the rollouts that share one e if ess="batch": "batch" for all rollouts of the update,
      or the size of a block of consecutive rollouts, which must divide the batch. With blocks, a
      few large ratios lower e only in their own block. In the authors' code a block has the
      16 rollouts of one micro-batch on all ranks.
    cap: the weight is min(ρ, e) for "ess", min(ρ, 1/e) for "inverse_ess", ρ for "none".
    kl_term: whether (1 − e)·k3 is added.
  Source: "Trust the Batch, On- or Off-Policy: Adaptive Policy Optimization for RL Post-Training"
    (arXiv:2605.12380) and the authors' code.
  """
  check_choice("p3o", "ess", ess, ("batch", "sequence", "one"))
  if ess_scope != "batch":
    check_integer("p3o", "ess_scope", ess_scope, low=1)  # type: ignore[arg-type]
    if ess != "batch":
      raise ValueError(
        f"p3o: ess_scope = {ess_scope!r} has no effect with ess = {ess!r}; leave one of them out"
      )
  check_choice("p3o", "cap", cap, ("ess", "inverse_ess", "none"))
  check_choice("p3o", "kl_term", kl_term, (True, False))

  def batch_ess(policy_logprobs: Array, batch: TrainBatch, coefficients: Array) -> Array:
    del coefficients
    policy_logprobs = jax.lax.stop_gradient(policy_logprobs)
    log_ratio = log_ratios(policy_logprobs, batch.behavior_logprobs, batch.mask)
    if not isinstance(ess_scope, int):
      return normalized_ess(log_ratio, batch.mask)
    P, G, _ = log_ratio.shape
    if P * G % ess_scope:
      raise ValueError(
        f"p3o: ess_scope = {ess_scope} rollouts does not divide the {P * G} rollouts of a batch"
        f" ({P} prompts with {G} rollouts each); set ess_scope to a divisor of {P * G}, or 'batch'"
      )
    blocks = lambda x: x.reshape(P * G // ess_scope, -1)
    of_blocks = normalized_ess(blocks(log_ratio), blocks(batch.mask), axis=-1)
    return jnp.repeat(of_blocks, ess_scope).reshape(P, G, 1)

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Any = None
  ) -> tuple[Array, Metrics]:
    tokens = prepare_tokens(policy_logprobs, batch, coefficients)
    ratios = jax.lax.stop_gradient(tokens.ratios)
    if ess == "batch":
      e = statistics
    elif ess == "sequence":
      e = normalized_ess(tokens.log_ratios, tokens.mask, axis=-1)
    else:
      e = jnp.ones((), ratios.dtype)
    e = jax.lax.stop_gradient(e)
    limit = {"ess": e, "inverse_ess": 1 / e, "none": jnp.inf}[cap]
    # min(∞, e) = e would hide an overflow, but the update has to be skipped and counted.
    weights = jnp.where(jnp.isfinite(ratios), jnp.minimum(ratios, limit), jnp.nan)
    losses = score_function(weights, tokens)
    k3 = kl.k3(
      policy_logprobs, batch.behavior_logprobs, batch.mask, log_ratio_bound=K3_LOG_RATIO_BOUND
    )
    if kl_term:
      losses += (1 - e) * k3
    return losses, {
      **clip_metrics(cap != "none" and ratios > limit, tokens),
      "loss/ess": mean_metric(jnp.broadcast_to(e, ratios.shape), tokens.mask),
      "loss/k3_behavior": mean_metric(jax.lax.stop_gradient(k3), tokens.mask),
    }

  return Loss(per_token, batch_ess if ess == "batch" else None)
