"""The output head's Gram matrix, estimated by random projections of both factors of gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rlvr_jax.geometry.base import GramContext, GramFn
from rlvr_jax.geometry.by_rollout import choose_tile, find_places, outer_sums
from rlvr_jax.ops.checks import check_integer
from rlvr_jax.ops.masked import masked_fill
from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array, Forward, Mean, Metrics, Params, TrainBatch


def sketch(
  *, copies: int = 64, hidden_size: int = 64, vocabulary_size: int = 64, seed: int = 0
) -> GramFn:
  """An unbiased, cheap estimate of the Gram matrix K of g_i = Σ_t h[i,t] ⊗ d[i,t].

  Each of s independent copies projects both factors with random signs, R_h [D, a] and R_v [V, b],

      g̃_i = Σ_t (R_hᵀ h[i,t]) ⊗ (R_vᵀ d[i,t]) / √(ab),      K̂ = mean over copies of (g̃_i · g̃_j).

  h are the hidden states, and d the derivatives of −log π with respect to h·W, where W is the
  head's kernel. The error of one copy scales as √(1/a + 1/b); averaging s copies divides this error
  by √s.

  A head product is the product of all hidden states and W. The forward pass accumulates R_vᵀd over
  the vocabulary, at the cost of s·b/D head products. The rest costs s·a/V + s·a·b·(1 + B²/n)/(D·V)
  head products, where n is the number of positions in the rows.

  A′, the coefficients that SALT computes from K, are more sensitive to the error than K. A′ jumps
  if the rank k of SALT's shared subspace changes, or if one of the last directions in this subspace
  changes. With the default sizes A′ is within 10 % of the exact A′ on 16 and 64 rollouts of a real
  model. With a sixteenth of the copies the error is 28 %, see docs/reading_geometry.md. The default
  sizes cost 4096/D head products. The exact `streaming` costs 2 + B/T head products, which is more
  if D ≥ 2048. For the feature "sampled", `streaming` always costs less.

  Args:
    copies: s.
    hidden_size: a.
    vocabulary_size: b.
    seed: seed of the signs, which are the same for every batch.
  Raises:
    ValueError: a size is below 1.
  Source: methods of "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How
    to Make Them Matter" (arXiv:2606.05800), §3; Kronecker sketches: Pham and Pagh 2013.
  """
  sizes = dict(copies=copies, hidden_size=hidden_size, vocabulary_size=vocabulary_size)
  for name, size in sizes.items():
    check_integer("sketch", name, size, low=1)
  estimate = functools.partial(
    sketch_with_error,
    copies=copies,
    hidden_size=hidden_size,
    vocabulary_size=vocabulary_size,
    seed=seed,
  )

  def cost(batch: TrainBatch, hidden: Array, kernel: Array, context: GramContext) -> Metrics:
    del context
    used = 1 if batch.packed is None else batch.packed.num_micro_batches
    rollouts, places = batch.mask.shape[0] * batch.mask.shape[1], used * hidden[0, ..., 0].size
    (D, V), pairs = kernel.shape, hidden_size * vocabulary_size
    pair_products = pairs * (1 + rollouts**2 / places) / (D * V)
    products = copies * (vocabulary_size / D + hidden_size / V + pair_products)
    return {"gram/head_products": Mean(total=jnp.float32(products), weight=jnp.float32(1))}

  return GramFn(
    gram=lambda *args: estimate(*args)[0],
    cost=cost,
    error=(lambda *args: estimate(*args)[1]) if copies > 1 else None,
    projection=lambda V: _signs(seed, "vocabulary", (V, copies * vocabulary_size)),
  )


def sketch_with_error(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  forward: Forward | None,
  context: GramContext,
  *,
  copies: int,  # s; the estimate of the error needs s ≥ 2
  hidden_size: int,
  vocabulary_size: int,
  seed: int,
) -> tuple[Array, Array]:
  """The estimate of `sketch` with the same arguments, and an estimate of its relative error.

  Args:
    forward: results of the forward pass; `projected` must come from the projection of `sketch`.
  Returns:
    f32[B, B], the estimate K̂ of K; and f32[], an estimate of the error ‖K̂ − K‖_F/‖K‖_F. The
    error is estimated from the spread of the copies' estimates K_c:
    √(Σ_c ‖K_c − K̂‖²_F / (s(s−1))) / ‖K̂‖_F, or 0 if K̂ is 0.
  """
  del trained, frozen, context
  assert forward is not None and forward.projected is not None
  projected = forward.projected
  places = find_places(batch)
  tile = choose_tile(batch)
  M, _, _, D = forward.hidden.shape
  dtype = jnp.promote_types(forward.hidden.dtype, jnp.float32)
  signs = _signs(seed, "hidden", (D, copies * hidden_size)).astype(forward.hidden.dtype)
  split_copies = lambda x, size: jnp.swapaxes(x.reshape(-1, copies, size), 0, 1)

  def add(index, features):
    in_loss = places.in_loss[index][..., None]
    hidden = forward.hidden[index]
    hidden = jnp.where(in_loss, hidden, jnp.zeros((), hidden.dtype)).reshape(-1, D)
    left = split_copies(jnp.dot(hidden, signs, preferred_element_type=dtype), hidden_size)
    right = split_copies(masked_fill(projected[index], in_loss), vocabulary_size)
    add_copy = lambda total, x, y: outer_sums(total, x, y, places.spans, index, tile)
    return jax.vmap(add_copy)(features, left, right)

  features = jnp.zeros((copies, places.spans.firsts.shape[0], hidden_size, vocabulary_size), dtype)
  count = places.num_micro_batches
  features = add(0, features) if M == 1 else jax.lax.fori_loop(0, count, add, features)
  grams = jnp.einsum("ciab,cjab->cij", features, features, precision=EXACT)
  grams /= hidden_size * vocabulary_size
  gram = jnp.mean(grams, axis=0)
  spread = jnp.sqrt(jnp.sum((grams - gram) ** 2) / (copies * (copies - 1.0)))
  size = jnp.linalg.norm(gram)
  return gram, jnp.where(size > 0, spread / jnp.where(size > 0, size, 1.0), 0.0)


def _signs(seed: int, factor: str, shape: tuple[int, int]) -> Array:
  """Random signs ±1 in float32; exact in every dtype."""
  key = jax.random.fold_in(jax.random.key(seed), ("hidden", "vocabulary").index(factor))
  return jax.random.rademacher(key, shape, jnp.float32)
