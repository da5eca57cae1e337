"""Negative-advantage veto: exclude tokens after one that the policy would no longer sample.

With the schedule `stages`, all responses of a stage are sampled before its first update, so that
the later updates of the stage train on responses of an old policy. A *trigger* is a token whose
ratio ρ = π/β shows that the current policy would no longer sample the response up to this token.
Only rollouts with advantage A < 0 have triggers. Lowering the probabilities of tokens after a
trigger is meaningless.
Source: μ-GRPO (arXiv:2605.17570).
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.ops.masked import for_tokens, mean_metric, token_share
from rlvr_jax.ops.ratios import log_ratios
from rlvr_jax.types import Array, Metrics, TrainBatch

SCOPES = ("suffix", "trigger", "trigger_and_suffix", "response")
TRIGGERS = ("below", "above")

# (losses f32[P, G, T], policy_logprobs f32[P, G, T], batch, coefficients as given to the loss) →
# (losses, mask for the aggregation, metrics)
Veto = Callable[[Array, Array, TrainBatch, Array], tuple[Array, Array, Metrics]]


def trigger_tokens(
  ratios: Array, mask: Array, coefficients: Array, *, threshold: float, trigger: str
) -> Array:
  """Whether a token is a trigger: m·1[A < 0]·1[ρ < κ], or with 1[ρ > κ] for `above`.

  Args:
    ratios: f32[P, G, T], ρ = π/β at the current parameters.
    mask: [P, G, T].
    coefficients: f32[P, G] or f32[P, G, T], A, as given to the loss, after reweighting.
    threshold: κ.
    trigger: one of `TRIGGERS`.
  Returns:
    bool[P, G, T].
  """
  crossed = ratios < threshold if trigger == "below" else ratios > threshold
  return (mask > 0) & for_tokens(coefficients < 0) & crossed


def vetoed_tokens(triggers: Array, negative: Array, *, scope: str) -> Array:
  """The loss tokens with A < 0 that the triggers exclude.

  With after_t = max_{s<t} trigger_s: `suffix` is after·(1 − trigger), `trigger` is only the
  triggers, `trigger_and_suffix` is both, and `response` is all tokens of a response with a trigger.

  Args:
    triggers: bool[P, G, T].
    negative: [P, G, T], m·1[A < 0]; A is the token's own coefficient if there is one per token.
  Returns:
    bool[P, G, T].
  """
  triggered = jax.lax.cummax(triggers.astype(jnp.int32), axis=triggers.ndim - 1) > 0
  after = jnp.pad(triggered[..., :-1], [(0, 0)] * (triggers.ndim - 1) + [(1, 0)])
  vetoed = {
    "suffix": after & ~triggers,
    "trigger": triggers,
    "trigger_and_suffix": after | triggers,
    "response": jnp.broadcast_to(triggered[..., -1:], triggered.shape),
  }[scope]
  return vetoed & (negative > 0)


def negative_advantage_veto(
  *,
  scope: str = "suffix",
  threshold: float = 0.01,
  trigger: str = "below",
  renormalize: bool = False,
) -> Veto:
  """A function that sets the losses of some tokens with a negative advantage to 0.

  **open** marks our reading where the paper leaves a choice.

  Args:
    scope: the tokens to veto, one of `SCOPES`; the default keeps the triggers themselves.
    threshold: κ > 0, a ratio. **open**.
    trigger: "below" triggers where ρ < κ, "above" where ρ > κ. **open**.
    renormalize: whether to remove vetoed tokens also from the aggregation's denominator, which
      gives the remaining tokens more weight; by default the mask is not changed. **open**.
  Returns:
    (losses, policy_logprobs, batch, coefficients) → (losses with 0 at vetoed tokens, the mask to
    aggregate with, metrics). Metrics: veto/token_fraction, the fraction of loss tokens that are
    vetoed; veto/trigger_rate, the fraction of loss tokens with A < 0 that are triggers.
    `ratios.ratios_by_sign` reports the ratios of loss tokens with A < 0.
  Source: "How Off-Policy Can GRPO Be? Mu-GRPO for Efficient LLM Reinforcement Learning"
    (arXiv:2605.17570).
  """
  check_choice("negative_advantage_veto", "scope", scope, SCOPES)
  check_between("negative_advantage_veto", "threshold", threshold, low=0.0, open_low=True)
  check_choice("negative_advantage_veto", "trigger", trigger, TRIGGERS)
  check_choice("negative_advantage_veto", "renormalize", renormalize, (True, False))

  def veto(
    losses: Array, policy_logprobs: Array, batch: TrainBatch, coefficients: Array
  ) -> tuple[Array, Array, Metrics]:
    chex.assert_rank([losses, policy_logprobs, coefficients], [3, 3, {2, 3}])
    policy_logprobs = jax.lax.stop_gradient(policy_logprobs)
    ratios = jnp.exp(log_ratios(policy_logprobs, batch.behavior_logprobs, batch.mask))
    triggers = trigger_tokens(
      ratios, batch.mask, coefficients, threshold=threshold, trigger=trigger
    )
    negative = (batch.mask > 0) & for_tokens(coefficients < 0)
    vetoed = vetoed_tokens(triggers, negative, scope=scope)
    metrics: Metrics = {
      "veto/token_fraction": token_share(vetoed, batch.mask),
      "veto/trigger_rate": mean_metric(triggers, negative),
    }
    mask = jnp.where(vetoed, 0, batch.mask) if renormalize else batch.mask
    return jnp.where(vetoed, 0.0, losses), mask, metrics

  return veto
