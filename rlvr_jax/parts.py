"""The parts of a method as functions of plain arrays, for your own training loop.

The functions take log-probabilities, rewards and masks; the model, the sampler and the optimizer
are yours. All functions are pure and work under jit. P prompts have G rollouts each, of up to T
tokens; B = P·G. The guide, docs/parts.md, has complete loops for a flax model and for a
hand-written model.

  from rlvr_jax import parts
  from rlvr_jax.advantages import grpo
  from rlvr_jax.losses import p3o

  advantages = parts.advantages_of(grpo(), rewards)
  loss, metrics = parts.loss_of(p3o(), policy_logprobs, behavior_logprobs, advantages, mask)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.advantages import Advantage
from rlvr_jax.geometry import GramContext, GramFn
from rlvr_jax.geometry.diagnostics import diagnose
from rlvr_jax.geometry.streaming import streaming
from rlvr_jax.losses import Loss
from rlvr_jax.ops import reductions
from rlvr_jax.ops.aggregate import aggregate
from rlvr_jax.ops.checks import describe
from rlvr_jax.ops.logprobs import token_logprobs, token_statistics
from rlvr_jax.ops.precision import EXACT
from rlvr_jax.ops.ratios import log_ratios, mean_log_ratios, normalized_ess, sequence_log_ratios
from rlvr_jax.ops.veto import Veto, negative_advantage_veto
from rlvr_jax.reweighting import Reweighting
from rlvr_jax.types import Array, Forward, Head, Params, Prompts, Sampling, TrainBatch

__all__ = [
  "advantages_of",
  "batch_of",
  "diagnose",
  "gram_of_gradients",
  "gram_of_head",
  "log_ratios",
  "loss_of",
  "mean_log_ratios",
  "negative_advantage_veto",
  "normalized_ess",
  "reweighted",
  "sequence_log_ratios",
  "token_logprobs",
]


def batch_of(
  mask: Array,
  *,
  tokens: Array | None = None,
  rewards: Array | None = None,
  correct: Array | None = None,
  valid: Array | None = None,
  behavior_logprobs: Array | None = None,
  proximal_logprobs: Array | None = None,
  lags: Array | None = None,
  turns: Array | None = None,
  turn_scores: Array | None = None,
  rewards_by_name: Array | None = None,
  policy_logprobs: Array | None = None,
  squared_probabilities: Array | None = None,
  squared_norms: Array | None = None,
) -> TrainBatch:
  """Makes a batch from the given arrays, for functions that take a batch.

  Fields that are not given have a default, which is 0 or None unless stated below.

  Args:
    mask: [P, G, T], 1 on response tokens that count in the loss, the stop token included.
    tokens: i32[P, G, T], the response tokens.
    rewards: f32[P, G].
    correct: f32[P, G] in {0, 1}; None: equal to the rewards.
    valid: bool[P, G], False for rollouts without a grade; None: all True.
    behavior_logprobs: f32[P, G, T], nats, under the distribution that tokens were drawn from.
    proximal_logprobs: f32[P, G, T], nats; `decoupled_ppo` needs them.
    lags: i32[P, G, T], number of updates since the policy that sampled a token.
    turns: i32[P, G, T], the turn of each token in dialogues: even numbers are turns of the policy.
    turn_scores: f32[P, G, T], the score of a turn of the policy at its last token; NaN elsewhere.
    rewards_by_name: f32[P, G, K], K rewards of each rollout; `gdpo` needs them.
    policy_logprobs: f32[P, G, T], nats, of the trained policy before the update; `otb` and `opob`
      need them.
    squared_probabilities: f32[P, G, T], Σ_v π(v)² at each sampled token; `otb` needs them.
    squared_norms: f32[P, G], the squared norm of each rollout's gradient, such as the diagonal of
      `gram_of_head`; `opob` needs them.
  Raises:
    ValueError: an array has another shape.
  """
  P, G, T = _check_shape("mask", mask, "P", "G", "T")
  per_token = dict(
    tokens=tokens,
    behavior_logprobs=behavior_logprobs,
    proximal_logprobs=proximal_logprobs,
    turns=turns,
    turn_scores=turn_scores,
    lags=lags,
    policy_logprobs=policy_logprobs,
    squared_probabilities=squared_probabilities,
  )
  for name, array in per_token.items():
    if array is not None:
      _check_shape(name, array, "P", "G", "T", P=P, G=G, T=T)
  per_rollout = dict(rewards=rewards, correct=correct, valid=valid, squared_norms=squared_norms)
  for name, array in per_rollout.items():
    if array is not None:
      _check_shape(name, array, "P", "G", P=P, G=G)
  if rewards_by_name is not None:
    _check_shape("rewards_by_name", rewards_by_name, "P", "G", "K", P=P, G=G)
  mask = jnp.asarray(mask, jnp.promote_types(jnp.asarray(mask).dtype, jnp.float32))
  rewards = jnp.zeros((P, G), mask.dtype) if rewards is None else jnp.asarray(rewards)
  return TrainBatch(
    prompts=Prompts(tokens=jnp.zeros((P, 1), jnp.int32), lengths=jnp.ones(P, jnp.int32)),
    tokens=jnp.zeros(mask.shape, jnp.int32) if tokens is None else jnp.asarray(tokens),
    mask=mask,
    behavior_logprobs=jnp.zeros_like(mask) if behavior_logprobs is None else behavior_logprobs,
    rewards=rewards,
    correct=rewards if correct is None else jnp.asarray(correct),
    valid=jnp.ones((P, G), bool) if valid is None else jnp.asarray(valid),
    proximal_logprobs=proximal_logprobs,
    lags=lags,
    turns=None if turns is None else jnp.asarray(turns),
    turn_scores=None if turn_scores is None else jnp.asarray(turn_scores),
    rewards_by_name=None if rewards_by_name is None else jnp.asarray(rewards_by_name),
    policy_logprobs=policy_logprobs,
    squared_probabilities=squared_probabilities,
    squared_norms=squared_norms,
  )


def advantages_of(
  estimator: Advantage,
  rewards: Array,
  *,
  mask: Array | None = None,
  correct: Array | None = None,
  valid: Array | None = None,
  turns: Array | None = None,
  turn_scores: Array | None = None,
  rewards_by_name: Array | None = None,
  behavior_logprobs: Array | None = None,
  policy_logprobs: Array | None = None,
  squared_probabilities: Array | None = None,
  squared_norms: Array | None = None,
  state: Any = (),
) -> Array:
  """Coefficients f32[P, G] from an estimator of `rlvr_jax.advantages`.

  `otb`, and `mt_grpo` with scores of turns, return coefficients f32[P, G, T], which `loss_of` also
  takes.

  Args:
    estimator: an estimator, such as `grpo()`.
    rewards: f32[P, G].
    mask: [P, G, T]; `opo` reads the lengths of responses from it.
    correct: f32[P, G] in {0, 1}; the rewards if it is not given.
    valid: bool[P, G], False for rollouts on which your grader failed: they get the coefficient 0
      and do not affect other rollouts. Set their loss mask to 0, too. None: all rollouts are valid.
    turns, turn_scores: [P, G, T], for `mt_grpo` only, which then needs `mask`; see `batch_of`.
    rewards_by_name: f32[P, G, K], for `gdpo` only.
    behavior_logprobs, policy_logprobs: f32[P, G, T], for `otb` and `opob`, which also need `mask`.
    squared_probabilities: f32[P, G, T], for `otb` only; see `batch_of`.
    squared_norms: f32[P, G], for `opob` only; see `batch_of`.
    state: state of the estimator, for `fade` only: `estimator.init(entropy)` for the first batch,
      later the result of `estimator.update(state, batch_of(…), entropy)`. `entropy` is the policy's
      mean entropy, in nats per token.
  Raises:
    ValueError: `estimator` is not an `Advantage`, or an array has another shape.
  """
  _check_component("estimator", estimator, Advantage, "advantages")
  _check_shape("rewards", rewards, "P", "G")
  rewards = jnp.asarray(rewards)
  mask = jnp.ones((*rewards.shape, 1)) if mask is None else mask
  batch = batch_of(
    mask,
    rewards=rewards,
    correct=correct,
    valid=valid,
    turns=turns,
    turn_scores=turn_scores,
    rewards_by_name=rewards_by_name,
    behavior_logprobs=behavior_logprobs,
    policy_logprobs=policy_logprobs,
    squared_probabilities=squared_probabilities,
    squared_norms=squared_norms,
  )
  return estimator.in_loss(state, batch, estimator.apply(state, batch))


def loss_of(
  loss: Loss,
  policy_logprobs: Array,
  behavior_logprobs: Array,
  coefficients: Array,
  mask: Array,
  *,
  aggregation: str = "token_mean",
  max_response_length: int = 0,
  proximal_logprobs: Array | None = None,
  tokens: Array | None = None,
  veto: Veto | None = None,
) -> tuple[Array, dict[str, Array]]:
  """(loss f32[], metrics f32[] by name) of one batch.

  The loss is differentiable with respect to `policy_logprobs`.

  Args:
    loss: a loss of `rlvr_jax.losses`, such as `p3o()`, or a loss from
      `rlvr_jax.corrections.corrected`.
    policy_logprobs: f32[P, G, T], nats, of the trained policy, computed by `token_logprobs` or your
      own model.
    behavior_logprobs: f32[P, G, T], nats, under the distribution that tokens were drawn from.
    coefficients: f32[P, G] or f32[P, G, T], the advantages; constant for differentiation.
    mask: [P, G, T], 1 on response tokens that count in the loss.
    aggregation: one of `rlvr_jax.ops.aggregate.AGGREGATIONS`.
    max_response_length: tokens; 0 for T. Only the aggregation "constant" reads it.
    proximal_logprobs: f32[P, G, T], nats; `decoupled_ppo` and most corrections need them.
    tokens: i32[P, G, T], the sampled tokens; `clip_cov` draws at random by them. Without them it
      draws the same places in all batches of one mask.
    veto: the result of `negative_advantage_veto`.
  Raises:
    ValueError: `loss` is not a `Loss` or needs `proximal_logprobs`, an array has another shape, or
      the aggregation is unknown.
  """
  _check_component("loss", loss, Loss, "losses")
  if veto is negative_advantage_veto:
    raise ValueError("veto is the factory, not a veto; call it: negative_advantage_veto()")
  P, G, T = _check_shape("mask", mask, "P", "G", "T")
  _check_shape("policy_logprobs", policy_logprobs, "P", "G", "T", P=P, G=G, T=T)
  axes = "PGT" if jnp.ndim(coefficients) == 3 and not loss.of_responses else "PG"
  _check_shape("coefficients", coefficients, *axes, P=P, G=G, T=T)
  if loss.needs_proximal and proximal_logprobs is None:
    raise ValueError("this loss needs proximal_logprobs, its proximal policy's log-probabilities")
  batch = batch_of(
    mask,
    tokens=tokens,
    behavior_logprobs=behavior_logprobs,
    proximal_logprobs=proximal_logprobs,
  )
  statistics = None
  if loss.statistics is not None:
    statistics = loss.statistics(jax.lax.stop_gradient(policy_logprobs), batch, coefficients)
    statistics = jax.lax.stop_gradient(statistics)
  losses, metrics = loss.per_token(policy_logprobs, batch, coefficients, statistics)
  loss_mask = batch.mask
  if veto is not None:
    losses, loss_mask, veto_metrics = veto(losses, policy_logprobs, batch, coefficients)
    metrics = {**metrics, **veto_metrics}
  length = max_response_length or batch.mask.shape[-1]
  pair = aggregate(losses, loss_mask, how=aggregation, max_response_length=length)
  loss = jnp.where(pair.weight == 0, 0.0, reductions.value(pair))  # 0 if the mask is 0 everywhere
  return loss, jax.lax.stop_gradient(reductions.values(metrics))


def gram_of_head(
  hidden: Array,
  kernel: Array,
  tokens: Array,
  mask: Array,
  *,
  route: GramFn | None = None,
  temperature: float = 1.0,
) -> Array:
  """Inner products f32[B, B] of the rollouts' gradients with respect to the output head.

  The gradients are g_i = ∇(−Σ_t m log π) with respect to `kernel`, where m is the mask and π
  is softmax(hidden @ kernel / temperature). The gradient of a single rollout is never stored.

  Args:
    hidden: [P, G, T, D], the final hidden states that predict `tokens`.
    kernel: [D, V].
    tokens: i32[P, G, T].
    mask: [P, G, T].
    route: how to compute the inner products, by a route of `rlvr_jax.geometry`: `streaming()`,
      which is exact and the default, or `sketch()`.
    temperature: the temperature of the policy.
  Raises:
    ValueError: the route runs the model again, as `per_rollout` does (use `gram_of_gradients`), or
      is not a `GramFn`; or an array has another shape.
  """
  route = streaming() if route is None else route
  _check_component("route", route, GramFn, "geometry")
  D, _ = _check_shape("kernel", kernel, "D", "V")
  P, G, T = _check_shape("mask", mask, "P", "G", "T")
  _check_shape("hidden", hidden, "P", "G", "T", "D", P=P, G=G, T=T, D=D)
  if not route.needs_forward:
    raise ValueError(
      "this route runs the model again, but gram_of_head has no model; use gram_of_gradients, or"
      " streaming()"
    )
  batch, head = batch_of(mask, tokens=tokens), Head(kernel)
  flat = hidden.reshape(P * G, T, -1)
  projection = None if route.projection is None else route.projection(kernel.shape[1])
  sampling = Sampling(temperature=temperature)
  targets = batch.tokens.reshape(P * G, T)
  statistics = token_statistics(flat, head, targets, sampling, projection=projection)
  fields = (flat, statistics.log_normalizers, statistics.projected, statistics.logprobs)
  forward = Forward(*jax.tree.map(lambda x: x[None], fields))
  context = GramContext(_HeadOnly(head), temperature)
  gram = route.gram(head, {}, batch, jax.lax.stop_gradient(forward), context)
  return jax.lax.stop_gradient(gram)


class _HeadOnly:
  """A model that consists of an output head; its parameters are that head."""

  def __init__(self, head: Head):
    self._head = head

  def combine(self, trained: Params, frozen: Params) -> Params:
    return trained

  def head(self, params: Params) -> Head:
    return self._head


def gram_of_gradients(function: Callable[..., Array], params: Params, *rollouts: Any) -> Array:
  """Inner products f32[B, B] of a function's gradients on each rollout; for small models.

  Stores all gradients, [B, N] for N parameters.

  Args:
    function: (params, *arrays of one rollout) → f32[], such as −Σ_t m log π.
    params: tree of the parameters with respect to which gradients are taken.
    rollouts: trees of arrays [B, ...]; the B rollouts are ordered as in coefficients.reshape(B).
  """
  axes = (None, *(0 for _ in rollouts))
  gradients = jax.vmap(jax.grad(function), in_axes=axes)(params, *rollouts)
  rows = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(gradients)]
  return sum(jnp.einsum("in,jn->ij", x, x, precision=EXACT) for x in rows)  # type: ignore[return-value]


def reweighted(
  rule: Reweighting,
  coefficients: Array,
  gram: Array | None = None,
  *,
  valid: Array | None = None,
  key: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
  """(coefficients f32[P, G], metrics by name) after a rule of `rlvr_jax.reweighting`.

  Args:
    rule: the reweighting, such as `salt()`.
    coefficients: f32[P, G], the advantages.
    gram: f32[B, B], the result of `gram_of_head` or `gram_of_gradients`, not divided by B; None if
      the rule does not need it.
    valid: bool[P, G], as for `advantages_of`; None: all rollouts are valid.
    key: random key; only SALT's ablation `random_subspace` reads it. None: `jax.random.key(0)`.
  Raises:
    ValueError: `rule` is not a `Reweighting`, an array has another shape, or the rule needs `gram`.
  """
  _check_component("rule", rule, Reweighting, "reweighting")
  P, G = _check_shape("coefficients", coefficients, "P", "G")
  if gram is not None or rule.needs_gram:
    _check_gram(gram, P * G)
  key = jax.random.key(0) if key is None else key
  if valid is not None:
    _check_shape("valid", valid, "P", "G", P=P, G=G)
  valid = jnp.ones((P, G), bool) if valid is None else jnp.asarray(valid)
  coefficients, metrics = rule.on_batch(coefficients, gram, valid, key)
  return coefficients, reductions.values(metrics)


# --- checks of arguments --------------------------------------------------------------------------


def _check_component(name: str, value: Any, kind: type, room: str) -> None:
  """Raises ValueError unless `value` is of type `kind`; the message explains common mistakes."""
  if isinstance(value, kind):
    return
  if isinstance(value, str):
    factory = value.partition("(")[0].strip()
    how = f"from rlvr_jax.{room} import {factory}, and pass {factory}(…)"
    raise ValueError(f"{name} = {value!r} is a string; import the factory and call it: {how}")
  if factory := getattr(value, "__name__", ""):
    raise ValueError(f"{name} is the factory {factory}, not what it returns; call it: {factory}()")
  raise ValueError(
    f"{name} is {describe(value)}; pass what a factory of rlvr_jax.{room} returns, a"
    f" {kind.__name__}"
  )


def _check_shape(name: str, value: Any, *axes: str, **sizes: int) -> tuple[int, ...]:
  """Returns an array's shape; raises ValueError if its number of axes or a known size is wrong."""
  shape = jnp.shape(value)
  if len(shape) == len(axes) and all(
    sizes.get(axis, size) == size for axis, size in zip(axes, shape, strict=True)
  ):
    return shape
  known = [str(sizes.get(axis, axis)) for axis in axes]
  expected = f"[{', '.join(axes)}]" + (f" = [{', '.join(known)}]" if sizes else "")
  message = f"{name} is {describe(value)}; it must be {expected}"
  if axes[0] == "P":
    message += ", for P prompts with G rollouts each"
    if len(shape) == len(axes) - 1:  # [B, …]: rollouts without the group axis
      message += f"; reshape it: {name}.reshape({', '.join((*known[:2], *map(str, shape[1:])))})"
  raise ValueError(message)


def _check_gram(gram: Any, size: int) -> None:
  """Raises ValueError unless `gram` is a matrix of inner products, [B, B]."""
  if gram is None:
    raise ValueError(
      "this rule needs gram, the inner products of the rollouts' gradients: give gram_of_head(…) or"
      " gram_of_gradients(…)"
    )
  if not hasattr(gram, "shape") or gram.shape != (size, size):
    raise ValueError(
      f"gram is {describe(gram)}; it must be [B, B] = [{size}, {size}], inner products of the"
      " rollouts' gradients: for gradients [B, N] it is gradients @ gradients.T, else use"
      " gram_of_head or gram_of_gradients"
    )
