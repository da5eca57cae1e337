"""Traces components on shapes, so that a mistake gives a one-line error before compilation."""

from __future__ import annotations

import dataclasses
import functools
import os
import traceback
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

import rlvr_jax
from rlvr_jax.advantages.base import NEEDS
from rlvr_jax.ops.checks import describe
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.setup.programs import abstract_update_batch
from rlvr_jax.types import Array, BatchShape, Metric, Params, TrainBatch, TrainState
from rlvr_jax.update.diagnostics import Diagnostics
from rlvr_jax.update.objective import Method
from rlvr_jax.update.step import train_step

# Traceback frames in these folders are not in the module of a user's component.
_LIBRARIES = (
  os.path.dirname(rlvr_jax.__file__),
  *(os.path.dirname(str(module.__file__)) for module in (os, jax, chex, optax)),
)
_REMEDIES: dict[type[Exception], str] = {
  jax.errors.TracerBoolConversionError: "use jnp.where in place of if",
  jax.errors.TracerArrayConversionError: "use jax.numpy in place of numpy",
}


def check_optimizer(
  owner: str, name: str, transformation: optax.GradientTransformation, params: Params
) -> None:
  """Raises ValueError if tracing an optimizer on shapes fails.

  Args:
    owner: group of fields of the configuration, such as "config.warm_start".
    name: the value of the group's field `optimizer`.
    transformation: the result of `build.make_optimizer`.
    params: shapes and dtypes of the trained parameters.
  """
  owner = f"{owner}.optimizer = {name!r}"

  def updates(params: Params) -> Params:
    return transformation.update(params, transformation.init(params), params)[0]

  changes = _trace(owner, updates, params)
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  if shapes(changes) != shapes(params):
    raise ValueError(
      f"{owner}: its updates do not have the shapes of the parameters; it must map gradients to"
      " updates of the same shapes"
    )


def check_update(
  method: Method,
  placement: Placement,
  shape: BatchShape,
  *,
  advantage: str,
  loss: str,
  diagnose: Callable[..., Diagnostics] | None,
  teacher: tuple[Params, Params] | None = None,
  has_turns: bool = False,
  num_rewards: int = 0,
) -> None:
  """Traces one update on shapes, so that errors in components are raised before compilation.

  Args:
    method, placement: method and placement of the run.
    shape: the shape of a training batch.
    advantage, loss: `config.advantage` and `config.loss`, for messages.
    diagnose: the result of `programs.make_measure`; None if the run measures no gradient geometry.
    teacher: shapes, from `programs.abstract_teacher`.
    has_turns: whether rollouts are dialogues.
    num_rewards: K, the number of graders whose scores are in `rewards_by_name`.
  """
  state, frozen = placement.state, placement.frozen
  sizes: dict[str, Any] = dict(has_turns=has_turns, num_rewards=num_rewards)
  batch = abstract_update_batch(method, placement, shape, **sizes)
  coefficients = _check_advantage(advantage, method, state, batch)
  _check_loss(loss, method, batch, coefficients)
  jax.eval_shape(functools.partial(train_step, method=method), state, frozen, batch, teacher)
  if diagnose is not None:
    jax.eval_shape(diagnose, state, frozen, state.params, batch, teacher)


def _check_advantage(
  name: str, method: Method, state: TrainState, batch: TrainBatch
) -> jax.ShapeDtypeStruct:
  """Raises ValueError if `config.advantage` fails, or its coefficients are not [P, G].

  Returns:
    The coefficients that the loss gets, [P, G] or [P, G, T].
  """
  owner = f"config.advantage = {name!r}"
  if unknown := {*method.advantage.needs} - {*NEEDS}:
    raise ValueError(
      f"{owner}: its field `needs` names {sorted(unknown)}, which no batch has; allowed are"
      f" {list(NEEDS)}"
    )
  of = lambda like: jax.ShapeDtypeStruct(like.shape, jnp.float32)
  measured: dict[str, Any] = {"squared_norms": of(batch.rewards)}
  measured |= dict.fromkeys(("policy_logprobs", "squared_probabilities"), of(batch.tokens))
  batch = dataclasses.replace(batch, **{name: measured[name] for name in method.measured})
  coefficients = _trace(owner, method.advantage.apply, state.advantage_state, batch)
  if getattr(coefficients, "shape", None) != batch.rewards.shape:
    raise ValueError(
      f"{owner}: the advantage returns {describe(coefficients)}; it must return coefficients"
      f" [P, G], here {list(batch.rewards.shape)}"
    )
  in_loss: jax.ShapeDtypeStruct
  in_loss = _trace(owner, method.advantage.in_loss, state.advantage_state, batch, coefficients)
  if getattr(in_loss, "shape", None) not in (batch.rewards.shape, batch.tokens.shape):
    raise ValueError(
      f"{owner}: per_token of the advantage returns {describe(in_loss)}; it must return"
      f" coefficients [P, G, T], here {list(batch.tokens.shape)}"
    )
  return in_loss


def _check_loss(
  name: str, method: Method, batch: TrainBatch, coefficients: jax.ShapeDtypeStruct
) -> None:
  """Raises ValueError if `config.loss` fails, or does not return (losses [P, G, T], metrics)."""
  owner, loss = f"config.loss = {name!r}", method.loss

  def losses_of(logprobs: Array, batch: TrainBatch, coefficients: Array) -> object:
    statistics = loss.statistics and loss.statistics(logprobs, batch, coefficients)
    return loss.per_token(logprobs, batch, coefficients, statistics)

  shape = batch.tokens.shape
  logprobs = jax.ShapeDtypeStruct(shape, jnp.float32)
  returned = _trace(owner, losses_of, logprobs, batch, coefficients)
  pair = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
  if getattr(pair[0], "shape", None) != shape or not isinstance(pair[1], dict):
    raise ValueError(
      f"{owner}: per_token returns {describe(returned)}; it must return (losses f32[P, G, T],"
      f" metrics), here [P, G, T] = {list(shape)}"
    )
  for name, metric in pair[1].items():
    if not isinstance(metric, Metric):
      raise ValueError(
        f"{owner}: its metric {name!r} is {describe(metric)}; it must be a Mean, Max, Min or Sum"
        " of rlvr_jax.types"
      )


def _trace(owner: str, function: Callable[..., object], *shapes: object) -> Any:
  """Shapes of the results of a component; an error in the component is a ValueError of one line."""
  try:
    return jax.eval_shape(function, *shapes)
  except Exception as error:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    position = f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""
    remedy = next((f"; {do}" for cls, do in _REMEDIES.items() if isinstance(error, cls)), "")
    raise ValueError(f"{owner}: {kind}{text}{position}{remedy}") from error
