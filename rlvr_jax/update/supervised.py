"""A short supervised phase on demonstrations, after which an untrained policy can begin RL."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlvr_jax.ops.aggregate import aggregate
from rlvr_jax.ops.logprobs import token_logprobs
from rlvr_jax.types import Array, Params, Prompts

_REPORT_EVERY = 10  # steps between reports of a loss


def supervised_step(
  state: tuple[Params, Any],
  frozen: Params,
  prompts: Prompts,
  solutions: Array,
  mask: Array,
  *,
  model: Any,
  optimizer: optax.GradientTransformation,
) -> tuple[tuple[Params, Any], Array]:
  """Performs one update that minimizes the solutions' mean negative log-likelihood; pure.

  Args:
    state: (trained parameters, optimizer state).
    frozen: the network's other parameters; {} if all are trained.
    prompts: P prompts.
    solutions: i32[P, T], right-padded, stop tokens included.
    mask: bool[P, T], the tokens to learn: the tokens that the policy would generate.
  Returns:
    The next (params, opt_state), and the loss f32[] in nats per token.
  """
  trained, opt_state = state
  tokens = solutions[:, None]  # groups of one response
  mask = mask[:, None].astype(jnp.float32)
  # The last turn of a demonstration is a turn of the policy.
  lengths = jnp.max(jnp.where(mask > 0, jnp.arange(mask.shape[-1]) + 1, 0), axis=-1)

  def loss(trained):
    params = model.combine(trained, frozen)
    hidden = model.response_hidden(params, prompts, tokens, None, lengths)
    logprobs, _ = token_logprobs(hidden, model.head(params), tokens, mesh=model.mesh)
    pair = aggregate(-logprobs, mask, how="token_mean", max_response_length=mask.shape[-1])
    return pair.total / pair.weight

  value, gradient = jax.value_and_grad(loss)(trained)
  updates, opt_state = optimizer.update(gradient, opt_state, trained)
  return (optax.apply_updates(trained, updates), opt_state), value


def warm_start(
  state: tuple[Params, Any],
  frozen: Params,
  batches: Iterator[tuple[Prompts, Array, Array]],
  step: Callable[..., tuple[tuple[Params, Any], Array]],
  *,
  num_steps: int,
  report: Callable[[int, float], None],
) -> Params:
  """Runs `step` `num_steps` times and returns the trained parameters.

  Args:
    state: (trained parameters, optimizer state).
    frozen: the network's other parameters; {} if all are trained.
    batches: (prompts, solutions, mask), as for `supervised_step`.
    step: `supervised_step`, jitted and donating its state.
    num_steps: number of updates.
    report: called with the number and the loss of every tenth step and of the last one, but only
      when the next report is due or the last step is dispatched: reading the loss earlier would
      leave the devices idle.
  Raises:
    FloatingPointError: a loss to report is not finite.
  """
  unread: list[tuple[int, Array]] = []

  def report_unread():
    index, value = unread.pop()
    if not math.isfinite(value := float(value)):
      raise FloatingPointError(
        f"warm start: the loss of step {index} is {value}; lower"
        " the peak of config.warm_start.learning_rate"
      )
    report(index, value)

  for index in range(1, num_steps + 1):
    state, value = step(state, frozen, *next(batches))
    if index % _REPORT_EVERY == 0 or index == num_steps:
      if unread:
        report_unread()
      unread.append((index, value))
  if unread:
    report_unread()
  return state[0]
