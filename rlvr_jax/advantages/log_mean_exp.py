"""Risk-sensitive advantages: the gradient of log-mean-exp of the reward."""

from __future__ import annotations

import jax

from rlvr_jax.advantages.base import Advantage, as_group, stateless, zero_if_constant
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.groups import count_valid
from rlvr_jax.types import Array


def log_mean_exp_advantages(rewards: Array, valid: Array, *, eta: float) -> Array:
  """A = (e^{ηr}/mean e^{ηr} − 1)/η, with the mean over the group.

  Args:
    rewards: f32[P, G].
    valid: bool[P, G].
    eta: η > 0, in units of 1/reward; larger values favor the best rollouts.
  Returns:
    f32[P, G]. In large groups, the gradient masses of successes and of failures are both
    pq(e^η − 1)/(η(p·e^η + q)), where p = 1 − q is the solve rate.
  Source: "Risk-Sensitive RL for Alleviating Exploration Dilemmas in Large Language Models"
    (arXiv:2509.24261).
  """
  rewards = as_group("log_mean_exp", rewards, valid)
  shares = jax.nn.softmax(eta * rewards, axis=1, where=valid > 0)
  return zero_if_constant((count_valid(valid) * shares - 1) / eta, rewards, valid)


def log_mean_exp(*, eta: float = 1.0) -> Advantage:
  """A = (e^{ηr}/mean e^{ηr} − 1)/η; see `log_mean_exp_advantages`."""
  check_between("log_mean_exp", "eta", eta, low=0.0, open_low=True)
  return stateless(lambda batch: log_mean_exp_advantages(batch.rewards, batch.valid, eta=eta))
