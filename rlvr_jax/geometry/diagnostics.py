"""Diagnostics of a batch from the Gram matrix of its per-rollout gradients.

A Gram matrix here contains the inner products g_i · g_j, f32[B, B], as a `GramFn` returns them: not
divided by B. Only `update_norms` depends on this scale; all other values are scale-invariant.
Rollouts are in the order of [P, G] reshaped to [B], so that the rollouts of a prompt are adjacent.
An undefined value (no pair to compare, all coefficients 0, a Gram that is 0 or not finite) is 0,
never NaN.

Comparisons of two Gram matrices are in `agreement`, statistics of an update in `updates`.

Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make Them
Matter" (arXiv:2606.05800).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops import spectral
from rlvr_jax.ops.masked import masked_count, masked_fill, masked_mean, upcast
from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array

_EDGES = (0.5, 1.0, 2.0, 4.0)
_SHARES = ("below_0.5", "0.5_to_1", "1_to_2", "2_to_4", "from_4")


class Redundancy(NamedTuple):
  within: Array  # f32[], mean cosine of pairs of rollouts of one prompt, in [−1, 1]
  within_positive: Array  # f32[], mean of max(cosine, 0) over these pairs, in [0, 1]
  between: Array  # f32[], mean cosine of pairs of prompts' mean gradients, in [−1, 1]
  between_positive: Array  # f32[], mean of max(cosine, 0) over these pairs, in [0, 1]


def diagnose(
  gram: Array,
  coefficients: Array,
  reweighted: Array,
  num_prompts: int,
  *,
  valid: Array | None = None,
  rank_scale: float = 1.0,
  min_rank: int = 1,
  max_rank: int = 64,
) -> dict[str, Array]:
  """Computes all diagnostics of one Gram matrix and the coefficients, as scalars for a log.

  Args:
    gram: f32[B, B], g_i · g_j, not divided by B.
    coefficients: f32[P, G] or f32[B], A, from the advantage estimator.
    reweighted: the same shape, A', as given to the loss; equal to A if there is no reweighting.
    num_prompts: P.
    valid: bool[P, G] or bool[B], rollouts that have a grade; other rollouts have gradient and
      coefficient 0, and their number has no effect. None: all rollouts.
    rank_scale, min_rank, max_rank: ρ_s, k_min and k_max of the shared subspace. A run uses SALT's
      defaults, whatever its reweighting, so that runs can be compared.
  Returns:
    f32[] each, all finite if A and A' are finite:
      geometry/gram_usable: 0 if the Gram matrix is zero or not finite, otherwise 1. At 0 the other
        metrics mean nothing.
      geometry/participation_ratio: effective number of directions of the batch's gradients, in
        [1, B]. Near 1 all rollouts push in one direction, whatever their number.
      geometry/group_participation_ratio: the mean of the groups' participation ratios, in [1, G].
      geometry/effective_rollouts, …_reweighted: n_eff under A and under A', in [0, B]; for its
        definition see `ops.spectral.effective_rollouts`. Below 1 the weighted gradients cancel, and
        more rollouts help little; independent rollouts give about 1; far above 1 the weighted
        gradients reinforce one another.
      geometry/group_effective_rollouts/mean: the mean of the groups' n_eff under A.
      geometry/group_effective_rollouts/…: see `effective_rollouts_histogram`.
      geometry/redundancy_within, …_between, each with and without …_positive: see `redundancy`.
      geometry/rank: k, the dimension of the shared subspace.
      geometry/shared_energy, geometry/residual_energy: see `energies`, under A.
      geometry/group_shared_energy: the mean shared energy over groups, each with its own Gram
        matrix and k.
      geometry/update_norm, …_reweighted, geometry/update_norm_bound: see `update_norms`; the bound
        is computed for A.
      geometry/group_update_norm, …_bound: the means of norm and bound over groups, each with its
        own Gram matrix, k and number of rollouts.
      geometry/group_norm_correlation: the correlation of norm and bound over groups.
  """
  coefficients, reweighted = coefficients.reshape(-1), reweighted.reshape(-1)
  chex.assert_shape([coefficients, reweighted], gram.shape[:1])
  valid = jnp.ones(gram.shape[0], bool) if valid is None else valid.reshape(-1)
  count = masked_count(valid)
  bounds: dict[str, Any] = dict(scale=rank_scale, minimum=min_rank, maximum=max_rank)
  spectrum = spectral.spectrum(gram)
  ratio = spectral.participation_ratio(gram)
  rank = spectral.subspace_rank(spectrum.eigenvalues, ratio, count, **bounds)
  shared, residual = energies(coefficients, spectrum, rank)
  norm, bound = update_norms(coefficients, spectrum, rank, count)
  norm_reweighted, _ = update_norms(reweighted, spectrum, rank, count)
  group_ratios, groups_usable = group_participation_ratios(gram, num_prompts)
  group_rollouts, counted = group_effective_rollouts(coefficients, gram, num_prompts)
  group_shared, group_norms, group_bounds = jax.vmap(functools.partial(_of_group, bounds=bounds))(
    coefficients.reshape(num_prompts, -1),
    _group_grams(gram, num_prompts),
    valid.reshape(num_prompts, -1),
  )
  pairs = redundancy(gram, num_prompts)
  values = {
    "gram_usable": spectrum.usable,
    "participation_ratio": ratio,
    "group_participation_ratio": masked_mean(group_ratios, groups_usable),
    "effective_rollouts": spectral.effective_rollouts(coefficients, gram),
    "effective_rollouts_reweighted": spectral.effective_rollouts(reweighted, gram),
    "group_effective_rollouts/mean": masked_mean(group_rollouts, counted),
    "rank": jnp.where(spectrum.usable, rank, 0),
    "shared_energy": shared,
    "residual_energy": residual,
    "group_shared_energy": masked_mean(group_shared, counted),
    "update_norm": norm,
    "update_norm_reweighted": norm_reweighted,
    "update_norm_bound": bound,
    "group_update_norm": masked_mean(group_norms, counted),
    "group_update_norm_bound": masked_mean(group_bounds, counted),
    "group_norm_correlation": _correlation(group_norms, group_bounds, counted),
  }
  values |= effective_rollouts_histogram(group_rollouts, counted)
  values |= {f"redundancy_{name}": value for name, value in pairs._asdict().items()}
  return {f"geometry/{name}": upcast(value) for name, value in values.items()}


def cosine_gram(gram: Array) -> Array:
  """cos(g_i, g_j), f32[B, B] in [−1, 1]; entries of a zero gradient are 0.

  The result is the identity for a Gram matrix that is zero or not finite.
  """
  gram = spectral.normalized_gram(gram)
  norms = jnp.sqrt(jnp.maximum(jnp.diagonal(gram), 0.0))
  nonzero = norms > 0
  divisors = jnp.where(nonzero, norms, 1.0)
  cosines = jnp.clip(gram / divisors[:, None] / divisors, -1.0, 1.0)
  return jnp.where(nonzero[:, None] & nonzero, cosines, 0.0)


def redundancy(gram: Array, num_prompts: int) -> Redundancy:
  """Mean cosine of the gradients of two rollouts of a prompt, and of two prompts' mean gradients.

  If the mean cosine within prompts is 1, the G rollouts of a prompt carry as much information as
  one rollout. On-policy, independent rollouts have a mean inner product of 0. Their mean cosine
  need not be 0: with two possible answers of probabilities p and q, it is (p − q)². The mean of
  max(cosine, 0) counts agreement only (**open**: our reading of mean positive cosine). If this mean
  is well above the mean cosine, some rollouts of a prompt oppose others, for example successes and
  failures. Between prompts, values near 1 mean that all prompts push in one direction (a format, a
  length); values below 0 mean that prompts oppose each other.

  Args:
    gram: f32[B, B].
    num_prompts: P; B is a multiple of P.
  Returns:
    Means over pairs of two different rollouts (prompts) whose gradients are not zero. A mean
    gradient counts as zero if its squared norm is within rounding (1e-6) of zero.
  Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make
    Them Matter" (arXiv:2606.05800).
  """
  gram = spectral.normalized_gram(gram)
  blocks = _blocks(gram, num_prompts)
  prompt = jnp.repeat(jnp.arange(num_prompts), blocks.shape[1])
  mean_squared_norms = jnp.diagonal(gram).reshape(num_prompts, -1).mean(axis=1)
  prompt_gram = blocks.mean(axis=(1, 3))  # inner products of prompts' mean gradients
  cancelled = jnp.diagonal(prompt_gram) <= spectral.NULL * mean_squared_norms
  prompt_gram = jnp.where(cancelled[:, None] | cancelled, 0.0, prompt_gram)
  within = _mean_cosines(gram, prompt[:, None] == prompt)
  return Redundancy(*within, *_mean_cosines(prompt_gram, True))


def energies(coefficients: Array, spectrum: spectral.Spectrum, rank: Array) -> tuple[Array, Array]:
  """Shares of the update's squared norm AᵀKA inside and outside the top-k eigenvectors of K.

  K is the Gram matrix. P_k projects onto its top k eigenvectors, so P_k commutes with K. Therefore
  AᵀP_kKP_kA/(AᵀKA) and the same expression with I − P_k in place of P_k add up to 1 (**open**: our
  reading of shared and residual energy). If the shared energy is near 1, the update follows the few
  directions in which all rollouts agree; if it is near 0, A cancels these directions, as centered
  coefficients cancel a common direction.

  Args:
    coefficients: f32[B], A.
    spectrum: the spectrum of the Gram matrix, `ops.spectral.spectrum`.
    rank: i32[], k.
  Returns:
    shared and residual energy, f32[] in [0, 1]. Both are 0 if AᵀKA is zero up to rounding: below
    1e-6·λ_1‖A‖², where λ_1 is K's largest eigenvalue.
  Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make
    Them Matter" (arXiv:2606.05800).
  """
  energy, unit, _ = _energy(coefficients, spectrum)
  total = jnp.sum(energy)
  defined = spectrum.usable & (total > spectral.NULL * jnp.sum(unit**2))
  shared = jnp.sum(jnp.where(jnp.arange(energy.size) < rank, energy, 0.0))
  shared = shared / jnp.where(defined, total, 1.0)
  return jnp.where(defined, shared, 0.0), jnp.where(defined, 1 - shared, 0.0)


def update_norms(
  coefficients: Array, spectrum: spectral.Spectrum, rank: Array, count: Array
) -> tuple[Array, Array]:
  """The update's norm ‖Σ A_i g_i‖/B, and a bound on its part outside the top-k subspace.

  Let K = (g_i · g_j)/B, let λ_j be its eigenvalues in descending order, and let P_k project onto
  its top k eigenvectors. The norm is √(AᵀKA/B). The norm of the part outside, the residual part, is
  at most √(λ_{k+1}(K)/B)·‖(I − P_k)A‖. `spectrum` belongs to B·K, whose eigenvalues are B times
  larger: √(λ_{k+1}(B·K))/B·‖(I − P_k)A‖ is the same bound.

  If the bound is far below the norm, most of the update is in the shared subspace. If the norm is
  far below the bound, A cancels in the shared directions and the residuals of the rollouts cancel
  one another too. The norm of the update is the norm of the policy gradient at importance ratio 1,
  summed over tokens and averaged over rollouts. This gradient is with respect to the parameters of
  the g_i.

  Args:
    coefficients: f32[B], A.
    spectrum: the spectrum of the Gram matrix g_i · g_j, not divided by B, `ops.spectral.spectrum`.
    rank: i32[], k.
    count: f32[], B: the number of valid rollouts.
  Returns:
    norm and bound, f32[] ≥ 0, in the unit of ‖g_i‖; the bound is on the residual part only.
  Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make
    Them Matter" (arXiv:2606.05800) (**open**).
  """
  energy, unit, scale = _energy(coefficients, spectrum)
  outside = jnp.arange(energy.size) >= rank
  # The largest eigenvalue outside the subspace; 0 if there is none.
  next_eigenvalue = jnp.max(jnp.where(outside, _relative(spectrum.eigenvalues), 0.0))
  bound = jnp.sqrt(next_eigenvalue) * jnp.linalg.norm(jnp.where(outside, unit, 0.0))
  norms = jnp.stack([jnp.sqrt(jnp.sum(energy)), bound]) * scale / count
  norm, bound = jnp.where(spectrum.usable, norms, 0.0)
  return norm, bound


def group_participation_ratios(gram: Array, num_prompts: int) -> tuple[Array, Array]:
  """The participation ratio of every group's Gram matrix, and whether this ratio is defined.

  Args:
    gram: f32[B, B].
    num_prompts: P.
  Returns:
    f32[P] in [1, G], near 1 if the gradients of a prompt's rollouts are all parallel; and bool[P],
    False if all gradients of a group are zero.
  """
  grams = _group_grams(gram, num_prompts)
  return jax.vmap(spectral.participation_ratio)(grams), jax.vmap(spectral.is_usable)(grams)


def group_effective_rollouts(
  coefficients: Array, gram: Array, num_prompts: int
) -> tuple[Array, Array]:
  """The effective number of rollouts n_eff of every group, and whether n_eff is defined.

  Args:
    coefficients: f32[P, G] or f32[B], A.
    gram: f32[B, B].
    num_prompts: P.
  Returns:
    f32[P] in [0, G], below 1 if a group's weighted gradients cancel; and bool[P], False if no
    rollout of a group has both a coefficient and a gradient, as in groups of equal rewards.
  Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make
    Them Matter" (arXiv:2606.05800).
  """
  grams = _group_grams(gram, num_prompts)
  coefficients = coefficients.reshape(num_prompts, -1)
  counted = jax.vmap(spectral.carries_gradient)(coefficients, grams)
  return jax.vmap(spectral.effective_rollouts)(coefficients, grams), counted


def effective_rollouts_histogram(values: Array, counted: Array) -> dict[str, Array]:
  """The shares of groups with n_eff in [0, .5), [.5, 1), [1, 2), [2, 4) and [4, ∞).

  Args:
    values: f32[P], n_eff of every group.
    counted: bool[P], the groups to count, from `group_effective_rollouts`.
  Returns:
    group_effective_rollouts/below_0.5, …/0.5_to_1, …/1_to_2, …/2_to_4, …/from_4: f32[] in [0, 1],
    with the sum 1, or all 0 if no group counts. If n_eff is below 0.5 in most groups, the weighted
    gradients of these groups cancel, and larger groups will not help.
  """
  bins = jnp.sum(values[:, None] >= jnp.array(_EDGES), axis=1)
  hits = bins[:, None] == jnp.arange(len(_SHARES))
  shares = masked_mean(hits, jnp.broadcast_to(counted[:, None], hits.shape), axis=0)
  names = (f"group_effective_rollouts/{name}" for name in _SHARES)
  return dict(zip(names, shares, strict=True))


def _of_group(
  coefficients: Array, gram: Array, valid: Array, bounds: dict[str, Any]
) -> tuple[Array, Array, Array]:
  """One group's shared energy, norm of the update, and bound; zeros for a group of one rollout."""
  spectrum = spectral.spectrum(gram)
  ratio = spectral.participation_ratio(gram)
  count = masked_count(valid)
  rank = spectral.subspace_rank(spectrum.eigenvalues, ratio, count, **bounds)
  shared, _ = energies(coefficients, spectrum, rank)
  norm, bound = update_norms(coefficients, spectrum, rank, jnp.maximum(count, 1))
  alone = count < 2
  return jnp.where(alone, 0.0, shared), jnp.where(alone, 0.0, norm), jnp.where(alone, 0.0, bound)


def _correlation(x: Array, y: Array, counted: Array) -> Array:
  """The Pearson correlation of the counted entries; 0 if x or y does not vary."""
  x, y = (masked_fill(v, counted) for v in (x, y))
  x, y = (v / spectral.largest(v) for v in (x, y))
  x, y = (masked_fill(v - masked_mean(v, counted), counted) for v in (x, y))
  norms = jnp.linalg.norm(x) * jnp.linalg.norm(y)
  varies = norms > spectral.NULL * jnp.maximum(masked_count(counted), 1)
  return jnp.where(varies, jnp.sum(x * y) / jnp.where(varies, norms, 1.0), 0.0)


def _blocks(gram: Array, num_prompts: int) -> Array:
  """The Gram matrix [B, B], reshaped by prompts to [P, G, P, G]."""
  chex.assert_rank(gram, 2)
  if gram.shape[0] % num_prompts:
    raise ValueError(
      f"the {gram.shape[0]} rollouts of a Gram matrix cannot be divided into {num_prompts} equal"
      " groups"
    )
  group_size = gram.shape[0] // num_prompts
  return upcast(gram).reshape(num_prompts, group_size, num_prompts, group_size)


def _group_grams(gram: Array, num_prompts: int) -> Array:
  """The Gram matrix of each group, f32[P, G, G]."""
  prompts = jnp.arange(num_prompts)
  return _blocks(gram, num_prompts)[prompts, :, prompts]


def _mean_cosines(gram: Array, pairs: Array | bool) -> tuple[Array, Array]:
  """Means of cosines, and of their positive parts, over `pairs` of different nonzero gradients."""
  cosines = cosine_gram(gram)
  counted = distinct_pairs(jnp.diagonal(cosines) > 0) & pairs
  return masked_mean(cosines, counted), masked_mean(jnp.maximum(cosines, 0.0), counted)


def distinct_pairs(nonzero: Array) -> Array:
  """A mask of the pairs of different rollouts with nonzero gradients, bool[B, B]."""
  return nonzero[:, None] & nonzero & ~jnp.eye(nonzero.size, dtype=bool)


def _energy(coefficients: Array, spectrum: spectral.Spectrum) -> tuple[Array, Array, Array]:
  """The contribution of each eigenvector to AᵀKA, in units that stay within float32's range.

  Returns:
    The energies (λ_j/λ_1)·u_j², f32[B]; u = VᵀA/max|A|, f32[B]; and √λ_1·max|A|, f32[], whose
    square times the sum of the energies is AᵀKA.
  """
  coefficients = upcast(coefficients)
  largest = spectral.largest(coefficients)
  unit = jnp.matmul(spectrum.vectors.T, coefficients / largest, precision=EXACT)
  return (
    _relative(spectrum.eigenvalues) * unit**2,
    unit,
    jnp.sqrt(spectrum.eigenvalues[0]) * largest,
  )


def _relative(eigenvalues: Array) -> Array:
  """The eigenvalues divided by the largest eigenvalue, λ_j/λ_1."""
  return eigenvalues / jnp.where(eigenvalues[0] > 0, eigenvalues[0], 1.0)
