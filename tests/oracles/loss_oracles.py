"""Every loss in plain Python from its formula, with its gradient by hand.

`LOSSES[name](policy, behavior, proximal, coefficients, mask, …) → (losses, gradients)`, both
[B, T]: ℓ per token, and the derivative of Σ mℓ by each token's policy log-probability, with what
stands under stop-gradient held constant.
"""

import math

import jax
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


def _distance(p, q, divergence):
  """Between "this token" and "another one" under p and q."""
  if divergence == "tv":
    return abs(p - q)
  if p == q:
    return 0.0
  if p >= 1:
    return math.inf
  others = (1 - q) * math.log((1 - q) / (1 - p)) if q < 1 else 0.0
  return q * math.log(q / p) + others


def _dppo(
  a,
  pi,
  beta,
  prox,
  divergence="tv",
  delta_low=None,
  delta_high=None,
  truncation=20.0,
  form="score",
  anchor="sampler",
  symmetric=False,
  log_ratio_penalty=0.0,
):
  default = {"tv": 0.15, "kl": 0.05}[divergence]
  low, high = (default if d is None else d for d in (delta_low, delta_high))
  p, q = (min(math.exp(x), 1.0) for x in (pi, beta if anchor == "sampler" else prox))
  distance, ratio, d = _distance(p, q, divergence), math.exp(pi - beta), pi - beta
  dropped = (a > 0 and p > q and distance > high) or (a < 0 and p < q and distance > low)
  if symmetric:
    dropped = distance > high
  if dropped:
    loss, gradient = 0.0, 0.0
  elif form == "score":
    loss, gradient = _score(ratio if truncation is None else min(ratio, truncation), a, pi)
  else:
    loss, gradient = -a * ratio, -a * ratio
  return loss + log_ratio_penalty * d * d, gradient + 2 * log_ratio_penalty * d


def _dro(a, pi, beta, prox, penalty=0.1):
  return -a * pi + penalty / 2 * (pi - beta) ** 2, -a + penalty * (pi - beta)


def vespo(
  policy,
  behavior,
  proximal,
  coefficients,
  mask,
  k_positive=2.0,
  lambda_positive=3.0,
  k_negative=3.0,
  lambda_negative=2.0,
  token_truncation=None,
):
  losses, gradients = np.zeros(mask.shape), np.zeros(mask.shape)
  for i, positions in _rollouts(mask):
    if token_truncation is None:
      log_w = sum(policy[i, t] - behavior[i, t] for t in positions)
    else:
      of_sampler = np.minimum(proximal[i] - behavior[i], math.log(token_truncation))
      log_w = sum((policy[i] - proximal[i] + of_sampler)[positions])
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    failed = coefficients[i] < 0
    k, lam = (k_negative, lambda_negative) if failed else (k_positive, lambda_positive)
    phi = math.exp(lam + k * log_w - lam * math.exp(log_w))
    for t in positions:
      losses[i, t], gradients[i, t] = _score(phi, coefficients[i], policy[i, t])
  return losses, gradients


def _covariances(policy, coefficients, mask):
  """{(i, t): (A − mean A)(log π − mean log π)} of the loss tokens, in order."""
  tokens = [(i, t) for i, positions in _rollouts(mask) for t in positions]
  mean_a = np.mean([coefficients[i] for i, _ in tokens])
  mean_pi = np.mean([policy[token] for token in tokens])
  return {(i, t): (coefficients[i] - mean_a) * (policy[i, t] - mean_pi) for i, t in tokens}


def _number(share, tokens):
  return max(math.floor(share * len(tokens)), 1)


def clip_cov(
  policy,
  behavior,
  proximal,
  coefficients,
  mask,
  share=2e-4,
  low=1.0,
  high=5.0,
  epsilon_low=0.2,
  epsilon_high=0.2,
  seed=0,
):
  """Of batches whose tokens are all 1, as those of `random_case`."""
  losses, gradients = _per_token(_ppo_clip)(
    policy,
    behavior,
    proximal,
    coefficients,
    mask,
    epsilon_low=epsilon_low,
    epsilon_high=epsilon_high,
  )
  covariances = _covariances(policy, coefficients, mask)

  def is_clipped(i, t):
    ratio = math.exp(policy[i, t] - behavior[i, t])
    return (coefficients[i] > 0 and ratio > 1 + epsilon_high) or (
      coefficients[i] < 0 and ratio < 1 - epsilon_low
    )

  eligible = [at for at, c in covariances.items() if low < c < high and not is_clipped(*at)]
  hashed = sum(2 * rank + 1 for rank in range(len(covariances))) % 2**32
  key = jax.random.fold_in(jax.random.key(seed), np.uint32(hashed))
  chances = {
    at: float(jax.random.uniform(jax.random.fold_in(key, rank)))
    for rank, at in enumerate(covariances)
  }
  drawn = sorted(eligible, key=lambda at: -chances[at])[: _number(share, covariances)]
  for at in drawn:
    losses[at], gradients[at] = 0.0, 0.0
  return losses, gradients


def kl_cov(policy, behavior, proximal, coefficients, mask, share=2e-4, coefficient=1.0):
  unclipped = {"epsilon_low": 1.0, "epsilon_high": math.inf}
  losses, gradients = _per_token(_ppo_clip)(
    policy, behavior, proximal, coefficients, mask, **unclipped
  )
  covariances = _covariances(policy, coefficients, mask)
  for at in sorted(covariances, key=lambda at: -covariances[at])[: _number(share, covariances)]:
    d = policy[at] - behavior[at]
    losses[at] += coefficient * abs(d)
    gradients[at] += coefficient * np.sign(d)
  return losses, gradients


LOSSES = {
  "cispo": _per_token(_cispo),
  "clip_cov": clip_cov,
  "decoupled_ppo": _per_token(_decoupled),
  "dppo": _per_token(_dppo),
  "dro": _per_token(_dro),
  "gmpo": gmpo,
  "gspo": gspo,
  "kl_cov": kl_cov,
  "m2po": m2po,
  "p3o": p3o,
  "ppo_clip": _per_token(_ppo_clip),
  "reinforce": _per_token(_reinforce),
  "sapo": _per_token(_sapo),
  "topr": topr,
  "vespo": vespo,
}
