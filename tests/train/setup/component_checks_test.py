"""What a loss or an advantage of one's own is told when it returns, or does, what it must not."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train import tiny

from rlvr_jax.advantages import stateless
from rlvr_jax.losses import Loss, token_loss
from rlvr_jax.train.setup.build import build


def own(function):
  """A factory of the loss of a function of tokens."""
  return lambda: token_loss(function)


def of_batch(function):
  """A factory of the loss of a function of log-probabilities and batch."""
  return lambda: Loss(lambda logprobs, batch, coefficients, statistics: function(logprobs, batch))


def branching(tokens):
  losses = -tokens.ratios
  if losses.sum() > 0:
    losses = -losses
  return losses, tokens.mask


per_rollout = own(lambda tokens: (tokens.coefficients[..., 0], tokens.mask))
one_array = own(lambda tokens: tokens.policy_logprobs)
odd_clipped = own(lambda tokens: (tokens.policy_logprobs, jnp.zeros(())))
branch = own(branching)
numpys = own(lambda tokens: (np.exp(np.asarray(tokens.log_ratios)), tokens.mask))
misspelled = own(lambda tokens: (tokens.ratio, tokens.mask))
summed = of_batch(lambda logprobs, batch: (logprobs.sum(-1), {}))
no_metrics = of_batch(lambda logprobs, batch: logprobs)
plain_metric = of_batch(lambda logprobs, batch: (logprobs, {"own/loss": logprobs.mean()}))
by_prompt = lambda: stateless(lambda batch: batch.rewards.mean(1))
branch_on_rewards = lambda: stateless(lambda b: b.rewards if b.rewards[0, 0] else -b.rewards)
HERE = r"here \[P, G, T\] = \[8, 4, 4\]$"
MISTAKES = [
  ("loss", "per_rollout", rf"returns \(float32\[8, 4\], float32\[8, 4, 4\]\); it must .*{HERE}"),
  ("loss", "one_array", rf"token_loss returns float32\[8, 4, 4\]; it must return \(losses.*{HERE}"),
  ("loss", "odd_clipped", rf"float32\[\]\); .* \[P, G, T\] or \[P, G, 1\], or is False; {HERE}"),
  (
    "loss",
    "branch",
    r"TracerBoolConversionError: Attempted boolean conversion .*component_checks_test\.py, line"
    rf" {branching.__code__.co_firstlineno + 2}\); use jnp\.where in place of if$",
  ),
  ("loss", "numpys", r"TracerArrayConversionError: .*; use jax\.numpy in place of numpy$"),
  ("loss", "misspelled", r"AttributeError: 'Tokens' object has no attribute 'ratio' \(.*, line"),
  ("loss", "summed", rf"per_token returns \(float32\[8, 4\], dict\); it must return .*{HERE}"),
  ("loss", "no_metrics", r"per_token returns float32\[8, 4, 4\]; .* \(losses f32\[P, G, T\], metr"),
  ("loss", "plain_metric", r"metric 'own/loss' is float32\[\]; it must be a Mean, Max, Min or Sum"),
  ("advantage", "by_prompt", r"returns float32\[8\]; it .* coefficients \[P, G\], here \[8, 4\]$"),
  ("advantage", "branch_on_rewards", r"TracerBoolConversionError: .*; use jnp\.where in place of"),
]


@pytest.mark.parametrize(("field", "name", "message"), MISTAKES, ids=[m[1] for m in MISTAKES])
def test_a_wrong_component_has_one_line_before_anything_is_compiled(field, name, message, caplog):
  text = f"{__name__}:{name}"
  prefix = rf"^config\.{field} = '{text}': "
  with (
    jax.log_compiles(),
    caplog.at_level(logging.WARNING),
    pytest.raises(ValueError, match=f"{prefix}.*{message}") as error,
  ):
    build(tiny.config(**{field: text}))
  assert "\n" not in str(error.value) and "Compiling jit(train_step)" not in caplog.text


def truncated(*, learning_rate):
  """An optimizer that updates one entry of each parameter."""
  first = lambda updates, state, params=None: (jax.tree.map(lambda x: x[:1], updates), state)
  return optax.GradientTransformation(optax.sgd(learning_rate).init, first)


OPTIMIZERS = [
  ("optimizer", "optax:adamw(b1='a')", r"TypeError: unsupported operand type\(s\) for -: "),
  ("optimizer", "optax:lbfgs", r"TypeError: .* missing 3 required keyword-only arguments"),
  ("optimizer", f"{__name__}:truncated", r"its updates do not have the shapes of the parameters"),
  ("warm_start.optimizer", "optax:adamw(weight_decay='x')", r"TypeError: Only integer scalar"),
]


@pytest.mark.parametrize(("field", "text", "message"), OPTIMIZERS, ids=[o[1] for o in OPTIMIZERS])
def test_an_optimizer_that_fails_where_it_is_traced_has_one_line(field, text, message):
  with pytest.raises(ValueError) as error:
    build(tiny.config(**{field.replace(".", "__"): text}))
  told = str(error.value)
  assert re.match(rf"{re.escape(f'config.{field} = {text!r}: ')}{message}", told), told
  assert "\n" not in told


def right():
  return token_loss(lambda tokens: (tokens.policy_logprobs, jnp.zeros_like(tokens.coefficients)))


def test_a_bound_on_whole_rollouts_is_accepted():
  assert isinstance(build(tiny.config(loss=f"{__name__}:right")).method.loss, Loss)
