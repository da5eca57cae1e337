"""One update of the policy, as a pure function that reads as the method.

Phase 1, without gradient: coefficients, and whatever statistics the loss needs of the whole batch.
Phase 2, with gradient: micro-batches receive both as constants and add up undivided sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlvr_jax.ops import kl, reductions
from rlvr_jax.ops.aggregate import aggregate
from rlvr_jax.ops.logprobs import token_logprobs
from rlvr_jax.ops.masked import mean_metric
from rlvr_jax.ops.ratios import behavior_metrics
from rlvr_jax.types import Array, Mean, Metrics, Params, Sampling, TrainBatch, TrainState

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
    loss: per-token loss, see `losses.Loss`.
    aggregation: how per-token losses become one number, see `ops.aggregate`.
    max_response_length: tokens; the denominator of the `constant` aggregation.
    temperature: of the target policy π.
    reference_kl: coefficient of KL(π‖π_reference); 0 leaves the term out.
    reference_kl_estimator: k1, k2 or k3.
    veto: takes tokens of negative-advantage rollouts out of the loss, see `ops.veto`; or None.
    entropy_bonus: coefficient of the policy's entropy; 0 leaves the term out.
    num_micro_batches: the prompts of a batch are split into this many.
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
  coefficients, reweighting_metrics = method.reweighting.apply(coefficients, None)
  coefficients = jax.lax.stop_gradient(coefficients)

  statistics = batch_statistics(state.params, batch, coefficients, method=method)
  (surrogate, update_metrics), gradient = surrogate_gradient(
    state.params, batch, coefficients, statistics, method=method
  )
  metrics = {**metrics, **reweighting_metrics, **update_metrics, **_batch_metrics(batch)}
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


def batch_statistics(
  params: Params, batch: TrainBatch, coefficients: Array, *, method: Method
) -> Any:
  """Phase 1: what the loss needs of the whole batch, without gradient.

  None where it needs nothing, and where the batch is one micro-batch: phase 2's own forward pass
  serves both then.
  """
  if method.loss.statistics is None or method.num_micro_batches == 1:
    return None
  score = lambda _, micro: (None, policy_logprobs(params, micro, method=method)[0])
  _, logprobs = jax.lax.scan(score, None, split_micro_batches(batch, method.num_micro_batches))
  return method.loss.statistics(join_micro_batches(logprobs), batch, coefficients)


def surrogate_gradient(
  params: Params, batch: TrainBatch, coefficients: Array, statistics: Any, *, method: Method
) -> tuple[tuple[Array, Metrics], Params]:
  """Phase 2: ((surrogate loss f32[], metrics), its gradient) over all micro-batches.

  The sums Σ total and Σ weight are divided once, at the end, so that k micro-batches give the
  gradient of one batch.
  """
  total_gradient = jax.value_and_grad(_surrogate_total, has_aux=True)

  def micro_step(micro):
    batch, coefficients = micro
    return total_gradient(params, batch, coefficients, statistics, method=method)

  def accumulate(gradient, micro):
    (total, (weight, metrics)), micro_gradient = micro_step(micro)
    gradient = jax.tree.map(lambda a, g: a + g.astype(a.dtype), gradient, micro_gradient)
    return gradient, (total, weight, metrics)

  if method.num_micro_batches == 1:
    (total, (weight, metrics)), gradient = micro_step((batch, coefficients))
  else:
    wide = lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))
    micro_batches = split_micro_batches((batch, coefficients), method.num_micro_batches)
    gradient, (totals, weights, metrics) = jax.lax.scan(
      accumulate, jax.tree.map(wide, params), micro_batches
    )
    total, weight, metrics = totals.sum(), weights.sum(), reductions.stacked(metrics)
  weight = jnp.where(weight == 0, 1, weight)  # no loss token: the total is 0, and so is the loss
  gradient = jax.tree.map(lambda g, p: (g / weight).astype(p.dtype), gradient, params)
  return (total / weight, metrics), gradient


def policy_logprobs(
  params: Params, batch: TrainBatch, *, method: Method
) -> tuple[Array, Array]:
  """log π and entropy (nats) of every response token, each f32[P, G, T]."""
  hidden = method.model.response_hidden(params, batch.prompts, batch.tokens)
  sampling = Sampling(temperature=method.temperature)
  return token_logprobs(hidden, method.model.head(params), batch.tokens, sampling)


def _surrogate_total(params, batch, coefficients, statistics, *, method):
  """(Σ total, (Σ weight, metrics)) of one micro-batch."""
  logprobs, entropy = policy_logprobs(params, batch, method=method)
  if statistics is None and method.loss.statistics is not None:
    constant = jax.lax.stop_gradient(logprobs)
    statistics = method.loss.statistics(constant, batch, coefficients)
  losses, metrics = method.loss.per_token(logprobs, batch, coefficients, statistics)
  mask, veto_metrics = batch.mask, {}
  if method.veto is not None:
    losses, mask, veto_metrics = method.veto(losses, logprobs, batch, coefficients)
  metrics = {
    **metrics,
    **veto_metrics,
    **behavior_metrics(logprobs, batch),
    "policy/entropy": mean_metric(entropy, batch.mask),
  }
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
