"""The components of an update, and what they compute on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlvr_jax.ops import kl
from rlvr_jax.ops.aggregate import aggregate
from rlvr_jax.ops.logprobs import token_logprobs, token_statistics
from rlvr_jax.ops.masked import mean_metric
from rlvr_jax.ops.update_metrics import policy_metrics
from rlvr_jax.types import Array, Forward, Mean, Metrics, Params, Sampling, TrainBatch

REFERENCE_KL_ESTIMATORS = ("k1", "k2", "k3")


class Method(NamedTuple):
  """The components of an update, which the configuration chooses.

  Attributes:
    model: provides `combine`, `response_hidden` and `head`.
    optimizer: an optax transformation.
    learning_rate: the optimizer's, as a function of the number of updates; used for metrics only.
    advantage: rewards → coefficients, see `advantages.Advantage`.
    coefficient_metrics: (coefficients, rewards, correct) → metrics.
    reweighting: coefficients → coefficients, see `reweighting.Reweighting`.
    loss: per-token loss, see `losses.Loss`.
    aggregation: how per-token losses become one number, see `ops.aggregate`.
    max_response_length: tokens; the denominator of the `constant` aggregation.
    temperature: of the target policy π, the one that is trained.
    reference_kl: coefficient of KL(π‖π_reference); 0 leaves the term out.
    reference_kl_estimator: k1, k2 or k3.
    veto: takes tokens of negative-advantage rollouts out of the loss, see `ops.veto`; or None.
    entropy_bonus: coefficient of the policy's entropy; 0 leaves the term out.
    num_micro_batches: the prompts of a batch are split into this many.
    gram: computes the Gram matrix that a reweighting needs, see `geometry.GramFn`; or None.
    gram_context: properties of the run that `gram` needs, see `geometry.GramContext`; or None.
    seed: of the randomness within an update.
    sources: names of the policies that the rollouts are sampled from.
  """

  model: Any
  optimizer: optax.GradientTransformation
  learning_rate: optax.Schedule
  advantage: Any
  coefficient_metrics: Callable[[Array, Array, Array], Metrics]
  reweighting: Any
  loss: Any
  aggregation: str
  max_response_length: int
  temperature: float = 1.0
  reference_kl: float = 0.0
  reference_kl_estimator: str = "k3"
  veto: Callable[[Array, Array, TrainBatch, Array], tuple[Array, Array, Metrics]] | None = None
  entropy_bonus: float = 0.0
  num_micro_batches: int = 1
  gram: Any = None
  gram_context: Any = None
  seed: int = 0
  sources: tuple[str, ...] = ("policy",)


class Constants(NamedTuple):
  """Inputs of the loss that the gradient treats as constants."""

  coefficients: Array  # f32[P, G], reweighted
  statistics: Any  # of the full batch, see `losses.Loss`; None if the loss needs none
  metrics: Metrics


def policy_logprobs(
  trained: Params, frozen: Params, batch: TrainBatch, *, method: Method
) -> tuple[Array, Array]:
  """log π and entropy (nats) of every response token, each f32[P, G, T]."""
  return policy_forward(trained, frozen, batch, method=method._replace(gram=None))[0]


def policy_forward(
  trained: Params, frozen: Params, batch: TrainBatch, *, method: Method
) -> tuple[tuple[Array, Array], Forward | None]:
  """((log π, entropy) as `policy_logprobs`, what the Gram matrix needs, or None)."""
  params = method.model.combine(trained, frozen)
  hidden = method.model.response_hidden(params, batch.prompts, batch.tokens)
  head, sampling = method.model.head(params), Sampling(temperature=method.temperature)
  mesh = method.model.mesh
  if method.gram is None or not method.gram.needs_forward:
    return token_logprobs(hidden, head, batch.tokens, sampling, mesh=mesh), None
  project = method.gram.projection
  projection = None if project is None else project(head.kernel.shape[1])
  found = token_statistics(hidden, head, batch.tokens, sampling, projection=projection, mesh=mesh)
  forward = Forward(hidden, found.log_normalizers, found.projected)
  return (found.logprobs, found.entropy), forward


def reweight(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  forward: Forward | None,
  coefficients: Array,
  key: Array,
  *,
  method: Method,
  index: Array | int = 0,
) -> tuple[Array, Metrics]:
  """(coefficients f32[P, G], metrics), by blocks of the reweighting's scope.

  Args:
    index: of the micro-batch, where `batch` is one of several that have Gram matrices of their own.
  """
  P, G = coefficients.shape
  by_group = method.reweighting.scope == "group"
  blocks = coefficients if by_group else coefficients.reshape(1, P * G)
  gram, metrics = None, {}
  if method.reweighting.needs_gram:
    forward = jax.lax.stop_gradient(forward)
    with jax.named_scope("gram"):
      gram = method.gram.gram(trained, frozen, batch, forward, method.gram_context)
    metrics = _gram_metrics(trained, frozen, forward, method)
    if by_group:
      gram = jnp.moveaxis(jnp.diagonal(gram.reshape(P, G, P, G), axis1=0, axis2=2), -1, 0)
    else:
      gram = gram[None]
  key = jax.random.fold_in(key, index)
  reweighted, reweighting_metrics = method.reweighting.apply(blocks, gram, key)
  reweighted = jax.lax.stop_gradient(reweighted.reshape(P, G))
  return reweighted, {**metrics, **reweighting_metrics}


def _gram_metrics(
  trained: Params, frozen: Params, forward: Forward | None, method: Method
) -> Metrics:
  """The cost of the Gram matrix as metrics; constant over a run."""
  own_forward = jnp.float32(method.num_micro_batches > 1)
  metrics: Metrics = {"gram/forward_only_passes": Mean(total=own_forward, weight=jnp.float32(1))}
  if forward is not None:
    kernel = method.model.head(method.model.combine(trained, frozen)).kernel
    metrics |= method.gram.cost(forward.hidden, kernel, method.gram_context)
  return metrics


def loss_statistics(
  logprobs: Array | None, batch: TrainBatch, coefficients: Array, method: Method
) -> Any:
  """The statistics of the full batch that the loss needs, or None."""
  if method.loss.statistics is None:
    return None
  return method.loss.statistics(logprobs, batch, coefficients)


def surrogate(
  logprobs: Array, entropy: Array, batch: TrainBatch, constants: Constants, *, method: Method
) -> tuple[Array, tuple[Array, Metrics]]:
  """(Σ total, (Σ weight, metrics)) of one micro-batch, as a function of log π and entropy."""
  coefficients = constants.coefficients
  losses, metrics = method.loss.per_token(logprobs, batch, coefficients, constants.statistics)
  mask = batch.mask
  if method.veto is not None:
    losses, mask, veto_metrics = method.veto(losses, logprobs, batch, coefficients)
    metrics = {**metrics, **veto_metrics}
  if method.reference_kl:
    estimate = getattr(kl, method.reference_kl_estimator)
    divergence = estimate(logprobs, batch.reference_logprobs, batch.mask)
    losses += method.reference_kl * divergence
    metrics = {**metrics, "reference/kl": mean_metric(divergence, batch.mask)}
  if method.entropy_bonus:
    losses -= method.entropy_bonus * entropy
  pair = aggregate(
    losses, mask, how=method.aggregation, max_response_length=method.max_response_length
  )
  shared = policy_metrics(logprobs, entropy, batch, coefficients, method.sources)
  metrics = jax.lax.stop_gradient({**metrics, **constants.metrics, **shared})
  return pair.total, (jax.lax.stop_gradient(pair.weight), metrics)
