"""One update of the policy, as a pure function.

Rewards become coefficients. The loss and its gradient cover the full batch: `accumulate` sums over
micro-batches, and `objective` computes the terms of one micro-batch. The optimizer's new parameters
are applied only if loss and gradient are finite.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlvr_jax.ops import reductions
from rlvr_jax.ops.keys import key_for
from rlvr_jax.ops.update_metrics import batch_metrics
from rlvr_jax.types import Array, Params, TrainBatch, TrainState
from rlvr_jax.update.accumulate import update_gradient
from rlvr_jax.update.objective import Method, estimate_coefficients


def initial_state(method: Method, trained: Params, initial_entropy: Array) -> TrainState:
  """The train state before the first update; `initial_entropy` is f32[], in nats per token."""
  # The arrays are distinct, since a donated state must not have the same buffer twice.
  zero = lambda: jnp.zeros((), jnp.int32)
  return TrainState(
    params=trained,
    opt_state=method.optimizer.init(trained),
    advantage_state=method.advantage.init(initial_entropy),
    step=zero(),
    skipped=zero(),
    skipped_in_a_row=zero(),
  )


def train_step(
  state: TrainState, frozen: Params, batch: TrainBatch, teacher: Any = None, *, method: Method
) -> tuple[TrainState, dict[str, Array]]:
  """Performs one update on one batch; callers bind `method`, jit the function and donate the state.

  If loss or gradient are not finite, the update is skipped: only the state's counters change.

  Args:
    state: `params` are the trained parameters.
    frozen: the network's other parameters; {} if all are trained.
    batch: graded rollouts.
    teacher: (trained, frozen) parameters of the teacher, if the method compares the policy with a
      teacher.
  Returns:
    The next state, and metrics, f32[] by name; a metric without any values to average is NaN.
  """
  estimate = functools.partial(estimate_coefficients, state.advantage_state, method=method)
  key = key_for(method.seed, "reweighting", state.step)
  (surrogate, metrics), gradient = update_gradient(
    state.params, frozen, batch, estimate, key, method=method, teacher=teacher
  )
  values = reductions.values({**metrics, **batch_metrics(batch)})

  solve_rate = None if batch.solve_rate is None else jnp.mean(batch.solve_rate)
  advantage_state = method.advantage.update(
    state.advantage_state, batch, values["policy/entropy"], solve_rate
  )
  with jax.named_scope("optimizer"):
    norm = optax.tree.norm(gradient)
    updates, opt_state = method.optimizer.update(gradient, state.opt_state, state.params)
    proposed = (optax.apply_updates(state.params, updates), opt_state, advantage_state)
    current = (state.params, state.opt_state, state.advantage_state)
    finite = jnp.isfinite(surrogate) & jnp.isfinite(norm)
    keep = lambda new, old: jnp.where(finite, new, old)
    params, opt_state, advantage_state = jax.tree.map(keep, proposed, current)

  skipped = 1 - finite.astype(jnp.int32)
  applied = state.step - state.skipped  # the optimizer's count: it does not count skipped updates
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
    "update/learning_rate": jnp.asarray(method.learning_rate(applied)),
    "update/skipped": state.skipped,
    "update/skipped_in_a_row": state.skipped_in_a_row,
  }
  return state, values
