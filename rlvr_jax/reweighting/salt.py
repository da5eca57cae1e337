"""SALT: coefficients split along and across the directions that a batch's gradients share."""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops import spectral
from rlvr_jax.ops.checks import check_between, check_choice, check_order, check_whole
from rlvr_jax.ops.masked import mean_metric, upcast
from rlvr_jax.reweighting.base import SCOPES, Reweighting
from rlvr_jax.types import Array, Metrics

CHANNELS = ("both", "shared", "residual")


class SaltResult(NamedTuple):
  """What SALT makes of the coefficients A of a block; with a leading axis N, of N blocks."""

  coefficients: Array  # f32[b], A'
  shared: Array  # f32[b], P_k A
  residual: Array  # f32[b], (I − P_k) A⁺
  alpha: Array  # f32[], weight of the residual
  rank: Array  # i32[], k
  participation_ratio: Array  # f32[]
  effective_rollouts: Array  # f32[], n_eff
  usable: Array  # bool[], the Gram is finite and not all zero
  acts: Array  # bool[], additionally Σ A² K_ii > 0; elsewhere A' = A


def salt_coefficients(
  coefficients: Array,
  gram: Array,
  key: Array,
  *,
  rank_scale: float,
  min_rank: int,
  max_rank: int,
  alpha_min: float,
  alpha_max: float,
  positive_part: bool,
  channels: str,
  random_subspace: bool,
) -> SaltResult:
  """A' = P_k A + α (I − P_k) A⁺, for one block; the hyper-parameters are those of `salt`.

  Args:
    coefficients: f32[b], A, b ≥ 2.
    gram: f32[b, b], inner products of per-rollout gradient features, in any unit.
    key: of a random subspace; not used otherwise.
  """
  spectrum = spectral.spectrum(gram)
  ratio = spectral.participation_ratio(gram)
  rank = spectral.subspace_rank(
    spectrum.eigenvalues, ratio, scale=rank_scale, minimum=min_rank, maximum=max_rank
  )
  vectors = spectrum.vectors
  if random_subspace:
    vectors = spectral.random_basis(key, gram.shape[0], vectors.dtype)
  n_eff = spectral.effective_rollouts(coefficients, gram)
  alpha = jnp.clip(1 - n_eff, alpha_min, alpha_max)

  shared = spectral.project(vectors, rank, coefficients)
  kept = jnp.maximum(coefficients, 0) if positive_part else coefficients
  residual = kept - spectral.project(vectors, rank, kept)
  reweighted = {
    "both": shared + alpha * residual,
    "shared": shared,
    "residual": alpha * residual,
  }[channels]
  acts = spectral.carries_gradient(coefficients, gram)
  return SaltResult(
    coefficients=jnp.where(acts, reweighted, coefficients).astype(coefficients.dtype),
    shared=shared,
    residual=residual,
    alpha=alpha,
    rank=rank,
    participation_ratio=ratio,
    effective_rollouts=n_eff,
    usable=spectrum.usable,
    acts=acts,
  )


def salt_metrics(coefficients: Array, result: SaltResult) -> Metrics:
  """Means over N blocks, of A f32[N, b] and what SALT made of it.

  What describes the Gram is averaged over the blocks in which it is usable, what describes A over
  those in which SALT acts: a group without a signal does not dilute them.
  """
  # In units of the largest coefficient, whose square may leave float32's range.
  largest = jnp.max(jnp.abs(coefficients), axis=-1, keepdims=True)
  unit = jnp.where(largest > 0, largest, 1.0)
  norm = lambda x: jnp.linalg.norm(x / unit, axis=-1)
  size = jnp.where(result.acts, norm(coefficients), 1.0)
  of_gram = {
    "participation_ratio": result.participation_ratio,
    "rank": result.rank,
  }
  of_coefficients = {
    "effective_rollouts": result.effective_rollouts,
    "alpha": result.alpha,
    "coefficient_change": norm(result.coefficients - coefficients) / size,
    "shared_share": (norm(result.shared) / size) ** 2,
  }
  metrics = {name: mean_metric(x, result.usable) for name, x in of_gram.items()}
  metrics |= {name: mean_metric(x, result.acts) for name, x in of_coefficients.items()}
  metrics["unusable_gram"] = mean_metric(~result.usable, jnp.ones_like(result.usable))
  return {f"reweighting/{name}": metric for name, metric in metrics.items()}


def salt(
  *,
  rank_scale: float = 1.0,
  min_rank: int = 1,
  max_rank: int = 64,
  alpha_min: float = 0.0,
  alpha_max: float = 1.0,
  positive_part: bool = True,
  channels: str = "both",
  random_subspace: bool = False,
  scope: str = "batch",
) -> Reweighting:
  """A' = P_k A + α (I − P_k) A⁺: full weight on shared directions, as much as is missing elsewhere.

  P_k projects onto the top k eigenvectors of the Gram matrix K of a block's gradient features,
  k = clip(round(rank_scale·PR), min_rank, min(max_rank, b−1, eigenvalues above 1e-6·λ_max));
  α = clip(1 − n_eff, alpha_min, alpha_max); A⁺ = max(A, 0). A factor on all gradients changes
  nothing. Where K is zero or not finite, or no rollout with a coefficient has a gradient, A' = A.

  Ablations: a fixed α is alpha_min = alpha_max, a fixed k is min_rank = max_rank; the others are
  the last four arguments.

  Args:
    rank_scale: > 0, factor on the participation ratio.
    min_rank: ≥ 1.
    max_rank: ≥ min_rank.
    alpha_min: ≥ 0.
    alpha_max: ≥ alpha_min; n_eff ≥ 0, so that above 1 it matters only with alpha_min = alpha_max.
    positive_part: whether the residual is of A⁺, or of A itself.
    channels: "both"; "shared": P_k A alone; "residual": α (I − P_k) A⁺ alone.
    random_subspace: P_k projects onto k random directions, drawn from the key anew in each call
      and block; with scope "group" they depend on how many micro-batches there are.
    scope: what shares a Gram matrix: "batch", "microbatch" or "group".
  Raises:
    ValueError: a hyper-parameter out of range; blocks of one rollout, at trace time.
  Source: arXiv 2606.05800, §3, and the authors' code.
  """
  # Over 60 lines: half is its arguments and what they mean.
  check_between("salt", "rank_scale", rank_scale, low=0.0, open_low=True)
  check_whole("salt", "min_rank", min_rank, low=1)
  check_whole("salt", "max_rank", max_rank, low=1)
  check_order("salt", ("min_rank", min_rank), ("max_rank", max_rank))
  check_between("salt", "alpha_min", alpha_min, low=0.0)
  check_between("salt", "alpha_max", alpha_max, low=0.0)
  check_order("salt", ("alpha_min", alpha_min), ("alpha_max", alpha_max))
  check_choice("salt", "positive_part", positive_part, (True, False))
  check_choice("salt", "channels", channels, CHANNELS)
  check_choice("salt", "random_subspace", random_subspace, (True, False))
  check_choice("salt", "scope", scope, SCOPES)
  block = functools.partial(
    salt_coefficients,
    rank_scale=rank_scale,
    min_rank=min_rank,
    max_rank=max_rank,
    alpha_min=alpha_min,
    alpha_max=alpha_max,
    positive_part=positive_part,
    channels=channels,
    random_subspace=random_subspace,
  )

  def apply(coefficients: Array, gram: Array | None, key: Array) -> tuple[Array, Metrics]:
    chex.assert_rank(coefficients, 2)
    blocks, size = coefficients.shape
    if size < 2:
      raise ValueError(
        f"reweighting 'salt' with scope = {scope!r} got blocks of {size} rollout, and needs 2 or"
        f" more; set scope to 'batch', or use larger groups or micro-batches"
      )
    assert gram is not None, "needs_gram"
    chex.assert_shape(gram, (blocks, size, size))
    # Constants for differentiation; eigenvectors have no derivative where eigenvalues coincide.
    coefficients, gram = jax.lax.stop_gradient((upcast(coefficients), upcast(gram)))
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(blocks))
    result = jax.vmap(block)(coefficients, gram, keys)
    return result.coefficients, salt_metrics(coefficients, result)

  return Reweighting(apply, needs_gram=True, scope=scope)
