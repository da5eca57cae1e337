"""Spectral statistics of a Gram matrix of per-rollout gradients, and projections on subspaces.

A Gram matrix here is K = (g_i · g_j)/B of the gradients g_i of the B rollouts of a batch. It is
symmetric and positive semidefinite. Its eigenvectors are directions in the space of rollouts.
Scaling all gradients by the same number changes only the eigenvalues.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops.masked import upcast
from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array

NULL = 1e-6  # eigenvalues below this times the largest are rounding errors


class Spectrum(NamedTuple):
  eigenvalues: Array  # f32[B], descending
  vectors: Array  # f32[B, B], whose columns are the eigenvectors in that order
  usable: Array  # bool[], False if the Gram was zero or not finite, and replaced by the identity


def is_usable(gram: Array) -> Array:
  """Whether a Gram matrix f32[B, B] is finite, and its trace is finite and not 0, bool[]."""
  gram = upcast(gram)
  trace = jnp.trace(gram)
  normal = (trace >= jnp.finfo(gram.dtype).tiny) & jnp.isfinite(trace)
  return normal & jnp.all(jnp.isfinite(gram))


def normalized_gram(gram: Array) -> Array:
  """The symmetrized Gram matrix, scaled to a mean diagonal of 1; the identity if it is unusable."""
  chex.assert_rank(gram, 2)
  gram = upcast(gram)
  # Divide by the trace first: a small trace over B may be a denormal number.
  scaled = gram / jnp.trace(gram) * gram.shape[0]
  identity = jnp.eye(gram.shape[0], dtype=gram.dtype)
  return jnp.where(is_usable(gram), (scaled + scaled.T) / 2, identity)


def spectrum(gram: Array) -> Spectrum:
  """The spectrum of a Gram matrix f32[B, B]; the identity's spectrum if the matrix is unusable."""
  usable = is_usable(gram)
  eigenvalues, vectors = jnp.linalg.eigh(normalized_gram(gram))
  mean_diagonal = jnp.where(usable, jnp.trace(upcast(gram)) / gram.shape[0], 1.0)
  return Spectrum(jnp.maximum(eigenvalues[::-1], 0.0) * mean_diagonal, vectors[:, ::-1], usable)


def participation_ratio(gram: Array) -> Array:
  """Effective number of gradient directions in a batch, (tr K)² / ‖K‖_F².

  1 if all gradients are parallel, B if they are orthogonal and of equal norm.

  Args:
    gram: f32[B, B], inner products of per-rollout gradient features; symmetric.
  Returns:
    f32[], in [1, B]; 0 for a Gram that is all zero or not finite.
  Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make
    Them Matter" (arXiv:2606.05800), §3; Recanatesi et al. 2022.
  """
  scaled = normalized_gram(gram)
  return jnp.where(is_usable(gram), gram.shape[0] ** 2 / jnp.sum(scaled**2), 0.0)


def _energies(coefficients: Array, gram: Array) -> tuple[Array, Array]:
  """‖Σ A_i g_i‖² and Σ A_i² ‖g_i‖², in units of max A² · mean K_ii; zeros for an unusable Gram."""
  chex.assert_rank([coefficients, gram], [1, 2])
  chex.assert_equal_shape_prefix([coefficients, gram], 1)
  coefficients, scaled = upcast(coefficients), normalized_gram(gram)
  # Without this scaling, A² might exceed float32's range.
  largest = jnp.max(jnp.abs(coefficients))
  unit = coefficients / jnp.where(largest > 0, largest, 1.0)
  along = jnp.matmul(scaled, unit, precision=EXACT)
  together = jnp.dot(unit, along, precision=EXACT)
  separate = jnp.sum(unit**2 * jnp.diagonal(scaled))
  usable = is_usable(gram)
  return jnp.where(usable, jnp.maximum(together, 0.0), 0.0), jnp.where(usable, separate, 0.0)


def carries_gradient(coefficients: Array, gram: Array) -> Array:
  """Whether Σ A_i² K_ii > 0, bool[], for A f32[B] and a usable Gram f32[B, B].

  If not, A and K do not determine the update: n_eff and the values derived from it are undefined.
  """
  return _energies(coefficients, gram)[1] > 0


def effective_rollouts(coefficients: Array, gram: Array) -> Array:
  """n_eff = ‖Σ A_i g_i‖² / Σ A_i² ‖g_i‖² = AᵀKA / Σ A_i² K_ii.

  1 if the weighted gradients are orthogonal, 0 if they cancel, B if all are the same.

  Args:
    coefficients: f32[B], A.
    gram: f32[B, B].
  Returns:
    f32[], in [0, B]; 0 if the denominator is 0 or the Gram is not finite.
  Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make
    Them Matter" (arXiv:2606.05800), §3.
  """
  together, separate = _energies(coefficients, gram)
  return jnp.where(separate > 0, together / jnp.where(separate > 0, separate, 1.0), 0.0)


def subspace_rank(
  eigenvalues: Array, ratio: Array, count: Array, *, scale: float, minimum: int, maximum: int
) -> Array:
  """k = clip(round(scale·PR), minimum, min(maximum, n−1, m)).

  PR is `ratio`, and m is the number of eigenvalues above 1e-6 times the largest eigenvalue. If the
  lower bound exceeds the upper bound, the upper bound applies.

  Args:
    eigenvalues: f32[B], descending.
    ratio: f32[], the participation ratio.
    count: f32[], n, the number of valid rollouts; other rollouts have the gradient 0.
  Returns:
    i32[], data-dependent; at least 1, and at most n − 1 if n ≥ 2.
  Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make
    Them Matter" (arXiv:2606.05800), §3, and the authors' code.
  """
  positive = jnp.sum(eigenvalues > NULL * eigenvalues[0])
  ceiling = jnp.maximum(jnp.minimum(positive, jnp.minimum(maximum, count - 1)), 1)
  # Bounded before the conversion, since a large scale may exceed the range of i32.
  rank = jnp.maximum(jnp.round(scale * ratio), minimum)
  return jnp.minimum(rank, ceiling).astype(jnp.int32)


def project(vectors: Array, rank: Array, x: Array) -> Array:
  """P_k x = V_k V_kᵀ x, f32[B].

  Args:
    vectors: f32[B, B], orthonormal columns; the first `rank` of them span the subspace.
    rank: i32[], may be data-dependent: columns are chosen by a mask, not by a slice.
    x: f32[B].
  """
  in_subspace = jnp.arange(vectors.shape[1]) < rank
  along = jnp.where(in_subspace, jnp.matmul(vectors.T, x, precision=EXACT), 0.0)
  return jnp.matmul(vectors, along, precision=EXACT)


def random_basis(key: Array, valid: Array, dtype: Any) -> Array:
  """A random orthonormal basis, the columns of f32[B, B].

  If `valid`, bool[B], marks n rollouts, the first n columns are 0 at the other rollouts. Up to
  signs, these n columns are uniformly distributed among all choices of n orthonormal columns that
  are 0 at the other rollouts.
  """
  random = jax.random.normal(key, (valid.size, valid.size), dtype)
  return jnp.linalg.qr(jnp.where(valid[:, None] > 0, random, 0.0))[0]


def largest(x: Array) -> Array:
  """max|x|, or 1 if x is all zero; for use as a divisor."""
  largest = jnp.max(jnp.abs(x))
  return jnp.where(largest > 0, largest, 1.0)
