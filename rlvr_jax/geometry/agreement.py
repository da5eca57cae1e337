"""Agreement of the Gram matrices of two subsets of the parameters, for the same rollouts."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.geometry.diagnostics import cosine_gram, distinct_pairs
from rlvr_jax.ops import spectral
from rlvr_jax.ops.masked import masked_count, masked_mean
from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array


class Agreement(NamedTuple):
  correlation: Array  # f32[], in [−1, 1]
  permutation_mean: Array  # f32[], mean correlation when rollouts are matched at random
  permutation_quantile: Array  # f32[], 95 % quantile of the correlation under random matching
  noise_mean: Array  # f32[], mean correlation with Gaussian features
  noise_quantile: Array  # f32[], 95 % quantile of the correlation with Gaussian features


def gram_agreement(
  gram_a: Array, gram_b: Array, key: Array, *, feature_dim: int, num_permutations: int = 200
) -> Agreement:
  """Measures whether two subsets of the parameters have the same gradient geometry.

  The measure is the Pearson correlation of the off-diagonal cosines of the two Gram matrices, over
  pairs of rollouts whose gradients are not zero. At 1, the subset that is cheaper to compute can
  replace the other subset. A correlation is no evidence of agreement if it is below the 95 %
  quantile of at least one of the following two null distributions.

  The permutation null matches the rollouts of `gram_a` and `gram_b` at random, which preserves the
  spectra of both matrices. The noise null replaces the features of `gram_b` by Gaussian features;
  features that are zero stay zero. Write the Gaussian features as L·Q, where L is triangular and Q
  orthonormal: their cosines depend on L only. L is sampled exactly from its distribution
  (Bartlett), with B²/2 numbers instead of B·feature_dim. If feature_dim is well above B, the noise
  null hardly depends on feature_dim, since all cosines shrink as 1/√feature_dim.

  Args:
    gram_a, gram_b: f32[B, B].
    key: random key.
    feature_dim: number of parameters of the subset of `gram_b`.
    num_permutations: number of samples of each null.
  Returns:
    See `Agreement`. A correlation is 0 if the cosines of one matrix are all equal (standard
    deviation below 1e-6), as for identical gradients.
  Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make
    Them Matter" (arXiv:2606.05800).
  """
  chex.assert_equal_shape([gram_a, gram_b])
  a, b = cosine_gram(gram_a), cosine_gram(gram_b)
  nonzero = jnp.diagonal(b) > 0
  permutation_key, noise_key = jax.random.split(key)

  def correlate_permuted(key):
    order = jax.random.permutation(key, b.shape[0])
    return _correlation(a, b[order][:, order])

  def correlate_noise(key):
    noise = _gaussian_cosines(key, b.shape[0], feature_dim, b.dtype)
    return _correlation(a, jnp.where(nonzero[:, None] & nonzero, noise, 0.0))

  def summarize(sample, key):
    samples = jax.lax.map(sample, jax.random.split(key, num_permutations))
    return jnp.mean(samples), jnp.quantile(samples, 0.95)

  permutation_null = summarize(correlate_permuted, permutation_key)
  noise_null = summarize(correlate_noise, noise_key)
  return Agreement(_correlation(a, b), *permutation_null, *noise_null)


def _correlation(a: Array, b: Array) -> Array:
  """The Pearson correlation of the off-diagonal entries of two matrices of cosines."""
  pairs = distinct_pairs((jnp.diagonal(a) > 0) & (jnp.diagonal(b) > 0))
  center = lambda x: jnp.where(pairs, x - masked_mean(x, pairs), 0.0)
  a, b = center(a), center(b)
  norms = jnp.stack([jnp.sqrt(jnp.sum(a**2)), jnp.sqrt(jnp.sum(b**2))])
  defined = jnp.all(norms > spectral.NULL * jnp.sqrt(masked_count(pairs)))
  unit_a, unit_b = a / jnp.where(defined, norms[0], 1.0), b / jnp.where(defined, norms[1], 1.0)
  return jnp.where(defined, jnp.clip(jnp.sum(unit_a * unit_b), -1.0, 1.0), 0.0)


def _gaussian_cosines(key: Array, rollouts: int, dim: int, dtype) -> Array:
  """The cosines of Gaussian features [rollouts, dim], sampled without making the features.

  The features are L·Q with Q orthonormal. Entries of L below the diagonal are normal. The i-th
  diagonal entry of L (from 0) is χ-distributed with dim − i degrees of freedom. Source: "On the
  Theory of Statistical Regression" (Bartlett 1933).
  """
  below_key, diagonal_key = jax.random.split(key)
  width = min(rollouts, dim)
  below = jnp.tril(jax.random.normal(below_key, (rollouts, width), dtype), -1)
  freedom = float(dim) - jnp.arange(width, dtype=dtype)
  diagonal = jax.random.chisquare(diagonal_key, freedom, dtype=dtype)
  factor = below + jnp.pad(jnp.diag(jnp.sqrt(diagonal)), [(0, rollouts - width), (0, 0)])
  factor = factor / jnp.linalg.norm(factor, axis=1, keepdims=True)
  return jnp.matmul(factor, factor.T, precision=EXACT)
