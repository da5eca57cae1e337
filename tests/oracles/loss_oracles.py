"""Every loss in plain Python from its formula, with its gradient by hand.

`LOSSES[name](policy, behavior, proximal, coefficients, mask, …) → (losses, gradients)`, both
[B, T]: ℓ per token, and the derivative of Σ mℓ by each token's policy log-probability, with what
stands under stop-gradient held constant.
"""

import math

import numpy as np


def _rollouts(mask):
  """(i, the list of its token positions) of every rollout with a token."""
  for i, row in enumerate(mask):
    positions = [t for t, m in enumerate(row) if m]
    if positions:
      yield i, positions


def _per_token(formula):
  """Lifts (A, log π, log β, log π_prox) → (ℓ, dℓ) of one token."""

  def loss(policy, behavior, proximal, coefficients, mask, **hyper):
    losses, gradients = np.zeros(mask.shape), np.zeros(mask.shape)
    for i, positions in _rollouts(mask):
      for t in positions:
        losses[i, t], gradients[i, t] = formula(
          coefficients[i], policy[i, t], behavior[i, t], proximal[i, t], **hyper
        )
    return losses, gradients

  return loss


def _clipped(a, ratio, low, high):
  """max(−Aρ, −A·clip(ρ)) and its derivative by log ρ."""
  inside = min(max(ratio, low), high)
  if -a * inside > -a * ratio:
    return -a * inside, 0.0
  return -a * ratio, -a * ratio


def _ppo_clip(a, pi, beta, prox, epsilon_low=0.2, epsilon_high=0.2, dual_clip=None):
  loss, gradient = _clipped(a, math.exp(pi - beta), 1 - epsilon_low, 1 + epsilon_high)
  if dual_clip is not None and a < 0 and loss > -a * dual_clip:
    return -a * dual_clip, 0.0
  return loss, gradient


def _score(weight, a, pi):
  return -weight * a * pi, -weight * a


def _reinforce(a, pi, beta, prox, truncation=None):
  return _score(1.0 if truncation is None else min(math.exp(pi - beta), truncation), a, pi)


def _cispo(a, pi, beta, prox, epsilon_low=0.2, epsilon_high=0.2):
  weight = min(max(math.exp(pi - beta), 1 - epsilon_low), 1 + epsilon_high)
  return _score(weight, a, pi)


def _sapo(a, pi, beta, prox, temperature_positive=1.0, temperature_negative=1.05):
  tau = temperature_positive if a > 0 else temperature_negative
  ratio = math.exp(pi - beta)
  sigmoid = 1 / (1 + math.exp(-tau * (ratio - 1)))
  return -a * 4 / tau * sigmoid, -a * 4 * sigmoid * (1 - sigmoid) * ratio


def _decoupled(a, pi, beta, prox, epsilon_low=0.2, epsilon_high=0.2, behavior_weight_cap=2.0):
  weight = min(math.exp(prox - beta), behavior_weight_cap)
  loss, gradient = _clipped(a, math.exp(pi - prox), 1 - epsilon_low, 1 + epsilon_high)
  return weight * loss, weight * gradient


def gspo(policy, behavior, proximal, coefficients, mask, epsilon_low=3e-4, epsilon_high=4e-4):
  losses, gradients = np.zeros(mask.shape), np.zeros(mask.shape)
  for i, positions in _rollouts(mask):
    s = math.exp(np.mean([policy[i, t] - behavior[i, t] for t in positions]))
    for t in positions:
      losses[i, t], gradients[i, t] = _clipped(
        coefficients[i], s, 1 - epsilon_low, 1 + epsilon_high
      )
  return losses, gradients


def gmpo(policy, behavior, proximal, coefficients, mask, epsilon_low=0.4, epsilon_high=0.4):
  losses, gradients = np.zeros(mask.shape), np.zeros(mask.shape)
  for i, positions in _rollouts(mask):
    a, bounded, free = coefficients[i], [], []
    for t in positions:
      d = policy[i, t] - behavior[i, t]
      inside = min(max(d, -epsilon_low), epsilon_high)
      binds = (a > 0 and inside < d) or (a < 0 and inside > d)
      bounded.append(inside if binds else d)
      free.append(not binds)
    value = -a * math.exp(np.mean(bounded))
    for t, moves in zip(positions, free, strict=True):
      # n equal values, each with derivative value/n by every token that moves.
      losses[i, t], gradients[i, t] = value, value * moves
  return losses, gradients


def topr(policy, behavior, proximal, coefficients, mask):
  losses, gradients = np.zeros(mask.shape), np.zeros(mask.shape)
  for i, positions in _rollouts(mask):
    ratio = math.prod(math.exp(policy[i, t] - behavior[i, t]) for t in positions)
    weight = min(ratio, 1.0) if coefficients[i] < 0 else 1.0
    for t in positions:
      losses[i, t], gradients[i, t] = _score(weight, coefficients[i], policy[i, t])
  return losses, gradients


def m2po(
  policy,
  behavior,
  proximal,
  coefficients,
  mask,
  budget=0.04,
  min_epsilon_low=0.3,
  min_epsilon_high=0.5,
):
  squares = []
  for i, positions in _rollouts(mask):
    for t in positions:
      d = policy[i, t] - behavior[i, t]
      if (coefficients[i] > 0 and d > 0) or (coefficients[i] < 0 and d < 0):
        squares.append(d * d)
  low, high = 0.0, math.inf
  if squares and np.mean(squares) > budget:
    fitting = [s for s in squares if sum(min(x, s) for x in squares) < budget * len(squares)]
    bound = math.sqrt(max(max(fitting, default=0.0) - 1e-12, 0.0))
    low = min(math.exp(-bound), 1 - min_epsilon_low)
    high = max(math.exp(bound), 1 + min_epsilon_high)
  formula = lambda a, pi, beta, prox: _clipped(a, math.exp(pi - beta), low, high)
  return _per_token(formula)(policy, behavior, proximal, coefficients, mask)


def _ess(ratios):
  return sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios)) if ratios else 1.0


def p3o(
  policy,
  behavior,
  proximal,
  coefficients,
  mask,
  ess="batch",
  ess_scope=None,
  cap="ess",
  kl_term=True,
):
  ratio = lambda i, t: math.exp(policy[i, t] - behavior[i, t])
  size = ess_scope or len(mask)
  losses, gradients = np.zeros(mask.shape), np.zeros(mask.shape)
  for i, positions in _rollouts(mask):
    of_batch = _ess(
      [ratio(j, t) for j, ts in _rollouts(mask) for t in ts if j // size == i // size]
    )
    of_sequence = _ess([ratio(i, t) for t in positions])
    e = {"batch": of_batch, "sequence": of_sequence, "one": 1.0}[ess]
    for t in positions:
      limit = {"ess": e, "inverse_ess": 1 / e, "none": math.inf}[cap]
      losses[i, t], gradients[i, t] = _score(min(ratio(i, t), limit), coefficients[i], policy[i, t])
      if kl_term:
        d = behavior[i, t] - policy[i, t]
        exponential = math.exp(min(max(d, -10.0), 10.0))
        losses[i, t] += (1 - e) * (-d + exponential - 1)
        gradients[i, t] += (1 - e) * (1 - exponential * (-10 < d < 10))
  return losses, gradients


LOSSES = {
  "cispo": _per_token(_cispo),
  "decoupled_ppo": _per_token(_decoupled),
  "gmpo": gmpo,
  "gspo": gspo,
  "m2po": m2po,
  "p3o": p3o,
  "ppo_clip": _per_token(_ppo_clip),
  "reinforce": _per_token(_reinforce),
  "sapo": _per_token(_sapo),
  "topr": topr,
}
