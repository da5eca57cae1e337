"""The components of an update, and the objective of one micro-batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlvr_jax.ops import kl
from rlvr_jax.ops.aggregate import aggregate
from rlvr_jax.ops.expert_load import Load, balance_weights, expert_load, load_metrics
from rlvr_jax.ops.logprobs import Taught, token_statistics
from rlvr_jax.ops.masked import mean_metric
from rlvr_jax.ops.reductions import without_tokens
from rlvr_jax.ops.route_changes import RouteChanges, change_metrics, count_changes
from rlvr_jax.ops.row_blocks import short_row
from rlvr_jax.ops.update_metrics import policy_metrics
from rlvr_jax.types import (
  MEASURED,
  Array,
  Forward,
  Mean,
  Metrics,
  Packed,
  Params,
  Routes,
  Rows,
  Sampling,
  Sum,
  TrainBatch,
)
from rlvr_jax.update.teaching import Teaching, add_taught

REFERENCE_KL_ESTIMATORS = ("k1", "k2", "k3")


class Method(NamedTuple):
  """The components of an update, which the configuration chooses.

  Attributes:
    model: provides `combine`, `row_hidden`, `response_hidden`, `row_routed`, `response_routed`,
      `head` and `mesh`.
    optimizer: an optax transformation.
    learning_rate: the optimizer's learning rate as a function of the number of updates; only
      metrics use it.
    advantage: maps rewards to coefficients, see `advantages.Advantage`.
    coefficient_metrics: (coefficients, rewards, correct, valid) → metrics.
    reweighting: changes the coefficients, see `reweighting.Reweighting`.
    loss: per-token loss, see `losses.Loss`.
    aggregation: how per-token losses become one number, see `ops.aggregate`.
    max_response_length: tokens; a factor of the denominator of the `constant` aggregation.
    temperature: the sampling temperature that defines the trained policy π.
    reference_kl: coefficient of KL(π‖π_reference); 0 leaves the term out.
    reference_kl_estimator: k1, k2 or k3.
    teaching: the teacher's part in the objective, or None.
    veto: excludes tokens of negative-advantage rollouts from the loss, see `ops.veto`; or None.
    entropy_bonus: coefficient of the policy's entropy; 0 leaves the term out.
    expert_balance: coefficient of a mixture's balance loss, see `ops.expert_load`; 0 leaves it out.
    gram: computes the Gram matrix that a reweighting or an advantage needs, see `geometry.GramFn`;
      or None.
    gram_context: properties of the run that `gram` needs, see `geometry.GramContext`; or None.
    seed: the seed of the randomness within an update.
    sources: names of the policies that the rollouts are sampled from.
    records_routes: whether rollouts contain the experts that a mixture chose during sampling.
    replays_routes: whether an update uses the recorded experts, so that π is the policy given these
      experts.
  """

  model: Any
  optimizer: optax.GradientTransformation
  learning_rate: optax.Schedule
  advantage: Any
  coefficient_metrics: Callable[[Array, Array, Array, Array], Metrics]
  reweighting: Any
  loss: Any
  aggregation: str
  max_response_length: int
  temperature: float = 1.0
  reference_kl: float = 0.0
  reference_kl_estimator: str = "k3"
  teaching: Teaching | None = None
  veto: Callable[[Array, Array, TrainBatch, Array], tuple[Array, Array, Metrics]] | None = None
  entropy_bonus: float = 0.0
  expert_balance: float = 0.0
  gram: Any = None
  gram_context: Any = None
  seed: int = 0
  sources: tuple[str, ...] = ("policy",)
  records_routes: bool = False
  replays_routes: bool = False

  @property
  def compares(self) -> bool:
    """Whether a forward pass compares the policy's distributions with a teacher's."""
    return self.teaching is not None and self.teaching.distillation.divergence is not None

  @property
  def has_first_phase(self) -> bool:
    """Whether a batch of several micro-batches needs a forward pass without gradient first."""
    needs_scores = self.loss.statistics is not None or self.expert_balance > 0
    return self.needs_gram or needs_scores or bool(self.measured)

  @property
  def measured(self) -> tuple[str, ...]:
    """The fields of a batch that the first phase computes for the advantage."""
    return tuple(name for name in MEASURED if name in self.advantage.needs)

  @property
  def needs_gram(self) -> bool:
    return self.reweighting.needs_gram or "squared_norms" in self.measured

  @property
  def needs_squares(self) -> bool:
    """Whether the first phase sums up squared probabilities."""
    return "squared_probabilities" in self.measured


def rows_if_accumulating(batch: TrainBatch) -> Packed | None:
  """The packed rows if batches of these shapes may have several micro-batches, otherwise None.

  The decision depends on shapes only, so that one compiled program serves all batches of a run. If
  some batches need several micro-batches, all batches accumulate.
  """
  packed = batch.packed
  return packed if packed is not None and packed.tokens.shape[0] > 1 else None


class Scores(NamedTuple):
  """The results of a forward pass for the loss; sums over micro-batches are the batch's results."""

  logprobs: Array  # f32[P, G, T], log π of every response token; 0 for other micro-batches' tokens
  entropy: Array  # f32[P, G, T], nats
  load: Load | None = None  # the load of a mixture's experts
  changes: RouteChanges | None = None  # changes of routes since sampling, if routes are recorded
  masses: tuple[Array, ...] | None = None  # f32[P, G, T] for each of PROBABILITY_BINS
  squared_probabilities: Array | None = None  # f32[P, G, T], see `ops.logprobs`
  taught: Taught | None = None  # f32[P, G, T], the comparison with a teacher, if this pass makes it


class Estimate(NamedTuple):
  """The results of the advantage estimator for a batch; differentiation takes them as constants."""

  coefficients: Array  # f32[P, G], a coefficient per rollout
  in_loss: Array  # f32[P, G] or f32[P, G, T], the coefficients for the loss, before a reweighting
  metrics: Metrics


Estimator = Callable[[TrainBatch], Estimate]  # takes a batch with all fields the advantage needs


class Constants(NamedTuple):
  """Inputs of the loss that are constant for differentiation."""

  coefficients: Array  # f32[P, G], reweighted; or f32[P, G, T]
  statistics: Any  # the loss's statistics of the full batch, see `losses.Loss`, or None
  metrics: Metrics
  estimate: Estimate
  balance: Balance | None = None  # the balance loss of experts, or None


class Balance(NamedTuple):
  """The balance loss of experts as a linear function of the router's probabilities."""

  weights: Array  # [layers, E], see `ops.expert_load.balance_weights`
  scale: Array  # f32[], coefficient × the full batch's weight, by which the sum is divided later


def policy_forward(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  micro_batch: Array | int = 0,
  *,
  method: Method,
  sampling: Sampling | None = None,
  masses: bool = False,
  squares: bool = False,
  length: int | None = None,
  teacher: Any = None,
) -> tuple[Scores, Forward | None]:
  """Runs one forward pass over one micro-batch.

  Args:
    micro_batch: index of the micro-batch; an unpacked batch is one micro-batch.
    sampling: the distribution whose log-probabilities and entropies are computed; None: π, the
      policy at `method.temperature`.
    masses: whether to compute the total probability of each probability bin.
    squares: whether to compute the sums of squared probabilities.
    length: how many of the first positions of each row to compute, static; later positions must be
      empty. None: all positions.
    teacher: (trained, frozen) parameters of the teacher with which the method compares the policy;
      None for no comparison.
  Returns:
    The scores; and, if the Gram matrix needs the pass's results, a `Forward` of one micro-batch
    (M = 1), otherwise None.
  """
  params = method.model.combine(trained, frozen)
  is_mixture = method.model.config.num_experts > 0
  recorded = recorded_routes(batch, micro_batch, length)
  replayed = recorded if method.replays_routes else None
  assert recorded is not None or not method.replays_routes, "the batch has no routes to replay"
  wanted, load, changes, compared = None, None, None, None
  if batch.packed is None:
    assert teacher is None or not method.compares, (
      "a teacher's distributions are compared in packed rows"
    )
    P, G, T = batch.tokens.shape
    if is_mixture:
      # Tokens after the last loss token change nothing.
      lengths = jnp.max(jnp.where(batch.mask > 0, jnp.arange(1, T + 1), 0), axis=-1)
      hidden, own, probabilities = method.model.response_routed(
        params, batch.prompts, batch.tokens, replayed, lengths
      )
    else:
      hidden = method.model.response_hidden(params, batch.prompts, batch.tokens)
    hidden, targets = hidden.reshape(P * G, T, -1), batch.tokens.reshape(P * G, T)
    by_rollout = lambda x: x.reshape(P, G, T)
  else:
    tokens, targets, rows, by_rollout = select_rows(batch.packed, micro_batch, length)
    if is_mixture:
      hidden, own, probabilities = method.model.row_routed(params, tokens, rows, replayed)
    else:
      hidden = method.model.row_hidden(params, tokens, rows)
    if method.teaching is not None:
      compared = method.teaching.forward(teacher, tokens, rows)
    if batch.turns is not None:
      wanted = predicting_places(batch.packed, micro_batch)[:, :length]
  head = method.model.head(params)
  project = method.gram.projection if method.gram else None
  projection = None if project is None else project(head.kernel.shape[1])
  statistics = token_statistics(
    hidden,
    head,
    targets,
    sampling or Sampling(temperature=method.temperature),
    projection=projection,
    wanted=wanted,
    masses=masses,
    squares=squares,
    teacher=compared,
    mesh=method.model.mesh,
  )
  forward = None
  if method.gram is not None and method.gram.needs_forward:
    fields = (hidden, statistics.log_normalizers, statistics.projected, statistics.logprobs)
    whole = None if batch.packed is None else batch.packed.tokens.shape[-1]
    forward = Forward(*jax.tree.map(lambda x: _lengthen(x, whole)[None], fields))
  if is_mixture:
    load, changes = _routing_of(own, recorded, probabilities, method)
  of_tokens = (statistics.logprobs, statistics.entropy, statistics.masses)
  of_tokens += (statistics.squared_probabilities, statistics.taught)
  logprobs, entropy, of_bins, of_squares, taught = jax.tree.map(by_rollout, of_tokens)
  return Scores(logprobs, entropy, load, changes, of_bins, of_squares, taught), forward


def _routing_of(
  own: Array | Routes, recorded: Array | Routes | None, probabilities: Array, method: Method
) -> tuple[Load, RouteChanges | None]:
  """The load of experts, and the changes of routes since sampling if routes are recorded.

  Args:
    own: the routers' present choice; negative where there is no token.
    recorded: the sampler's choice, or None.
    probabilities: [layers, E], see `ops.expert_load`.
  """
  add = lambda *parts: jax.tree.map(lambda *x: sum(x), *parts)
  taken, changes = own, None
  if recorded is not None:
    changes = add(*map(count_changes, jax.tree.leaves(recorded), jax.tree.leaves(own)))
  if method.replays_routes:
    taken = jax.tree.map(lambda own, x: jnp.where(own < 0, own, x), own, recorded)
  loads = [expert_load(part, probabilities) for part in jax.tree.leaves(taken)]
  load = loads[0]._replace(choices=add(*(part.choices for part in loads)))
  if not method.expert_balance:
    load = jax.lax.stop_gradient(load)
  return load, jax.lax.stop_gradient(changes)


def recorded_routes(
  batch: TrainBatch, micro_batch: Array | int = 0, length: int | None = None
) -> Array | Routes | None:
  """The sampler's routes (chosen experts) in the form that the network takes; None without routes.

  For a packed batch the routes are an array [R, length, layers, k], for the first `length`
  positions of a micro-batch's rows. For a padded batch the routes are `Routes`.
  """
  if batch.packed is not None and batch.packed.routes is not None:
    routes = jax.lax.dynamic_index_in_dim(batch.packed.routes, micro_batch, keepdims=False)
    return routes[:, :length]
  if batch.packed is not None or batch.routes is None or batch.prompt_routes is None:
    return None
  return routes_of_inputs(batch.prompt_routes, batch.routes)


def routes_of_inputs(prompt_routes: Array, routes: Array) -> Routes:
  """Moves each recorded route from the predicted token to the input token that predicts it."""
  prompts = jnp.concatenate([prompt_routes[:, :-1], routes[:, 0, :1]], axis=1)
  last = jnp.zeros_like(routes[:, :, :1])  # predicts nothing
  return Routes(prompts, jnp.concatenate([routes[:, :, 1:], last], axis=2))


def in_micro_batch(packed: Packed, micro_batch: Array | int) -> Array:
  """For each response token, whether this micro-batch predicts it, bool[P, G, T]."""
  _, R, L = packed.tokens.shape
  return (packed.places >= 0) & (packed.places // (R * L) == micro_batch)


def predicting_places(packed: Packed, micro_batch: Array | int) -> Array:
  """For each position of a micro-batch's rows, whether it predicts a response token, bool[R, L]."""
  _, R, L = packed.tokens.shape
  is_inside = in_micro_batch(packed, micro_batch)
  places = jnp.where(is_inside, packed.places - micro_batch * R * L, R * L)
  return jnp.zeros(R * L, bool).at[places].set(True, mode="drop").reshape(R, L)


def select_rows(
  packed: Packed, micro_batch: Array | int, length: int | None = None
) -> tuple[Array, Array, Rows, Callable[[Array], Array]]:
  """One micro-batch's rows, or their first `length` positions; later positions must be empty.

  Returns:
    Tokens and targets, i32[R, length]; the `Rows` of these positions; and a function that maps
    values [R, length] to the values [P, G, T] of the response tokens, 0 for tokens of other
    micro-batches.
  """
  _, R, L = packed.tokens.shape
  tokens, targets, rows = jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, micro_batch, keepdims=False)[:, :length],
    (packed.tokens, packed.targets, packed.rows),
  )
  size = R * L
  is_inside = in_micro_batch(packed, micro_batch)
  places = jnp.where(is_inside, packed.places - micro_batch * size, size)

  def by_rollout(values):
    return _lengthen(values, L).reshape(size).at[places].get(mode="fill", fill_value=0)

  return tokens, targets, rows, by_rollout


def _lengthen(values: Array, length: int | None) -> Array:
  """Pads the values of rows' first positions with zeros to [R, length, …]; None: as they are."""
  missing = 0 if length is None else length - values.shape[1]
  return jnp.pad(values, [(0, 0), (0, missing)] + [(0, 0)] * (values.ndim - 2))


def fold_micro_batches(packed: Packed, step: Callable[..., Any], start: Any) -> Any:
  """Folds a step over a batch's micro-batches.

  Micro-batches with whole rows come before micro-batches with short rows.

  Args:
    step: (index of the micro-batch, value, length=how many positions of each row to compute) → next
      value.
    start: the first value.
  """
  L = packed.tokens.shape[-1]
  whole = functools.partial(step, length=L)
  if packed.num_short is None:
    return jax.lax.fori_loop(0, packed.num_micro_batches, whole, start)
  first_short = packed.num_micro_batches - packed.num_short
  value = jax.lax.fori_loop(0, first_short, whole, start)
  short = functools.partial(step, length=short_row(L))
  return jax.lax.fori_loop(first_short, packed.num_micro_batches, short, value)


def estimate_coefficients(advantage_state: Any, batch: TrainBatch, *, method: Method) -> Estimate:
  """The advantage's coefficients and their metrics, for a batch that has all needed arrays."""
  coefficients = jax.lax.stop_gradient(method.advantage.apply(advantage_state, batch))
  in_loss = method.advantage.in_loss(advantage_state, batch, coefficients)
  masses = method.coefficient_metrics(coefficients, batch.rewards, batch.correct, batch.valid)
  metrics = {**masses, **method.advantage.metrics(advantage_state, batch)}
  return Estimate(coefficients, jax.lax.stop_gradient(in_loss), metrics)


def make_constants(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  scores: Scores | None,
  forward: Forward | None,
  estimate: Estimator,
  key: Array,
  *,
  method: Method,
) -> Constants:
  """The constants of the loss, from a forward pass over the full batch if `method` needs that pass.

  Args:
    estimate: maps the batch, with the policy's values that the advantage needs, to an `Estimate`.
    key: the key for the randomness of a reweighting.
  """
  scores, forward = jax.lax.stop_gradient((scores, forward))
  gram = None
  metrics: Metrics = {}
  if method.needs_gram:
    with jax.named_scope("gram"):
      gram = method.gram.gram(trained, frozen, batch, forward, method.gram_context)
    metrics = _gram_metrics(trained, frozen, batch, forward, method)
  estimated = estimate(_with_measured(batch, scores, gram, method))
  coefficients = estimated.in_loss
  # Coefficients per token are not reweighted, see `Advantage.per_token`.
  if coefficients.ndim == 2:
    coefficients, reweighting_metrics = method.reweighting.on_batch(
      coefficients, gram, batch.valid, key
    )
    metrics = {**metrics, **reweighting_metrics}
  logprobs = None if scores is None else scores.logprobs
  taught = add_taught(batch, None if scores is None else scores.taught)
  statistics = loss_statistics(logprobs, taught, coefficients, method)
  metrics = {**metrics, **estimated.metrics}
  constants = Constants(coefficients, statistics, metrics, estimated)
  if not method.expert_balance or scores is None or scores.load is None:
    return constants
  _, (weight, _) = surrogate(scores, batch, constants, method=method)
  return constants._replace(
    balance=Balance(balance_weights(scores.load), method.expert_balance * weight)
  )


def _with_measured(
  batch: TrainBatch, scores: Scores | None, gram: Array | None, method: Method
) -> TrainBatch:
  """The batch with the fields `method.measured`, which the forward pass measured."""
  fields: dict[str, Any] = {}
  if scores is not None:
    fields["policy_logprobs"] = scores.logprobs
    fields["squared_probabilities"] = scores.squared_probabilities
  if gram is not None:
    fields["squared_norms"] = jnp.diagonal(gram).reshape(batch.rewards.shape)
  return dataclasses.replace(batch, **{name: fields[name] for name in method.measured})


def _gram_metrics(
  trained: Params, frozen: Params, batch: TrainBatch, forward: Forward | None, method: Method
) -> Metrics:
  """The cost of the Gram matrix as metrics; constant over a run."""
  extra_passes = jnp.float32(rows_if_accumulating(batch) is not None)
  metrics: Metrics = {"gram/forward_only_passes": Mean(total=extra_passes, weight=jnp.float32(1))}
  if forward is not None:
    kernel = method.model.head(method.model.combine(trained, frozen)).kernel
    metrics |= method.gram.cost(batch, forward.hidden, kernel, method.gram_context)
  return metrics


def loss_statistics(
  logprobs: Array | None, batch: TrainBatch, coefficients: Array, method: Method
) -> Any:
  """The statistics of the full batch that the loss needs, or None."""
  if method.loss.statistics is None:
    return None
  if method.teaching is not None:
    assert logprobs is not None, "statistics of a loss need the policy's log-probabilities"
    coefficients = method.teaching.coefficients(logprobs, batch, coefficients)
  return method.loss.statistics(logprobs, batch, coefficients)


def policy_losses(
  logprobs: Array, batch: TrainBatch, constants: Constants, *, method: Method
) -> tuple[Array, Array, Array, Metrics]:
  """The results of loss and veto: (coefficients, losses [P, G, T], mask for aggregation, metrics).

  Metrics keep their values per token, see `types.Mean`. Coefficients and losses include the
  teacher's terms. A vetoed token has neither a reward loss nor a teacher's loss, whether or not the
  aggregation's denominator counts the token.
  """
  coefficients = constants.coefficients
  if method.teaching is not None:
    coefficients = method.teaching.coefficients(logprobs, batch, coefficients)
  losses, metrics = method.loss.per_token(logprobs, batch, coefficients, constants.statistics)
  if method.teaching is not None:
    losses = method.teaching.losses(logprobs, batch, losses)
  if method.veto is None:
    return coefficients, losses, batch.mask, metrics
  losses, mask, of_veto = method.veto(losses, logprobs, batch, coefficients)
  return coefficients, losses, mask, {**metrics, **of_veto}


def surrogate(
  scores: Scores, batch: TrainBatch, constants: Constants, *, method: Method
) -> tuple[Array, tuple[Array, Metrics]]:
  """One micro-batch's (Σ total, (Σ weight, metrics)), as a function of the micro-batch's scores.

  Σ total is the micro-batch's part of the numerator of the loss, and Σ weight its part of the
  denominator. With the aggregation "constant", Σ weight is the denominator of the full batch.
  """
  logprobs, entropy, load, changes, *_, taught = scores
  batch, teaching = add_taught(batch, taught), method.teaching
  coefficients, losses, mask, metrics = policy_losses(logprobs, batch, constants, method=method)
  if teaching is not None:
    metrics = {**metrics, **teaching.metrics(logprobs, batch)}
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
  total = pair.total
  if load is not None:
    metrics = {**metrics, **load_metrics(load)}
  if load is not None and constants.balance is not None:
    balance = jnp.sum(constants.balance.weights * load.probabilities)
    total += (constants.balance.scale * balance).astype(total.dtype)
    metrics = {**metrics, "loss/expert_balance": Sum(balance)}
  if changes is not None:
    metrics = {**metrics, **change_metrics(changes)}
  shared = policy_metrics(logprobs, entropy, batch, coefficients, method.sources)
  metrics = {**without_tokens(metrics), **constants.metrics, **shared}
  metrics = jax.lax.stop_gradient(metrics)
  return total, (jax.lax.stop_gradient(pair.weight), metrics)
