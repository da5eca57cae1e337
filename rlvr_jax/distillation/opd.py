"""On-policy distillation as an advantage: the teacher's log-probability less the student's."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.distillation.base import Distillation, prepare
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.types import Array, TrainBatch


def opd(*, student: str = "policy", discount: float = 0.0) -> Distillation:
  """A_t gets g_t = sg(log τ − log π) in addition, or Σ_{s≥t} γ^(s−t)·g_s.

  Under a loss with the ratio ρ = π/β the expected gradient is that of −KL(π‖τ) at each place, at
  any staleness, as far as the loss does not clip. It comes after the group's normalization. With
  γ = 0 a token answers for its own place alone; γ = 1 is the gradient of the response's KL.

  Args:
    student: whose log-probability g has: "policy", π of each update; or "behavior", β, as some
      published code has it: stale, its expectation is no gradient of a divergence. **open**.
    discount: γ, in [0, 1], by places of the response.
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
