"""Divergences of a student's and a teacher's distributions over the vocabulary, per token."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from rlvr_jax.ops.checks import check_between, check_choice, check_integer
from rlvr_jax.types import Array

SUPPORTS = ("all", "student", "teacher", "union")
RESTS = ("renormalize", "tail", "drop", "score")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
  """A divergence of π, the student, from τ, the teacher, on a support S of tokens.

  α = 1: Σ π·log(π/τ), the reverse KL. α = 0: Σ τ·log(τ/π), the forward KL. 0 < α < 1:
  α·KL(τ‖M) + (1−α)·KL(π‖M), where M = (1−α)·π + α·τ.

  Attributes:
    alpha: α, in [0, 1].
    support: S: "all", or the top k tokens of "student" or "teacher", or the "union" of both. Tokens
      tied with the k-th, up to rounding, are included. S is constant for differentiation.
    top_k: k; 0 with "all".
    rest: the treatment of the mass outside S. "renormalize": π and τ are conditioned on S, so that
      this mass has no gradient. "tail": the mass counts as one more token. "drop": the mass is left
      out, so that the sum is not a divergence. "score" needs α = 1 and no floor: the result is
      Σ_S −sg(w·(log τ − log π))·π/sg(π), where w is π conditioned on S, and sg stops gradients.
    floor: the least value at a token. A smaller divergence is raised to the floor and has no
      gradient. None for no floor.
  Raises:
    ValueError: a field is out of range, or contradicts other fields.
  """

  alpha: float = 1.0
  support: str = "all"
  top_k: int = 0
  rest: str = "renormalize"
  floor: float | None = None

  def __post_init__(self):
    check_between("divergence", "alpha", self.alpha, low=0.0, high=1.0)
    check_choice("divergence", "support", self.support, SUPPORTS)
    check_choice("divergence", "rest", self.rest, RESTS)
    check_integer("divergence", "top_k", self.top_k, low=0)
    if self.floor is not None:
      check_between("divergence", "floor", self.floor)
    if (self.support == "all") != (self.top_k == 0):
      raise ValueError(
        f"divergence: top_k = {self.top_k} does not fit support = {self.support!r}; set top_k = 0"
        " if support is 'all', and top_k ≥ 1 if support is 'student', 'teacher' or 'union'"
      )
    if self.rest == "score" and self.alpha != 1:
      raise ValueError(
        f"divergence: rest = 'score' needs alpha = 1, but alpha = {self.alpha}; set alpha = 1 or"
        " choose another rest"
      )
    if self.rest == "score" and self.floor is not None:
      raise ValueError(
        f"divergence: rest = 'score' needs floor = None, but floor = {self.floor}; leave out floor"
        " or choose another rest"
      )
    if self.rest != "renormalize" and self.support == "all":
      raise ValueError(
        f"divergence: rest = {self.rest!r} does not fit support = 'all', which leaves no rest; set"
        " support to 'student', 'teacher' or 'union', or leave out rest"
      )

  def __call__(self, student_logprobs: Array, teacher_logprobs: Array) -> Array:
    """The divergence at each token, f32[...], nats.

    Args:
      student_logprobs: f32[..., V], log π; the gradient goes through it.
      teacher_logprobs: f32[..., V], log τ; constant for differentiation.
    """
    log_p, log_q = student_logprobs, jax.lax.stop_gradient(teacher_logprobs)
    if self.support == "all":
      return self._floored(jnp.sum(self._terms(log_p, log_q), axis=-1))
    kept = self._kept(jax.lax.stop_gradient(log_p), log_q)
    if self.rest == "score":
      return jnp.sum(jnp.where(kept, _score_terms(log_p, log_q, kept), 0.0), axis=-1)
    of_rest = jnp.float32(0)
    if self.rest == "renormalize":
      log_p, log_q = log_p - _log_mass(log_p, kept), log_q - _log_mass(log_q, kept)
    elif self.rest == "tail":
      # If no token is outside S, the mass of all tokens replaces log 0, and the term is dropped
      # below.
      has_rest = jnp.any(~kept, axis=-1, keepdims=True)
      outside = ~(kept & has_rest)
      tail = self._terms(_log_mass(log_p, outside), _log_mass(log_q, outside))
      of_rest = jnp.where(has_rest, tail, 0.0)[..., 0]
    terms = jnp.where(kept, self._terms(log_p, log_q), 0.0)
    return self._floored(jnp.sum(terms, axis=-1) + of_rest)

  def _kept(self, log_p: Array, log_q: Array) -> Array:
    """Whether a token is in S, bool[..., V]."""
    top = lambda x: x >= less_rounding(jax.lax.top_k(x, self.top_k)[0][..., -1:])
    if self.support == "student":
      return top(log_p)
    if self.support == "teacher":
      return top(log_q)
    return top(log_p) | top(log_q)

  def _terms(self, log_p: Array, log_q: Array) -> Array:
    """The term of each token in the divergence's sum, f32[..., V]."""
    p, q, alpha = jnp.exp(log_p), jnp.exp(log_q), self.alpha
    if alpha == 1:
      return p * (log_p - log_q)
    if alpha == 0:
      return q * (log_q - log_p)
    log_m = jnp.logaddexp(math.log(1 - alpha) + log_p, math.log(alpha) + log_q)
    return alpha * q * (log_q - log_m) + (1 - alpha) * p * (log_p - log_m)

  def _floored(self, values: Array) -> Array:
    return values if self.floor is None else jnp.maximum(values, self.floor)


def less_rounding(bound: Array) -> Array:
  """`bound` less 2⁻²⁰ of its size, f32[...].

  A value that equals the bound may be computed once more elsewhere in a program, or in another one,
  with other rounding. It must not fall below the bound.
  """
  return bound - jnp.abs(bound) * 2.0**-20


def _log_mass(logprobs: Array, kept: Array) -> Array:
  """The log of the mass of the kept tokens, of which there is at least one, f32[..., 1]."""
  return jax.nn.logsumexp(jnp.where(kept, logprobs, -jnp.inf), axis=-1, keepdims=True)


def _score_terms(log_p: Array, log_q: Array, kept: Array) -> Array:
  """Each token's term −sg(w·(log τ − log π))·π/sg(π), where w is π conditioned on kept tokens."""
  constant = jax.lax.stop_gradient(log_p)
  weights = jnp.exp(constant - _log_mass(constant, kept))
  return weights * (constant - log_q) * jnp.exp(log_p - constant)
