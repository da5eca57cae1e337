"""Compares a sampler with an update, by log-probabilities and by how often tokens are drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from rlvr_jax.ops.logprobs import (
  PROBABILITY_BINS,
  is_truncated,
  probability_bins,
  token_logprobs,
)
from rlvr_jax.types import Array, Params, Prompts, Sampling, TrainBatch
from rlvr_jax.update.accumulate import batch_forward
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
    lengths: i32[P, G], number of tokens of each response; padding after a response uses no experts.
    prompt_routes, routes: the experts that a mixture's routers chose during sampling, to be used
      again; None: the routers choose anew.
    model: provides `combine`, `response_hidden` and `head`.
    sampling: the distribution whose log-probabilities are computed.
  """
  params = model.combine(trained, frozen)
  taken = None
  if prompt_routes is not None and routes is not None:
    taken = routes_of_inputs(prompt_routes, routes)
  hidden = model.response_hidden(params, prompts, tokens, taken, lengths)
  return token_logprobs(hidden, model.head(params), tokens, sampling, mesh=model.mesh)[0]


class Draws(NamedTuple):
  """Counts of drawn tokens in each of the n probability bins `ops.logprobs.PROBABILITY_BINS`."""

  drawn: Array  # f32[n], number of drawn tokens
  expected: Array  # f32[n], expectation of `drawn`, from the total probability of each bin
  variance: Array  # f32[n], variance of `drawn`


class Gap(NamedTuple):
  """A sampler's deviation from updates, whose forward pass gives each token the probability p."""

  mean: Array  # f32[], mean of |log p − behavior_logprobs| over tokens, nats
  largest: Array  # f32[], maximum of |log p − behavior_logprobs|, nats
  draws: Draws


def count_draws(logprobs: Array, masses: tuple[Array, ...], counted: Array) -> Draws:
  """Counts drawn tokens by probability bin.

  The log-probabilities from the sampler cannot show that rare tokens are never drawn; these counts
  can.

  Args:
    logprobs: f32[...], log-probabilities of the drawn tokens.
    masses: f32[...] each, the total probability of each bin, see `TokenStatistics`.
    counted: bool[...], the tokens to count.
  """
  bins = probability_bins(logprobs)
  mass = jnp.where(counted[None], jnp.clip(jnp.stack(masses), 0, 1), 0.0)
  total = lambda x: jnp.sum(x, axis=tuple(range(1, x.ndim)))
  drawn = jnp.stack([jnp.sum(counted & (bins == n)) for n in range(len(PROBABILITY_BINS))])
  return Draws(drawn.astype(mass.dtype), total(mass), total(mass * (1 - mass)))


def draw_z(draws: Draws) -> Array:
  """f32[]: the largest |drawn − expected|/√variance of bins with variance ≥ 5; 0 without such bins.

  Draws are independent given the preceding tokens. So, without a bug, each bin's value is
  approximately the absolute value of a standard normal variable.
  """
  z = jnp.abs(draws.drawn - draws.expected) / jnp.sqrt(jnp.maximum(draws.variance, 1e-30))
  return jnp.max(jnp.where(draws.variance >= 5, z, 0.0))


def behavior_gap(
  trained: Params, frozen: Params, batch: TrainBatch, *, method: Method, sampling: Sampling
) -> Gap:
  """Compares rollouts with an update, by log-probabilities and by counts of drawn tokens; pure.

  p is the probability that an update computes for a token, by its forward pass over packed rows.
  Under truncated sampling, a token at the edge of the kept set may have p = 0 because of rounding;
  such tokens are excluded.

  Args:
    trained, frozen: parameters of the policy that sampled the rollouts.
    batch: packed rollouts; its mask is 1 for every sampled token.
    method: the method of the updates.
    sampling: the distribution that the tokens were sampled from.
  """
  scores, _ = batch_forward(
    trained, frozen, batch, method=method._replace(gram=None), sampling=sampling, masses=True
  )
  logprobs = scores.logprobs
  counted = (batch.mask > 0) & (jnp.isfinite(logprobs) if is_truncated(sampling) else True)
  gaps = jnp.where(counted, jnp.abs(logprobs - batch.behavior_logprobs), 0.0)
  assert scores.masses is not None
  draws = count_draws(logprobs, scores.masses, counted)
  return Gap(gaps.sum() / jnp.maximum(counted.sum(), 1), gaps.max(), draws)
