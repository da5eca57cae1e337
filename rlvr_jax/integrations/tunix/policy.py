"""Policy losses of rlvr_jax as policy losses for Tunix."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.rl import algo_core, common

from rlvr_jax.losses import Loss
from rlvr_jax.ops import reductions
from rlvr_jax.ops.masked import masked_fill
from rlvr_jax.ops.veto import Veto
from rlvr_jax.types import Array, Prompts, TrainBatch

# (model, train_example, algo_config, pad_id, eos_id) → (loss f32[], metrics by name)
PolicyLoss = Callable[..., tuple[Array, dict[str, Any]]]


def policy_loss(loss: Loss, *, negative_veto: Veto | None = None) -> PolicyLoss:
  """Makes a policy loss for Tunix from one of `rlvr_jax.losses`.

  The loss uses Tunix's settings `loss_agg_mode`, `num_generations`, `beta`, `kl_loss_mode` and
  `kl_clamp_value` like Tunix's own loss; `epsilon` and `loss_algo` have no effect. The behavior
  policy's log-probabilities are `old_per_token_logps`, which Tunix records if num_iterations > 1.
  Without them the behavior policy is the policy itself, so that all ratios are 1. Batch statistics,
  such as P3O's effective sample size, are computed on the batch that Tunix passes to the loss:
  leave `train_micro_batch_size` unset, or set it to `mini_batch_size`.

  Args:
    loss: policy loss, such as `losses.p3o()`.
    negative_veto: veto, such as `ops.veto.negative_advantage_veto()`; None for no veto.
  Returns:
    A function for Tunix's `register_policy_loss_fn`. It returns the metrics of Tunix's
    learner and the metrics of the loss.
  Raises:
    ValueError: the loss needs log-probabilities that Tunix does not record. The returned function
      raises ValueError at trace time if the batch is packed, has importance weights, or does not
      consist of complete groups.
  """
  if loss.needs_proximal:
    raise ValueError(
      "policy_loss: this loss needs the log-probabilities of a proximal policy, which Tunix does"
      " not record; use another loss, such as losses.p3o() or losses.ppo_clip()"
    )

  def loss_fn(
    model: Any, train_example: Any, algo_config: Any, pad_id: int, eos_id: int
  ) -> tuple[Array, dict[str, Any]]:
    arguments = (model, train_example, algo_config, pad_id, eos_id)
    return _loss_and_metrics(loss, negative_veto, *arguments)

  return loss_fn


def _loss_and_metrics(
  loss: Loss,
  negative_veto: Veto | None,
  model: Any,
  train_example: Any,
  algo_config: Any,
  pad_id: int,
  eos_id: int,
) -> tuple[Array, dict[str, Any]]:
  logprobs, logits = common.compute_per_token_logps(
    *nnx.split(model),
    prompt_tokens=train_example.prompt_ids,
    completion_tokens=train_example.completion_ids,
    pad_id=pad_id,
    eos_id=eos_id,
    stop_gradient=False,
    return_logits=True,
    temperature=algo_config.temperature,
  )
  batch = train_batch(train_example, algo_config.num_generations, logprobs)
  per_token, mask, values = _token_losses(loss, negative_veto, logprobs, batch, train_example)
  aggregate = functools.partial(
    common.aggregate_loss,
    completion_mask=mask.reshape(logprobs.shape),
    loss_agg_mode=algo_config.loss_agg_mode,
  )
  total = aggregate(per_token.reshape(logprobs.shape))
  response_mask = train_example.completion_mask
  entropy = algo_core.masked_mean(algo_core.compute_entropy_from_logits(logits), response_mask)
  tunix_metrics = {
    "pg_loss": total,
    "pg_clipfrac": values["loss/clip_fraction"],
    "entropy": entropy,
  }
  kl = jnp.float32(0)
  if algo_config.beta and train_example.ref_per_token_logps is not None:
    # Masked before the exponential: Tunix masks by a product afterwards, where 0 times inf is NaN.
    divergence = common.compute_kl_divergence(
      masked_fill(logprobs, response_mask),
      masked_fill(train_example.ref_per_token_logps, response_mask),
      algo_config.kl_loss_mode,
      clamp_value=algo_config.kl_clamp_value,
    )
    total += algo_config.beta * aggregate(divergence)
    kl = algo_core.masked_mean(divergence, response_mask)
  return total, {**values, **tunix_metrics, "kl": kl}


def _token_losses(
  loss: Loss, negative_veto: Veto | None, logprobs: Array, batch: TrainBatch, train_example: Any
) -> tuple[Array, Array, dict[str, Array]]:
  """The losses f32[P, G, T], the mask for their aggregation, and the values of their metrics."""
  coefficients = train_example.advantages.reshape(batch.mask.shape[:2])
  logprobs = logprobs.reshape(batch.mask.shape)
  statistics = None
  if loss.statistics is not None:
    statistics = jax.lax.stop_gradient(loss.statistics(logprobs, batch, coefficients))
  losses, metrics = loss.per_token(logprobs, batch, coefficients, statistics)
  mask = batch.mask
  if negative_veto is not None:
    losses, mask, veto_metrics = negative_veto(losses, logprobs, batch, coefficients)
    metrics = {**metrics, **veto_metrics}
  return losses, mask, jax.lax.stop_gradient(reductions.values(metrics))


def train_batch(
  train_example: Any, num_generations: int, policy_logprobs: Array | None = None
) -> TrainBatch:
  """Converts a training example of Tunix, [B, T], to a batch with a group axis, [P, G, T].

  Args:
    train_example: Tunix's training example.
    num_generations: G, the number of rollouts per group.
    policy_logprobs: f32[B, T], nats, used as behavior log-probabilities if Tunix recorded none;
      None for 0.
  Returns:
    A batch of valid rollouts whose rewards are NaN, because Tunix's example has no rewards.
  Raises:
    ValueError: the batch is packed, has importance weights, or does not consist of complete groups.
  """
  B, T = train_example.completion_ids.shape
  for field in ("segment_ids", "sampler_is_weights"):
    if getattr(train_example, field, None) is not None:
      remedy = {
        "segment_ids": "leave max_seq_token_per_tpu unset",
        "sampler_is_weights": "turn Tunix's sampler correction off: the loss has its own weights",
      }[field]
      raise ValueError(
        f"rlvr_jax.integrations.tunix: the batch has {field}, which is not supported; {remedy}"
      )
  if B % num_generations:
    raise ValueError(
      f"rlvr_jax.integrations.tunix: a batch of {B} rollouts does not consist of complete groups of"
      f" num_generations = {num_generations}"
    )
  behavior = train_example.old_per_token_logps
  if behavior is None:
    behavior = jnp.zeros((B, T)) if policy_logprobs is None else policy_logprobs

  def group(x: Any) -> Array:
    return jnp.asarray(x).reshape(-1, num_generations, *x.shape[1:])

  no_rewards = jnp.full((B // num_generations, num_generations), jnp.nan)
  prompts = train_example.prompt_ids[::num_generations]
  lengths = jnp.sum(train_example.prompt_mask[::num_generations], axis=-1, dtype=jnp.int32)
  return TrainBatch(
    prompts=Prompts(tokens=prompts, lengths=lengths),
    tokens=group(train_example.completion_ids),
    mask=group(train_example.completion_mask.astype(jnp.float32)),
    behavior_logprobs=group(jax.lax.stop_gradient(behavior)),
    rewards=no_rewards,
    correct=no_rewards,
    valid=jnp.ones(no_rewards.shape, bool),
  )
