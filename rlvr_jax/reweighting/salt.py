"""SALT splits coefficients into a part along the gradients that a batch shares, and a residual."""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops import spectral
from rlvr_jax.ops.checks import check_between, check_choice, check_integer, check_order
from rlvr_jax.ops.masked import masked_count, masked_fill, mean_metric, upcast
from rlvr_jax.reweighting.base import Reweighting
from rlvr_jax.types import Array, Metrics

CHANNELS = ("both", "shared", "residual", "amplified")


class SaltResult(NamedTuple):
  """SALT's result for the coefficients A of one block, or of n blocks with a leading axis n.

  The symbols are those of `salt`.
  """

  coefficients: Array  # f32[b], A'
  shared: Array  # f32[b], P_k A
  residual: Array  # f32[b], (I − P_k) A⁺
  explored: Array  # f32[b], the part α (I − P_k) A⁺ of A'; 0 if channels = "shared"
  alpha: Array  # f32[], α, the weight of the residual
  rank: Array  # i32[], k
  participation_ratio: Array  # f32[]
  effective_rollouts: Array  # f32[], n_eff
  several: Array  # bool[], whether the block has two valid rollouts or more
  usable: Array  # bool[], `several`, and the Gram matrix is finite and not all zero
  acts: Array  # bool[], `usable`, and Σ A² K_ii > 0; otherwise A' = A


def salt_coefficients(
  coefficients: Array,
  gram: Array,
  valid: Array,
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
  """A' of one block, by default P_k A + α (I − P_k) A⁺; see `salt` for the hyper-parameters.

  Args:
    coefficients: f32[b], A, b ≥ 2.
    gram: f32[b, b], inner products of per-rollout gradient features, in any unit; 0 for rollouts
      that are not valid.
    valid: bool[b]; A' is 0 where `valid` is False.
    key: random key; only `random_subspace` uses it.
  """
  coefficients, count = masked_fill(coefficients, valid), masked_count(valid)
  spectrum = spectral.spectrum(gram)
  ratio = spectral.participation_ratio(gram)
  rank = spectral.subspace_rank(
    spectrum.eigenvalues, ratio, count, scale=rank_scale, minimum=min_rank, maximum=max_rank
  )
  vectors = spectrum.vectors
  if random_subspace:
    vectors = spectral.random_basis(key, valid, vectors.dtype)
  n_eff = spectral.effective_rollouts(coefficients, gram)
  alpha = jnp.clip(1 - n_eff, alpha_min, alpha_max)

  shared = spectral.project(vectors, rank, coefficients)
  source = jnp.maximum(coefficients, 0) if positive_part else coefficients
  residual = source - spectral.project(vectors, rank, source)
  explored = (0.0 if channels == "shared" else alpha) * residual
  kept = {"residual": jnp.zeros_like(shared), "amplified": coefficients}.get(channels, shared)
  reweighted = kept + explored
  several = count >= 2
  acts = several & spectral.carries_gradient(coefficients, gram)
  reweighted = masked_fill(jnp.where(acts, reweighted, coefficients), valid)
  return SaltResult(
    coefficients=reweighted.astype(coefficients.dtype),
    shared=shared,
    residual=residual,
    explored=explored,
    alpha=alpha,
    rank=rank,
    participation_ratio=ratio,
    effective_rollouts=n_eff,
    several=several,
    usable=several & spectrum.usable,
    acts=acts,
  )


def salt_metrics(coefficients: Array, result: SaltResult) -> Metrics:
  """Metrics of n blocks, from A f32[n, b] and SALT's result.

  Metrics of the Gram matrix are means over the blocks with a usable Gram matrix. Metrics of A are
  means over the blocks in which SALT acts, so that groups without a signal do not dilute them.
  Blocks with fewer than two valid rollouts do not count.
  """
  # Coefficients are divided by the largest, whose square may exceed float32's range.
  largest = jnp.max(jnp.abs(coefficients), axis=-1, keepdims=True)
  unit = jnp.where(largest > 0, largest, 1.0)
  norm = lambda x: jnp.linalg.norm(x / unit, axis=-1)
  size, after = jnp.where(result.acts, norm(coefficients), 1.0), norm(result.coefficients)
  gram_values = {
    "participation_ratio": result.participation_ratio,
    "rank": result.rank,
  }
  coefficient_values = {
    "effective_rollouts": result.effective_rollouts,
    "alpha": result.alpha,
    "coefficient_change": norm(result.coefficients - coefficients) / size,
    "shared_share": (norm(result.shared) / size) ** 2,
    "exploration_share": (norm(result.explored) / jnp.where(after > 0, after, 1.0)) ** 2,
  }
  metrics = {name: mean_metric(x, result.usable) for name, x in gram_values.items()}
  metrics |= {name: mean_metric(x, result.acts) for name, x in coefficient_values.items()}
  metrics["unusable_gram"] = mean_metric(~result.usable, result.several)
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
  scope: str | int = "batch",
) -> Reweighting:
  """A' = P_k A + α (I − P_k) A⁺: full weight on shared directions, weight α on the residual.

  A⁺ = max(A, 0). P_k projects onto the top k eigenvectors of the Gram matrix K of a block's
  gradient features. k = clip(round(rank_scale·PR), min_rank, min(max_rank, n−1, m)), where PR is
  the participation ratio of K (`ops.spectral`), n the number of valid rollouts, and m the number of
  eigenvalues above 1e-6 times the largest. α = clip(1 − n_eff, alpha_min, alpha_max), where n_eff
  is the effective number of rollouts (`ops.spectral`). A' does not change if all gradients are
  scaled. A' = A if K is zero or not finite, if every rollout has the coefficient 0 or the
  gradient 0, or if n < 2.

  Ablations: alpha_min = alpha_max fixes α, min_rank = max_rank fixes k, and the last four arguments
  select the other ablations.

  Args:
    rank_scale: above 0, factor on the participation ratio.
    min_rank: ≥ 1.
    max_rank: ≥ min_rank.
    alpha_min: ≥ 0.
    alpha_max: ≥ alpha_min. Since 1 − n_eff ≤ 1, a value above 1 has no effect of its own; it only
      permits an alpha_min above 1.
    positive_part: whether the residual is computed from A⁺; otherwise from A.
    channels: "both": the sum above, the authors' released form; "shared": P_k A only; "residual":
      α (I − P_k) A⁺ only; "amplified": A + α (I − P_k) A⁺. **open**: the paper says that the
      residual is amplified, but the released form removes (I − P_k) A, and its α ≤ 1 attenuates the
      residual.
    random_subspace: whether P_k projects onto k random directions, sampled with the key for each
      call and block.
    scope: the block that has one Gram matrix: "batch", "group", or a number of consecutive rollouts
      that divides B.
  Raises:
    ValueError: a hyper-parameter is out of range; or, at trace time, a block has one rollout.
  Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make
    Them Matter" (arXiv:2606.05800), §3, and the authors' code.
  """
  check_between("salt", "rank_scale", rank_scale, low=0.0, open_low=True)
  check_integer("salt", "min_rank", min_rank, low=1)
  check_integer("salt", "max_rank", max_rank, low=1)
  check_order("salt", ("min_rank", min_rank), ("max_rank", max_rank))
  check_between("salt", "alpha_min", alpha_min, low=0.0)
  check_between("salt", "alpha_max", alpha_max, low=0.0)
  check_order("salt", ("alpha_min", alpha_min), ("alpha_max", alpha_max))
  check_choice("salt", "positive_part", positive_part, (True, False))
  check_choice("salt", "channels", channels, CHANNELS)
  if channels == "shared":
    of_residual = dict(alpha_min=alpha_min, alpha_max=alpha_max, positive_part=positive_part)
    defaults = dict(alpha_min=0.0, alpha_max=1.0, positive_part=True)
    for name, value in of_residual.items():
      if value != defaults[name]:
        raise ValueError(
          f"salt: {name} = {value} has no effect with channels = 'shared', which has no residual;"
          " leave one of them out"
        )
  check_choice("salt", "random_subspace", random_subspace, (True, False))
  if scope not in ("batch", "group") and (not isinstance(scope, int) or scope < 2):
    raise ValueError(
      f"salt: scope = {scope!r} is not 'batch', 'group' or a number of rollouts ≥ 2, such as"
      " scope=8 (a micro-batch cannot be a scope: its number of rollouts varies)"
    )
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

  def apply(
    coefficients: Array, gram: Array | None, valid: Array, key: Array
  ) -> tuple[Array, Metrics]:
    chex.assert_rank(coefficients, 2)
    blocks, size = coefficients.shape
    if size < 2:
      raise ValueError(
        f"reweighting 'salt' needs blocks of 2 or more rollouts, but scope = {scope!r} gives blocks"
        f" of {size} rollout; set scope to 'batch', or use larger groups"
      )
    assert gram is not None, "needs_gram"
    chex.assert_shape(gram, (blocks, size, size))
    # Coefficients are constants for differentiation: eigenvectors of equal eigenvalues have no
    # derivative.
    coefficients, gram = jax.lax.stop_gradient((upcast(coefficients), upcast(gram)))
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(blocks))
    result = jax.vmap(block)(coefficients, gram, valid, keys)
    return result.coefficients, salt_metrics(coefficients, result)

  return Reweighting(apply, needs_gram=True, scope=scope)
