"""The gradient of an update, from one micro-batch or accumulated over several micro-batches.

Phase 1, without gradient, computes coefficients, and the statistics of the full batch that the
reweighting and the loss need. Phase 2, with gradient, takes these coefficients and statistics as
constants. It adds up the numerator and the denominator of the loss over all micro-batches, and
divides them at the end. If every batch of the run is one micro-batch, one forward pass serves both
phases, see `rows_if_accumulating`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.ops import reductions
from rlvr_jax.types import Array, Forward, Metrics, Packed, Params, Sampling, TrainBatch
from rlvr_jax.update.objective import (
  Constants,
  Estimator,
  Method,
  Scores,
  fold_micro_batches,
  in_micro_batch,
  make_constants,
  policy_forward,
  rows_if_accumulating,
  surrogate,
)


def update_gradient(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  estimate: Estimator,
  key: Array,
  *,
  method: Method,
  teacher: Any = None,
) -> tuple[tuple[Array, Metrics], Params]:
  """One update's surrogate loss f32[] with metrics, and the gradient of this loss.

  Args:
    trained: the parameters with respect to which the gradient is taken.
    frozen: the network's other parameters; {} if all are trained.
    estimate: batch → `objective.Estimate`, with the coefficients before a reweighting.
    key: the key for the randomness of a reweighting.
    teacher: as for `policy_forward`.
  """
  packed = rows_if_accumulating(batch)
  if packed is not None:
    constants = first_phase(trained, frozen, batch, estimate, key, method=method, teacher=teacher)
    (loss, metrics), gradient = second_phase(
      trained, frozen, batch, packed, constants, method=method, teacher=teacher
    )
    return (loss, {**constants.metrics, **metrics}), gradient

  # With a single micro-batch, the first phase uses the forward pass of the second.
  def constants_of(scores, forward):
    return make_constants(trained, frozen, batch, scores, forward, estimate, key, method=method)

  (total, (weight, metrics)), gradient = micro_gradient(
    trained,
    frozen,
    batch,
    0,
    constants_of,
    method=method,
    squares=method.needs_squares,
    teacher=teacher,
  )
  return divide_sums(total, weight, metrics, gradient, trained)


def first_phase(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  estimate: Estimator,
  key: Array,
  *,
  method: Method,
  teacher: Any = None,
) -> Constants:
  """The constants that phase 1 computes, in its own forward pass if `method.has_first_phase`."""
  scores, forward = None, None
  if method.has_first_phase:
    scores, forward = batch_forward(
      trained, frozen, batch, method=method, squares=method.needs_squares, teacher=teacher
    )
  return make_constants(trained, frozen, batch, scores, forward, estimate, key, method=method)


def policy_logprobs(
  trained: Params, frozen: Params, batch: TrainBatch, *, method: Method
) -> tuple[Array, Array]:
  """The policy's log-probability and entropy (nats) of every loss token, each f32[P, G, T]."""
  method = method._replace(gram=None)
  scores, _ = batch_forward(trained, frozen, batch, method=method)
  return scores.logprobs, scores.entropy


def batch_forward(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  *,
  method: Method,
  sampling: Sampling | None = None,
  masses: bool = False,
  squares: bool = False,
  teacher: Any = None,
) -> tuple[Scores, Forward | None]:
  """The results of `policy_forward` for a full batch, computed micro-batch by micro-batch."""
  part = functools.partial(
    policy_forward,
    trained,
    frozen,
    batch,
    method=method,
    sampling=sampling,
    masses=masses,
    squares=squares,
    teacher=teacher,
  )
  packed = rows_if_accumulating(batch)
  if packed is None:
    return part()

  def add(index, total, length):
    (scores, forward), (more_scores, more_forward) = total, part(index, length=length)
    put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, index, 0)
    # A token's values are 0 in all micro-batches except the token's own.
    return jax.tree.map(jnp.add, scores, more_scores), jax.tree.map(put, forward, more_forward)

  scores, forward = jax.eval_shape(part)
  zeros = lambda x: jnp.zeros(x.shape, x.dtype)
  zero_rows = lambda x: jnp.zeros((packed.tokens.shape[0], *x.shape[1:]), x.dtype)
  start = jax.tree.map(zeros, scores), jax.tree.map(zero_rows, forward)
  return fold_micro_batches(packed, add, start)


def second_phase(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  packed: Packed,
  constants: Constants,
  *,
  method: Method,
  teacher: Any = None,
) -> tuple[tuple[Array, Metrics], Params]:
  """Phase 2 under accumulation: the surrogate loss f32[] with metrics, and the loss's gradient.

  Σ total and Σ weight, the numerator and the denominator of the loss, are divided only at the end.
  So several micro-batches give the gradient of the full batch.
  """
  method = method._replace(gram=None)  # only phase 1 needs the Gram matrix
  # `update_gradient` adds the metrics of phase 1 once, since these cover the full batch.
  without_metrics = constants._replace(metrics={})

  def micro(index, length=None):
    mask = jnp.where(in_micro_batch(packed, index), batch.mask, 0)
    masked = dataclasses.replace(batch, mask=mask)
    return micro_gradient(
      trained,
      frozen,
      masked,
      index,
      lambda *_: without_metrics,
      method=method,
      length=length,
      teacher=teacher,
    )

  def accumulate(index, sums, length):
    (total, weight, metrics), gradient = sums
    (more, (more_weight, more_metrics)), more_gradient = micro(index, length)
    metrics = reductions.merge_metrics(metrics, more_metrics)
    gradient = jax.tree.map(lambda a, g: a + g.astype(a.dtype), gradient, more_gradient)
    return (total + more, weight + more_weight, metrics), gradient

  (total, (weight, metrics)), _ = jax.eval_shape(micro, 0)
  zeros = lambda x: jnp.zeros(x.shape, x.dtype)
  wide_zeros = lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))
  start = (zeros(total), zeros(weight), reductions.empty(metrics))
  (total, weight, metrics), gradient = fold_micro_batches(
    packed, accumulate, (start, jax.tree.map(wide_zeros, trained))
  )
  if method.aggregation == "constant":  # every micro-batch adds the weight of the full batch
    weight /= packed.num_micro_batches
  return divide_sums(total, weight, metrics, gradient, trained)


def divide_sums(
  total: Array, weight: Array, metrics: Metrics, gradient: Params, trained: Params
) -> tuple[tuple[Array, Metrics], Params]:
  """Divides sums over a full batch: returns ((total/weight, metrics), gradient/weight)."""
  weight = jnp.where(weight == 0, 1, weight)  # without loss tokens the total and the loss are 0
  gradient = jax.tree.map(lambda g, p: (g / weight).astype(p.dtype), gradient, trained)
  return (total / weight, metrics), gradient


def micro_gradient(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  index: Array | int,
  constants_of: Callable[[Scores, Forward | None], Constants],
  *,
  method: Method,
  length: int | None = None,
  squares: bool = False,
  teacher: Any = None,
) -> tuple[tuple[Array, tuple[Array, Metrics]], Params]:
  """One micro-batch's ((Σ total, (Σ weight, metrics)), gradient of Σ total).

  Σ total and Σ weight are as in `surrogate`. The network runs forward and backward once. Its
  log-probabilities give the constants; then the loss's gradient with respect to the
  log-probabilities is pulled back through the network.

  Args:
    batch: the batch, with a mask that is 0 for the tokens of other micro-batches.
    index: the index of the micro-batch.
    constants_of: (scores, forward) → constants; `forward` is None unless the Gram matrix needs it.
    length, squares, teacher: as for `policy_forward`.
  """
  score = lambda trained: policy_forward(
    trained,
    frozen,
    batch,
    index,
    method=method,
    length=length,
    squares=squares,
    teacher=teacher,
  )
  scores, pullback, forward = jax.vjp(score, trained, has_aux=True)
  constants = constants_of(scores, forward)
  loss = functools.partial(surrogate, batch=batch, constants=constants, method=method)
  (total, aux), cotangents = jax.value_and_grad(loss, has_aux=True)(scores)
  (gradient,) = pullback(cotangents)
  return (total, aux), gradient
