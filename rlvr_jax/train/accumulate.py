"""The gradient of an update, in one micro-batch or accumulated over several.

Phase 1, without gradient: coefficients, and whatever the reweighting and the loss need of the whole
batch. Phase 2, with gradient: micro-batches receive both as constants and add up undivided sums.
Where the batch is one micro-batch, one forward pass of the network serves both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.ops import reductions
from rlvr_jax.train.objective import (
  Constants,
  Method,
  loss_statistics,
  policy_forward,
  reweight,
  surrogate,
)
from rlvr_jax.types import Array, Forward, Metrics, Params, TrainBatch


def update_gradient(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  coefficients: Array,
  key: Array,
  *,
  method: Method,
) -> tuple[tuple[Array, Metrics], Params]:
  """((surrogate loss f32[], metrics), its gradient) of one update, both phases.

  Args:
    trained: the gradient is with respect to these.
    frozen: the network's other parameters; {} where all are trained.
    coefficients: f32[P, G], before the reweighting.
    key: of the randomness of a reweighting.
  """
  if method.num_micro_batches > 1:
    constants = first_phase(trained, frozen, batch, coefficients, key, method=method)
    (loss, metrics), gradient = second_phase(trained, frozen, batch, constants, method=method)
    return (loss, {**constants.metrics, **metrics}), gradient

  def constants_of(logprobs, forward):
    reweighted, metrics = reweight(
      trained, frozen, batch, forward, coefficients, key, method=method
    )
    return Constants(reweighted, loss_statistics(logprobs, batch, reweighted, method), metrics)

  (total, (weight, metrics)), gradient = micro_gradient(
    trained, frozen, batch, constants_of, method=method
  )
  return divided(total, weight, metrics, gradient, trained)


def first_phase(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  coefficients: Array,
  key: Array,
  *,
  method: Method,
) -> Constants:
  """Phase 1 under accumulation: a forward pass of its own, where anything needs one."""
  logprobs = None
  if method.reweighting.needs_gram and method.reweighting.scope != "batch":
    logprobs, coefficients, metrics = _reweight_by_micro_batch(
      trained, frozen, batch, coefficients, key, method=method
    )
  else:
    forward = None
    if method.reweighting.needs_gram or method.loss.statistics is not None:
      logprobs, forward = batch_forward(trained, frozen, batch, method=method)
    coefficients, metrics = reweight(
      trained, frozen, batch, forward, coefficients, key, method=method
    )
  statistics = loss_statistics(logprobs, batch, coefficients, method)
  return Constants(coefficients, statistics, metrics)


def batch_forward(
  trained: Params, frozen: Params, batch: TrainBatch, *, method: Method
) -> tuple[Array, Forward | None]:
  """(log π, what the Gram matrix needs) of a whole batch, micro-batch by micro-batch."""

  def score(_, micro):
    (logprobs, _), forward = policy_forward(trained, frozen, micro, method=method)
    return None, (logprobs, forward)

  _, found = jax.lax.scan(score, None, split_micro_batches(batch, method.num_micro_batches))
  return join_micro_batches(found)


def _reweight_by_micro_batch(trained, frozen, batch, coefficients, key, *, method):
  """(log π, coefficients, metrics), with Gram matrices of single micro-batches alone."""

  def score(index, micro):
    batch, coefficients = micro
    (logprobs, _), forward = policy_forward(trained, frozen, batch, method=method)
    coefficients, metrics = reweight(
      trained, frozen, batch, forward, coefficients, key, method=method, index=index
    )
    return index + 1, (logprobs, coefficients, metrics)

  micro_batches = split_micro_batches((batch, coefficients), method.num_micro_batches)
  _, (logprobs, coefficients, metrics) = jax.lax.scan(score, 0, micro_batches)
  logprobs, coefficients = join_micro_batches((logprobs, coefficients))
  return logprobs, coefficients, reductions.stacked(metrics)


def second_phase(
  trained: Params, frozen: Params, batch: TrainBatch, constants: Constants, *, method: Method
) -> tuple[tuple[Array, Metrics], Params]:
  """Phase 2 under accumulation: ((surrogate loss f32[], metrics), its gradient).

  The sums Σ total and Σ weight are divided once, at the end, so that k micro-batches give the
  gradient of one batch.
  """
  method = method._replace(gram=None)  # it has done its work

  def accumulate(gradient, micro):
    batch, coefficients = micro
    here = Constants(coefficients, constants.statistics, {})
    (total, (weight, metrics)), micro = micro_gradient(
      trained, frozen, batch, lambda *_: here, method=method
    )
    gradient = jax.tree.map(lambda a, g: a + g.astype(a.dtype), gradient, micro)
    return gradient, (total, weight, metrics)

  wide = lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))
  micro_batches = split_micro_batches((batch, constants.coefficients), method.num_micro_batches)
  gradient, (totals, weights, metrics) = jax.lax.scan(
    accumulate, jax.tree.map(wide, trained), micro_batches
  )
  return divided(totals.sum(), weights.sum(), reductions.stacked(metrics), gradient, trained)


def divided(
  total: Array, weight: Array, metrics: Metrics, gradient: Params, trained: Params
) -> tuple[tuple[Array, Metrics], Params]:
  """((total/weight, metrics), gradient/weight) of undivided sums over a whole batch."""
  weight = jnp.where(weight == 0, 1, weight)  # no loss token: the total is 0, and so is the loss
  gradient = jax.tree.map(lambda g, p: (g / weight).astype(p.dtype), gradient, trained)
  return (total / weight, metrics), gradient


def micro_gradient(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  constants_of: Callable[[Array, Forward | None], Constants],
  *,
  method: Method,
) -> tuple[tuple[Array, tuple[Array, Metrics]], Params]:
  """((Σ total, (Σ weight, metrics)), gradient of Σ total) of one micro-batch.

  The network runs once, forward and back: the constants are made of its log-probabilities before
  the loss's gradient with respect to these is pulled back through it.
  """
  score = functools.partial(policy_forward, frozen=frozen, batch=batch, method=method)
  (logprobs, entropy), pullback, forward = jax.vjp(score, trained, has_aux=True)
  constants = constants_of(jax.lax.stop_gradient(logprobs), forward)
  loss = functools.partial(surrogate, batch=batch, constants=constants, method=method)
  (total, aux), cotangents = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
    logprobs, entropy
  )
  (gradient,) = pullback(cotangents)
  return (total, aux), gradient


def split_micro_batches(tree: Any, num_micro_batches: int) -> Any:
  """[P, ...] → [k, P/k, ...]; micro-batch j takes prompts j, j + k, …

  Interleaved, so that with P sharded over devices every micro-batch is spread over all of them.
  """
  k = num_micro_batches
  return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, k, *x.shape[1:]), 0, 1), tree)


def join_micro_batches(tree: Any) -> Any:
  """The inverse of `split_micro_batches`."""
  return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)
