"""An estimate of the divergence from the teacher, used directly as a loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.distillation.base import Distillation, prepare
from rlvr_jax.ops import kl
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.types import Array, TrainBatch

ESTIMATORS = ("k2", "k3", "k3+")


def kl_estimate(*, estimator: str = "k2", bound: float | None = None) -> Distillation:
  """The loss ℓ = k2 or k3 of the sampled token, differentiated through the estimate itself.

  For tokens that π has just sampled, the expected gradient of k2 = (log π − log τ)²/2 is the
  gradient of KL(π‖τ). The expected gradient of k3 = τ/π − 1 − log(τ/π) is the gradient of the
  *forward* divergence KL(τ‖π), although the value of k3 estimates KL(π‖τ). Stale tokens get no
  importance weight. k1 is refused: as a loss, its expected gradient is 0.

  Args:
    estimator: "k2"; "k3"; or "k3+", the value of k3 with the gradient of k2.
    bound: > 0, nats; "k2" does not use it. In k3, `bound` limits |log π − log τ|, and `bound`/2
      limits the value. With "k3", a token beyond either bound has no gradient. verl's bound is
      20. None sets no bound.
  Source: verl's `kl_penalty`; see `ops.kl`.
  """
  if bound is not None:
    check_between("kl_estimate", "bound", bound, low=0.0, open_low=True)
  if estimator == "k1":
    raise ValueError(
      "kl_estimate: estimator = 'k1' as a loss has an expected gradient of 0, whatever the teacher;"
      " choose estimator = 'k2', or config.distillation = 'opd', which uses k1 in the advantage"
    )
  check_choice("kl_estimate", "estimator", estimator, ESTIMATORS)

  def of_k3(policy: Array, teacher: Array, mask: Array) -> Array:
    if bound is None:
      return kl.k3(policy, teacher, mask)
    log_ratio = jnp.clip(teacher - policy, -bound, bound)
    return jnp.clip(jnp.expm1(log_ratio) - log_ratio, -bound / 2, bound / 2)

  def per_token(policy_logprobs: Array, batch: TrainBatch) -> Array:
    tokens = prepare(policy_logprobs, batch)
    args = tokens.policy, tokens.teacher, tokens.mask
    if estimator == "k2":
      return kl.k2(*args)
    value = of_k3(*args)
    if estimator == "k3":
      return value
    k2 = kl.k2(*args)
    return jax.lax.stop_gradient(value) + (k2 - jax.lax.stop_gradient(k2))

  return Distillation(per_token=per_token)
