"""One update of the policy, as a pure function that reads as the method.

Phase 1, without gradient: coefficients, and whatever the reweighting and the loss need of the whole
batch. Phase 2, with gradient: micro-batches receive both as constants and add up undivided sums.
Where the batch is one micro-batch, one forward pass of the network serves both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlvr_jax.ops import kl, reductions
from rlvr_jax.ops.aggregate import aggregate
from rlvr_jax.ops.keys import key_for
from rlvr_jax.ops.logprobs import token_logprobs, token_statistics
from rlvr_jax.ops.masked import mean_metric
from rlvr_jax.ops.ratios import behavior_metrics, lag_metrics, ratios_by_sign, source_metrics
from rlvr_jax.types import (
  Array,
  Forward,
  Mean,
  Metrics,
  Params,
  Sampling,
  TrainBatch,
  TrainState,
)

REFERENCE_KL_ESTIMATORS = ("k1", "k2", "k3")


class Method(NamedTuple):
  """What an update consists of; each part is chosen by the configuration.

  Attributes:
    model: gives `response_hidden` and `head`.
    optimizer: an optax transformation.
    schedule: its learning rate as a function of the updates made, reported only.
    advantage: rewards → coefficients, see `advantages.Advantage`.
    coefficient_metrics: (coefficients, rewards, correct) → metrics.
    reweighting: coefficients → coefficients, see `reweighting.Reweighting`.
    gram: the route to the Gram matrix that a reweighting reads, see `geometry.GramRoute`; or None.
    gram_setting: what the route needs to know of the run, see `geometry.Setting`; or None.
    loss: per-token loss, see `losses.Loss`.
    aggregation: how per-token losses become one number, see `ops.aggregate`.
    max_response_length: tokens; the denominator of the `constant` aggregation.
    temperature: of the target policy π.
    reference_kl: coefficient of KL(π‖π_reference); 0 leaves the term out.
    reference_kl_estimator: k1, k2 or k3.
    veto: takes tokens of negative-advantage rollouts out of the loss, see `ops.veto`; or None.
    entropy_bonus: coefficient of the policy's entropy; 0 leaves the term out.
    num_micro_batches: the prompts of a batch are split into this many.
    seed: of the randomness within an update.
    sources: names of the policies that draw rollouts; several are reported one by one.
  """

  model: Any
  optimizer: optax.GradientTransformation
  schedule: optax.Schedule
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
  gram_setting: Any = None
  seed: int = 0
  sources: tuple[str, ...] = ("policy",)


class Constants(NamedTuple):
  """What phase 1 gives phase 2."""

  coefficients: Array  # f32[P, G], reweighted
  statistics: Any  # of the whole batch, see `losses.Loss`; None where the loss needs none
  metrics: Metrics


def initial_state(method: Method, params: Params, initial_entropy: Array) -> TrainState:
  """The state before the first update; `initial_entropy` f32[] in nats per token."""
  # Distinct arrays: a donated buffer must not stand twice in one state.
  zero = lambda: jnp.zeros((), jnp.int32)
  return TrainState(
    params=params,
    opt_state=method.optimizer.init(params),
    advantage_state=method.advantage.init(initial_entropy),
    step=zero(),
    skipped=zero(),
    skipped_in_a_row=zero(),
  )


def train_step(
  state: TrainState, batch: TrainBatch, *, method: Method
) -> tuple[TrainState, dict[str, Array]]:
  """One update on one batch; to be jitted with `method` bound and the state donated.

  An update whose loss or gradient is not finite is skipped: parameters, optimizer and algorithm
  state stay as they were, and the counters say so.

  Returns:
    The next state, and metrics as scalars.
  """
  coefficients = method.advantage.apply(state.advantage_state, batch)
  metrics = method.coefficient_metrics(coefficients, batch.rewards, batch.correct)
  key = key_for(method.seed, "reweighting", state.step)
  (surrogate, update_metrics), gradient = update_gradient(
    state.params, batch, jax.lax.stop_gradient(coefficients), key, method=method
  )
  metrics = {**metrics, **update_metrics, **_batch_metrics(batch)}
  metrics |= method.advantage.metrics(state.advantage_state)
  values = reductions.values(metrics)

  norm = optax.tree.norm(gradient)
  finite = jnp.isfinite(surrogate) & jnp.isfinite(norm)
  updates, opt_state = method.optimizer.update(gradient, state.opt_state, state.params)
  solve_rate = None if batch.solve_rate is None else jnp.mean(batch.solve_rate)
  proposed = (
    optax.apply_updates(state.params, updates),
    opt_state,
    method.advantage.update(state.advantage_state, batch, values["policy/entropy"], solve_rate),
  )
  current = (state.params, state.opt_state, state.advantage_state)
  keep = lambda new, old: jnp.where(finite, new, old)
  params, opt_state, advantage_state = jax.tree.map(keep, proposed, current)

  skipped = 1 - finite.astype(jnp.int32)
  made = state.step - state.skipped  # updates that the optimizer has counted
  state = TrainState(
    params=params,
    opt_state=opt_state,
    advantage_state=advantage_state,
    step=state.step + 1,
    skipped=state.skipped + skipped,
    skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
  )
  values |= {
    "loss/surrogate": surrogate,
    "update/gradient_norm": norm,
    "update/learning_rate": jnp.asarray(method.schedule(made)),
    "update/skipped": state.skipped,
    "update/skipped_in_a_row": state.skipped_in_a_row,
  }
  return state, values


def update_gradient(
  params: Params, batch: TrainBatch, coefficients: Array, key: Array, *, method: Method
) -> tuple[tuple[Array, Metrics], Params]:
  """((surrogate loss f32[], metrics), its gradient) of one update, both phases.

  Args:
    coefficients: f32[P, G], before the reweighting.
    key: of the randomness of a reweighting.
  """
  if method.num_micro_batches == 1:

    def constants_of(logprobs, forward):
      reweighted, metrics = reweight(params, batch, forward, coefficients, key, method=method)
      return Constants(reweighted, loss_statistics(logprobs, batch, reweighted, method), metrics)

    (total, (weight, metrics)), gradient = micro_gradient(
      params, batch, constants_of, method=method
    )
    return divided(total, weight, metrics, gradient, params)
  constants = first_phase(params, batch, coefficients, key, method=method)
  (surrogate, metrics), gradient = second_phase(params, batch, constants, method=method)
  return (surrogate, {**constants.metrics, **metrics}), gradient


def first_phase(
  params: Params, batch: TrainBatch, coefficients: Array, key: Array, *, method: Method
) -> Constants:
  """Phase 1 under accumulation: a forward pass of its own, where anything needs one."""
  logprobs = None
  if method.reweighting.needs_gram and method.reweighting.scope != "batch":
    logprobs, coefficients, metrics = _reweight_by_micro_batch(
      params, batch, coefficients, key, method=method
    )
  else:
    forward = None
    if method.reweighting.needs_gram or method.loss.statistics is not None:
      logprobs, forward = batch_forward(params, batch, method=method)
    coefficients, metrics = reweight(params, batch, forward, coefficients, key, method=method)
  statistics = loss_statistics(logprobs, batch, coefficients, method)
  return Constants(coefficients, statistics, metrics)


def batch_forward(
  params: Params, batch: TrainBatch, *, method: Method
) -> tuple[Array, Forward | None]:
  """(log π, what the Gram matrix needs) of a whole batch, micro-batch by micro-batch."""

  def score(_, micro):
    (logprobs, _), forward = policy_forward(params, micro, method=method)
    return None, (logprobs, forward)

  _, found = jax.lax.scan(score, None, split_micro_batches(batch, method.num_micro_batches))
  return join_micro_batches(found)


def _reweight_by_micro_batch(params, batch, coefficients, key, *, method):
  """(log π, coefficients, metrics), with Gram matrices of single micro-batches alone."""

  def score(index, micro):
    batch, coefficients = micro
    (logprobs, _), forward = policy_forward(params, batch, method=method)
    coefficients, metrics = reweight(
      params, batch, forward, coefficients, key, method=method, index=index
    )
    return index + 1, (logprobs, coefficients, metrics)

  micro_batches = split_micro_batches((batch, coefficients), method.num_micro_batches)
  _, (logprobs, coefficients, metrics) = jax.lax.scan(score, 0, micro_batches)
  logprobs, coefficients = join_micro_batches((logprobs, coefficients))
  return logprobs, coefficients, reductions.stacked(metrics)


def second_phase(
  params: Params, batch: TrainBatch, constants: Constants, *, method: Method
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
      params, batch, lambda *_: here, method=method
    )
    gradient = jax.tree.map(lambda a, g: a + g.astype(a.dtype), gradient, micro)
    return gradient, (total, weight, metrics)

  wide = lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))
  micro_batches = split_micro_batches((batch, constants.coefficients), method.num_micro_batches)
  gradient, (totals, weights, metrics) = jax.lax.scan(
    accumulate, jax.tree.map(wide, params), micro_batches
  )
  return divided(totals.sum(), weights.sum(), reductions.stacked(metrics), gradient, params)


def divided(
  total: Array, weight: Array, metrics: Metrics, gradient: Params, params: Params
) -> tuple[tuple[Array, Metrics], Params]:
  """((total/weight, metrics), gradient/weight) of undivided sums over a whole batch."""
  weight = jnp.where(weight == 0, 1, weight)  # no loss token: the total is 0, and so is the loss
  gradient = jax.tree.map(lambda g, p: (g / weight).astype(p.dtype), gradient, params)
  return (total / weight, metrics), gradient


def micro_gradient(
  params: Params,
  batch: TrainBatch,
  constants_of: Callable[[Array, Forward | None], Constants],
  *,
  method: Method,
) -> tuple[tuple[Array, tuple[Array, Metrics]], Params]:
  """((Σ total, (Σ weight, metrics)), gradient of Σ total) of one micro-batch.

  The network runs once, forward and back: the constants are made of its log-probabilities before
  the loss's gradient with respect to these is pulled back through it.
  """
  score = functools.partial(policy_forward, batch=batch, method=method)
  (logprobs, entropy), pullback, forward = jax.vjp(score, params, has_aux=True)
  constants = constants_of(jax.lax.stop_gradient(logprobs), forward)
  surrogate = functools.partial(_surrogate_total, batch=batch, constants=constants, method=method)
  (total, aux), cotangents = jax.value_and_grad(surrogate, argnums=(0, 1), has_aux=True)(
    logprobs, entropy
  )
  (gradient,) = pullback(cotangents)
  return (total, aux), gradient


def reweight(
  params: Params,
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
    gram = method.gram.gram(params, batch, forward, method.gram_setting)
    metrics = _gram_metrics(forward, params, method)
    if by_group:
      gram = jnp.moveaxis(jnp.diagonal(gram.reshape(P, G, P, G), axis1=0, axis2=2), -1, 0)
    else:
      gram = gram[None]
  key = jax.random.fold_in(key, index)
  reweighted, reweighting_metrics = method.reweighting.apply(blocks, gram, key)
  reweighted = jax.lax.stop_gradient(reweighted.reshape(P, G))
  return reweighted, {**metrics, **reweighting_metrics}


def _gram_metrics(forward: Forward | None, params: Params, method: Method) -> Metrics:
  """What the Gram matrix costs: known before the run, reported with it."""
  own_forward = jnp.float32(method.num_micro_batches > 1)
  metrics: Metrics = {"gram/forward_only_passes": Mean(total=own_forward, weight=jnp.float32(1))}
  if forward is not None:
    kernel = method.model.head(params).kernel
    metrics |= method.gram.cost(forward.hidden, kernel, method.gram_setting)
  return metrics


def loss_statistics(
  logprobs: Array | None, batch: TrainBatch, coefficients: Array, method: Method
) -> Any:
  """What the loss needs of the whole batch, or None."""
  if method.loss.statistics is None:
    return None
  return method.loss.statistics(logprobs, batch, coefficients)


def policy_logprobs(
  params: Params, batch: TrainBatch, *, method: Method
) -> tuple[Array, Array]:
  """log π and entropy (nats) of every response token, each f32[P, G, T]."""
  return policy_forward(params, batch, method=method._replace(gram=None))[0]


def policy_forward(
  params: Params, batch: TrainBatch, *, method: Method
) -> tuple[tuple[Array, Array], Forward | None]:
  """((log π, entropy) as `policy_logprobs`, what the Gram matrix needs, or None)."""
  hidden = method.model.response_hidden(params, batch.prompts, batch.tokens)
  head, sampling = method.model.head(params), Sampling(temperature=method.temperature)
  if method.gram is None or not method.gram.needs_forward:
    return token_logprobs(hidden, head, batch.tokens, sampling), None
  project = method.gram.projection
  projection = None if project is None else project(head.kernel.shape[1])
  found = token_statistics(hidden, head, batch.tokens, sampling, projection=projection)
  forward = Forward(hidden, found.log_normalizers, found.projected)
  return (found.logprobs, found.entropy), forward


def _surrogate_total(logprobs, entropy, batch, constants, *, method):
  """(Σ total, (Σ weight, metrics)) of one micro-batch."""
  coefficients = constants.coefficients
  losses, metrics = method.loss.per_token(logprobs, batch, coefficients, constants.statistics)
  mask, veto_metrics = batch.mask, {}
  if method.veto is not None:
    losses, mask, veto_metrics = method.veto(losses, logprobs, batch, coefficients)
  metrics = {
    **metrics,
    **veto_metrics,
    **constants.metrics,
    **behavior_metrics(logprobs, batch),
    **ratios_by_sign(logprobs, batch, coefficients),
    "policy/entropy": mean_metric(entropy, batch.mask),
  }
  if batch.lags is not None:
    metrics |= lag_metrics(batch)
  if len(method.sources) > 1:
    metrics |= source_metrics(logprobs, batch, method.sources)
  if method.reference_kl:
    estimate = getattr(kl, method.reference_kl_estimator)
    divergence = estimate(logprobs, batch.reference_logprobs, batch.mask)
    losses += method.reference_kl * divergence
    metrics["reference/kl"] = mean_metric(divergence, batch.mask)
  if method.entropy_bonus:
    losses -= method.entropy_bonus * entropy
  pair = aggregate(
    losses,
    mask,
    how=method.aggregation,
    max_response_length=method.max_response_length,
  )
  metrics = jax.tree.map(jax.lax.stop_gradient, metrics)
  return pair.total, (jax.lax.stop_gradient(pair.weight), metrics)


def split_micro_batches(tree: Any, num_micro_batches: int) -> Any:
  """[P, ...] → [k, P/k, ...]; micro-batch j takes prompts j, j + k, …

  Interleaved, so that with P sharded over devices every micro-batch is spread over all of them.
  """
  k = num_micro_batches
  return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, k, *x.shape[1:]), 0, 1), tree)


def join_micro_batches(tree: Any) -> Any:
  """The inverse of `split_micro_batches`."""
  return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)


def _batch_metrics(batch: TrainBatch) -> Metrics:
  groups = jnp.ones(batch.rewards.shape[0], jnp.float32)
  differ = jnp.any(batch.rewards != batch.rewards[:, :1], axis=1).astype(jnp.float32)
  solved = batch.correct.mean(axis=1)
  count = groups.sum()
  return {
    "reward/mean": Mean(total=batch.rewards.mean(axis=1).sum(), weight=count),
    "reward/pass_rate": Mean(total=solved.sum(), weight=count),
    "groups/effective": Mean(total=differ.sum(), weight=count),
    "groups/all_correct": Mean(total=(solved == 1).astype(jnp.float32).sum(), weight=count),
    "groups/all_wrong": Mean(total=(solved == 0).astype(jnp.float32).sum(), weight=count),
    "response/length": Mean(
      total=batch.mask.sum(), weight=jnp.any(batch.mask > 0, axis=-1).astype(jnp.float32).sum()
    ),
  }
