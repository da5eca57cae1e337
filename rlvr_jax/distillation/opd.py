"""On-policy distillation as an advantage: the teacher's minus the student's log-probability."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.distillation.base import Distillation, prepare
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.types import Array, TrainBatch


def opd(*, student: str = "policy", discount: float = 0.0) -> Distillation:
  """Adds g_t = sg(log τ − log π), or Σ_{s≥t} γ^(s−t)·g_s, to the advantage A_t.

  If the loss has the ratio ρ = π/β and does not clip, the expected gradient at each token is the
  gradient of −KL(π‖τ), at any staleness. The term is added after the group's normalization. With
  γ = 0 a token gets only its own term; γ = 1 gives the gradient of the response's KL.

  Args:
    student: the policy whose log-probability is subtracted in g: "policy", π of each update; or
      "behavior", the sampler β, as in some published code. With "behavior" and stale rollouts, the
      expected gradient is not the gradient of a divergence. **open**.
    discount: γ in [0, 1], per token of the dialogue: an environment's tokens discount too, as in
      tinker-cookbook.
  Source: "On-Policy Distillation of Language Models" (arXiv:2306.13649); as an advantage "On-Policy
    Distillation" (Thinking Machines Lab 2025), tinker-cookbook, slime, verl.
  """
  check_choice("opd", "student", student, ("policy", "behavior"))
  check_between("opd", "discount", discount, low=0.0, high=1.0)

  def advantage(policy_logprobs: Array, batch: TrainBatch) -> Array:
    tokens = prepare(policy_logprobs, batch)
    gap = tokens.gap if student == "policy" else tokens.teacher - tokens.behavior
    return jnp.where(tokens.mask > 0, discounted_sums(gap, discount), 0.0)

  return Distillation(advantage=advantage)


def discounted_sums(values: Array, discount: float) -> Array:
  """Σ_{s≥t} γ^(s−t)·x_s along the last axis, f32[..., T]."""
  if discount == 0:
    return values
  in_time = jnp.moveaxis(values, -1, 0)

  def step(later: Array, value: Array) -> tuple[Array, Array]:
    total = value + discount * later
    return total, total

  _, sums = jax.lax.scan(step, jnp.zeros_like(in_time[0]), in_time, reverse=True)
  return jnp.moveaxis(sums, 0, -1)
