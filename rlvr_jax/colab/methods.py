"""Coefficients that an estimator gives to a group, and weights that a loss gives to tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax import parts
from rlvr_jax.advantages import Advantage
from rlvr_jax.losses import Loss
from rlvr_jax.types import Array


class Coefficients(NamedTuple):
  """Coefficients of a success and of a failure, for 0 … G successes in the group."""

  success: np.ndarray  # f32[G + 1], NaN without a success
  failure: np.ndarray  # f32[G + 1], NaN without a failure


def coefficients(advantage: Advantage, group_size: int) -> Coefficients:
  """Coefficients of an estimator in groups with 0 … G successes; rewards are 0 and 1.

  A stateful estimator is in its initial state, with an initial entropy of 1 nat per token.
  """
  G = group_size
  rewards = (np.arange(G)[None] < np.arange(G + 1)[:, None]).astype(np.float32)
  state = advantage.init(jnp.float32(1.0))
  A = np.asarray(parts.advantages_of(advantage, jnp.asarray(rewards), state=state))
  nan = np.float32("nan")
  success = np.where(rewards[:, 0] == 1, A[:, 0], nan)
  failure = np.where(rewards[:, -1] == 0, A[:, -1], nan)
  return Coefficients(success, failure)


def token_weights(loss: Loss, ratios: np.ndarray, coefficient: float) -> np.ndarray:
  """The weight −∂ℓ/∂log π of each token, where ℓ is its loss and log π its log-probability.

  Each token is a whole response.

  Args:
    loss: policy loss; its batch statistics, if any, are over all N tokens.
    ratios: f32[N], each token's probability under the policy, divided by its probability under the
      behavior policy.
    coefficient: the coefficient of every token.
  Returns:
    f32[N].
  """
  policy = jnp.log(jnp.asarray(ratios, jnp.float32))[None, :, None]
  A = jnp.full(policy.shape[:2], coefficient, jnp.float32)
  behavior = jnp.zeros(policy.shape)
  mask = jnp.ones(policy.shape)

  def mean_loss(logprobs: Array) -> Array:
    return parts.loss_of(loss, logprobs, behavior, A, mask)[0]

  return -len(ratios) * np.asarray(jax.grad(mean_loss)(policy)).reshape(-1)
