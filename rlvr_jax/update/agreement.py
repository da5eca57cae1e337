"""The distance of a sampler's log-probabilities from an update's, and those of a padded batch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rlvr_jax.ops.logprobs import is_truncated, token_logprobs
from rlvr_jax.types import Array, Params, Prompts, Sampling, TrainBatch
from rlvr_jax.update.accumulate import policy_logprobs
from rlvr_jax.update.objective import Method, routes_of_inputs


def response_logprobs(
  trained: Params,
  frozen: Params,
  prompts: Prompts,
  tokens: Array,
  lengths: Array,
  prompt_routes: Array | None = None,
  routes: Array | None = None,
  *,
  model: Any,
  sampling: Sampling,
) -> Array:
  """Log-probabilities of responses, f32[P, G, T] nats, by one forward pass.

  Args:
    trained, frozen: parameters of the policy that sampled the rollouts.
    prompts: P prompts.
    tokens: i32[P, G, T].
    lengths: i32[P, G], tokens of each response; those behind have no experts.
    prompt_routes, routes: that a mixture takes, as recorded; None: its routers choose.
    model: provides `combine`, `response_hidden` and `head`.
    sampling: the distribution.
  """
  params = model.combine(trained, frozen)
  taken = None
  if prompt_routes is not None and routes is not None:
    taken = routes_of_inputs(prompt_routes, routes)
  hidden = model.response_hidden(params, prompts, tokens, taken, lengths)
  return token_logprobs(hidden, model.head(params), tokens, sampling, mesh=model.mesh)[0]


def behavior_gap(
  trained: Params, frozen: Params, batch: TrainBatch, *, method: Method, sampling: Sampling
) -> tuple[Array, Array]:
  """(mean, maximum) of |log p − behavior_logprobs| over the tokens of rollouts, f32[] nats; pure.

  p is the probability that an update computes, by the same forward pass over packed rows. Under
  truncated sampling, a token at the edge of the kept set may have p = 0 because of rounding; such
  tokens are excluded.

  Args:
    trained, frozen: parameters of the policy that sampled the rollouts.
    batch: packed rollouts; its mask is 1 for every sampled token.
    method: of the updates.
    sampling: the distribution that the tokens were sampled from.
  """
  logprobs, _ = policy_logprobs(trained, frozen, batch, method=method, sampling=sampling)
  counted = (batch.mask > 0) & (jnp.isfinite(logprobs) if is_truncated(sampling) else True)
  gaps = jnp.where(counted, jnp.abs(logprobs - batch.behavior_logprobs), 0.0)
  return gaps.sum() / jnp.maximum(counted.sum(), 1), gaps.max()
