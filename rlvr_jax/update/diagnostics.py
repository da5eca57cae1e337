"""Diagnostics of the gradient geometry, computed before an update on the update's batch."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from rlvr_jax.geometry import (
  FEATURES,
  GramFn,
  diagnostics,
  num_selected,
  per_rollout,
  streaming,
  updates,
)
from rlvr_jax.geometry.agreement import gram_agreement
from rlvr_jax.ops.expert_load import largest_loads
from rlvr_jax.ops.keys import key_for
from rlvr_jax.ops.layers import SPARSE, layers_in
from rlvr_jax.ops.masked import masked_mean
from rlvr_jax.ops.ratios import log_ratios
from rlvr_jax.ops.route_changes import changes_by_layer
from rlvr_jax.types import Array, Mean, Params, TrainBatch, TrainState
from rlvr_jax.update.accumulate import batch_forward, first_phase, policy_logprobs
from rlvr_jax.update.objective import (
  Constants,
  Method,
  Scores,
  estimate_coefficients,
  policy_losses,
)
from rlvr_jax.update.teaching import add_taught

Diagnostics: TypeAlias = tuple[dict[str, Array], dict[str, Array]]  # (metrics, arrays)
# Array of marks on tokens → the metric that is its mean.
MARKS = {
  "token_clipped": "loss/clip_fraction",
  "token_dropped": "correction/dropped",
  "token_vetoed": "veto/token_fraction",
}


def measure(
  state: TrainState,
  frozen: Params,
  initial: Params,
  batch: TrainBatch,
  teacher: Any = None,
  *,
  method: Method,
  gram: GramFn,
  compared: str,
) -> Diagnostics:
  """Measures the geometry of the next update of `state` on `batch`; pure.

  Args:
    frozen: the parameters that are not trained; {} if all parameters are trained.
    initial: the trained parameters before the first update.
    teacher: as for `step.train_step`.
    method: the components of the update.
    gram: computes the Gram matrix of its feature, which is one of the two in `geometry.FEATURES`.
      The other feature's Gram matrix is computed from the output head's gradients.
    compared: a selection of parameters, as in `per_rollout`; the Gram matrix of the gradients of
      these parameters is compared with the result of `gram`. "" for no comparison.
  Returns:
    Scalars and arrays. Scalars: see `geometry.diagnostics`; names of scalars that belong to the
    other feature end in that feature's name. For a mixture of experts, scalars include the largest
    load of each layer with experts. If the sampler's choices of experts are recorded, scalars also
    include, for each of these layers, the share of recorded choices that have changed. Arrays: the
    Gram matrices f32[B, B] of rollout gradients (g_i · g_j, not divided by B = P·G); f32[P, G]
    rewards, lengths, and coefficients before and after the reweighting; bool[P, G] valid; for a
    mixture f32[sparse layers, E], the number of tokens that chose each expert; and the arrays of
    `of_tokens`.
  """
  params, context = state.params, method.gram_context
  estimate = functools.partial(estimate_coefficients, state.advantage_state, method=method)
  key = key_for(method.seed, "reweighting", state.step)
  constants = first_phase(params, frozen, batch, estimate, key, method=method, teacher=teacher)
  coefficients, in_loss, _ = constants.estimate
  # Coefficients of tokens are not reweighted, and the geometry concerns rollouts.
  reweighted = coefficients if in_loss.ndim == 3 else constants.coefficients
  with_forward = method._replace(gram=gram._replace(needs_forward=True))
  scores, forward = batch_forward(params, frozen, batch, method=with_forward, teacher=teacher)
  P = batch.rewards.shape[0]
  diagnose = lambda matrix: diagnostics.diagnose(
    matrix, coefficients, reweighted, P, valid=batch.valid
  )
  matrix = gram.gram(params, frozen, batch, forward, context)
  scalars = diagnose(matrix)
  (other,) = set(FEATURES) - {gram.feature}
  other_matrix = streaming(feature=other).gram(params, frozen, batch, forward, context)
  scalars |= {f"{name}_{other}": value for name, value in diagnose(other_matrix).items()}
  scalars["geometry/advantage_logprob_covariance"] = updates.advantage_logprob_covariance(
    in_loss, scores.logprobs, batch.mask
  )
  sparse_layers = layers_in(SPARSE, method.model.config.kinds)
  if scores.changes is not None:
    scalars |= changes_by_layer(scores.changes, sparse_layers)
  scalars |= accumulated_update(params, initial, method)
  if gram.error is not None:
    scalars["geometry/gram_relative_error"] = gram.error(params, frozen, batch, forward, context)
  arrays = {"gram": matrix, f"gram_{other}": other_matrix}
  arrays |= {"coefficients": coefficients, "reweighted": reweighted}
  if scores.load is not None:
    scalars |= largest_loads(scores.load, sparse_layers)
    arrays["expert_load"] = scores.load.choices
  arrays |= {"rewards": batch.rewards, "valid": batch.valid, "lengths": batch.mask.sum(axis=-1)}
  arrays |= of_tokens(scores, batch, constants, method=method)
  if compared:
    compared_matrix = per_rollout(parameters=compared, feature=gram.feature).gram(
      params, frozen, batch, None, context
    )
    size = num_selected(params, frozen, context, parameters=compared)
    key = key_for(method.seed, "diagnostics", state.step)
    agreement = gram_agreement(matrix, compared_matrix, key, feature_dim=size)
    scalars |= {f"geometry/agreement_{k}": value for k, value in agreement._asdict().items()}
    arrays["gram_compared"] = compared_matrix
  return scalars, arrays


def of_tokens(
  scores: Scores, batch: TrainBatch, constants: Constants, *, method: Method
) -> dict[str, Array]:
  """Measurements of the update at each loss token, [P, G, T]; other entries are arbitrary.

  Returns:
    token_log_ratio: log π/β, nats.
    token_log_ratio_proximal: log π/π_prox, nats; only if the batch has `proximal_logprobs`.
    token_entropy: the token entropy of π at `method.temperature`, nats.
    token_clipped: bool, whether a bound of the loss took effect; f32 in [0, 1] for a loss with a
      smooth bound.
    token_dropped, token_vetoed: bool, whether the correction or the veto excluded the token. The
      means of the last three arrays are the metrics in `MARKS`. Each of these arrays is absent if
      the method does not make it.
  """
  logprobs, batch = scores.logprobs, add_taught(batch, scores.taught)
  arrays = {
    "token_log_ratio": log_ratios(logprobs, batch.behavior_logprobs, batch.mask),
    "token_entropy": scores.entropy,
  }
  if batch.proximal_logprobs is not None:
    arrays["token_log_ratio_proximal"] = log_ratios(logprobs, batch.proximal_logprobs, batch.mask)
  *_, metrics = policy_losses(logprobs, batch, constants, method=method)
  for name, metric_name in MARKS.items():
    metric = metrics.get(metric_name)
    if isinstance(metric, Mean) and metric.tokens is not None:
      arrays[name] = metric.tokens
  return arrays


def accumulated_update(params: Params, initial: Params, method: Method) -> dict[str, Array]:
  """Metrics of the change W_t − W_0 of the head's kernel.

  The metrics are the rank-one fraction of W_t − W_0, and ‖W_t − W_0‖² as a share of the squared
  norm of the change of all trained parameters.
  """
  path = "embedding" if method.model.config.tied_head else "head_kernel"
  if path not in params:
    return {}  # adapters do not change the head
  change = jax.tree.map(jnp.subtract, params, initial)
  head = method.model.head(params).kernel - method.model.head(initial).kernel
  return {
    "geometry/head_rank_one_fraction": updates.rank_one_fraction(head),
    "geometry/head_share": updates.head_share(change, path),
  }


def mean_entropy(trained: Params, frozen: Params, batch: TrainBatch, *, method: Method) -> Array:
  """The mean entropy over loss tokens, f32[], nats per token."""
  _, entropy = policy_logprobs(trained, frozen, batch, method=method)
  return masked_mean(entropy, batch.mask)
