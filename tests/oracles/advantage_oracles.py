"""Every estimator for one group, in plain Python from its formula.

`ESTIMATORS[name](rewards, lengths, hyper-parameters…) → coefficients` of one group of binary
rewards; of a list of groups if the name is in `OF_BATCH`, whose estimators have statistics of the
batch. `MASSES[name](p, 1 − p, hyper-parameters…) → (mS, mF)`, the infinite-group limits.
"""

import itertools
import math

import numpy as np


def _mean(values):
  return math.fsum(values) / len(values)


def _centered(rewards):
  mean = _mean(rewards)
  return [r - mean for r in rewards]


def _asym(rewards, delta):
  return [a if a >= 0 else a / delta for a in _centered(rewards)]


def grpo(rewards, lengths, epsilon=1e-6):
  centered = _centered(rewards)
  std = math.sqrt(math.fsum(a * a for a in centered) / (len(rewards) - 1))
  return [a / (std + epsilon) for a in centered]


def rloo(rewards, lengths):
  others = lambda i: rewards[:i] + rewards[i + 1 :]
  return [r - _mean(others(i)) for i, r in enumerate(rewards)]


def maxrl(rewards, lengths):
  mean = _mean(rewards)
  return [(r - mean) / mean if mean else 0.0 for r in rewards]


def pass_at_k(rewards, lengths, k=4):
  """w by enumeration of all sets of k−1 other rollouts."""
  weights = []
  for i in range(len(rewards)):
    others = rewards[:i] + rewards[i + 1 :]
    chosen = itertools.combinations(others, k - 1)
    weights.append(_mean([max((rewards[i], *others)) for others in chosen]))
  return [k * (w - _mean(weights)) for w in weights]


def power(rewards, lengths, alpha=2.0):
  return [(1 - _mean(rewards)) ** (alpha - 1) * a for a in _centered(rewards)]


def power_asym(rewards, lengths, alpha=2.0, delta=0.5):
  return [(1 - _mean(rewards)) ** (alpha - 1) * a for a in _asym(rewards, delta)]


def log_mean_exp(rewards, lengths, eta=1.0):
  mean = _mean([math.exp(eta * r) for r in rewards])
  return [(math.exp(eta * r) / mean - 1) / eta for r in rewards]


def asymmetric_reinforce(rewards, lengths, baseline_shift=-0.1):
  return [r - (_mean(rewards) + baseline_shift) for r in rewards]


def opo(rewards, lengths):
  baseline = sum(l * r for l, r in zip(lengths, rewards, strict=True)) / sum(lengths)
  return [r - baseline for r in rewards]


def opob(rewards, lengths, by_deviation=False):
  """With W = 1, and lengths for ‖g‖²; see `opob_of`."""
  return opob_of(rewards, [1.0] * len(rewards), lengths, by_deviation)


def opob_of(rewards, weights, squared_norms, by_deviation=False):
  """W and ‖g‖² by rollout of one group."""
  products = [w * w * n for w, n in zip(weights, squared_norms, strict=True)]
  weighted = math.fsum(p * r for p, r in zip(products, rewards, strict=True))
  baseline = weighted / (math.fsum(products) + 1e-8)
  unit = 1.0
  if by_deviation:
    unit = math.sqrt(_mean([a * a for a in _centered(rewards)])) + 1e-8
  return [(r - baseline) / unit if len({*rewards}) > 1 else 0.0 for r in rewards]


def otb(rewards, lengths, zero_tail=True, zero_constant=True):
  """Means over tokens, all of the energy 0.5; see `otb_tokens`."""
  tokens = otb_tokens(rewards, [[0.5] * n for n in lengths], zero_tail, zero_constant)
  return [_mean(of_rollout) for of_rollout in tokens]


def otb_tokens(rewards, energies, zero_tail=True, zero_constant=True):
  """By rollout, A of its loss tokens, from their energies."""
  found = [[] for _ in rewards]
  for t in range(max(map(len, energies))):
    there = [i for i, e in enumerate(energies) if len(e) > t]
    sums = {i: math.fsum(energies[i][: t + 1]) for i in there}
    weighted = math.fsum(sums[i] * rewards[i] for i in there)
    baseline = weighted / (math.fsum(sums.values()) + 1e-8)
    if len(there) == 1:
      baseline = 0.0 if zero_tail else rewards[there[0]]
    for i in there:
      found[i].append(rewards[i] - baseline)
  if zero_constant and len({*rewards}) == 1:
    return [[0.0] * len(of_rollout) for of_rollout in found]
  return found


def _normalized(values, counts, denominator):
  """By group, (x − μ)/denominator(σ²), moments over the batch with each x so many times."""
  repeated = [
    x
    for xs, ns in zip(values, counts, strict=True)
    for x, n in zip(xs, ns, strict=True)
    for _ in range(n)
  ]
  mean = _mean(repeated)
  variance = math.fsum((x - mean) ** 2 for x in repeated) / (len(repeated) - 1)
  return [[(x - mean) / denominator(variance) for x in xs] for xs in values]


def _counts(lengths, over):
  return lengths if over == "tokens" else [[1] * len(of_group) for of_group in lengths]


def reinforce_plus_plus(rewards, lengths, baseline=False, over="rollouts"):
  values = [_centered(group) for group in rewards] if baseline else rewards
  return _normalized(values, _counts(lengths, over), lambda variance: math.sqrt(variance + 1e-8))


def gdpo(rewards, lengths, weights=(1.0,), epsilon=1e-4, batch_epsilon=1e-4, over="rollouts"):
  """Of one reward; of several it is a sum of this, see `gdpo_of_several`."""
  several = [[[r] for r in group] for group in rewards]
  return gdpo_of_several(several, lengths, weights, epsilon, batch_epsilon, over)


def gdpo_of_several(rewards, lengths, weights, epsilon=1e-4, batch_epsilon=1e-4, over="rollouts"):
  """`rewards` are lists of groups of rollouts of K rewards."""
  totals = []
  for group in rewards:
    total = [0.0] * len(group)
    for weight, values in zip(weights, zip(*group, strict=True), strict=True):
      if len({*values}) > 1:
        for i, a in enumerate(grpo([*values], None, epsilon)):
          total[i] += weight * a
    totals.append(total)
  denominator = lambda variance: math.sqrt(variance) + batch_epsilon
  found = _normalized(totals, _counts(lengths, over), denominator)
  if over == "tokens":
    return found
  varies = [any(len({*values}) > 1 for values in zip(*group, strict=True)) for group in rewards]
  return [
    group if varying else [0.0] * len(group) for group, varying in zip(found, varies, strict=True)
  ]


def mt_grpo_turns(rewards, scores, turn_weight=1.0, epsilon=1e-6):
  """By rollout, the coefficients of the policy's turns, whose scores are lists; None: no score."""
  dialogues = grpo(rewards, None, epsilon) if len({*rewards}) > 1 else [0.0] * len(rewards)
  found = [[a] * len(of_turns) for a, of_turns in zip(dialogues, scores, strict=True)]
  for n in range(max(map(len, scores))):
    scored = [i for i, s in enumerate(scores) if n < len(s) and s[n] is not None]
    values = [scores[i][n] for i in scored]
    if len({*values}) > 1:
      for i, a in zip(scored, grpo(values, None, epsilon), strict=True):
        found[i][n] += turn_weight * a
  return found


ESTIMATORS = {
  "asym": lambda rewards, lengths, delta=0.5: _asym(rewards, delta),
  "asymmetric_reinforce": asymmetric_reinforce,
  "gdpo": gdpo,
  "grpo": grpo,
  "grpo_mean": lambda rewards, lengths: _centered(rewards),
  "log_mean_exp": log_mean_exp,
  "maxrl": maxrl,
  "mt_grpo": grpo,  # of one turn; `mt_grpo_turns` of several
  "opo": opo,
  "opob": opob,
  "otb": otb,
  "pass_at_k": pass_at_k,
  "power": power,
  "power_asym": power_asym,
  "reinforce": lambda rewards, lengths: rewards,
  "reinforce_plus_plus": reinforce_plus_plus,
  "reinforce_signed": lambda rewards, lengths: [2 * r - 1 for r in rewards],
  "rloo": rloo,
  "weighted_reinforce": lambda rewards, lengths, success_weight=0.1: [
    success_weight if r == 1 else -1.0 for r in rewards
  ],
}

OF_BATCH = ("gdpo", "reinforce_plus_plus")

# Those that do not compare the rollouts of a group: a constant one is not zero, one is enough.
WITHOUT_GROUP = (
  "asymmetric_reinforce",
  "reinforce",
  "reinforce_plus_plus",
  "reinforce_signed",
  "weighted_reinforce",
)


def _same(mass):
  return mass, mass


# At an infinite group; None: they depend on more than the solve rate.
MASSES = {
  "asym": lambda p, q, delta=0.5: (p * q, p * q / delta),
  "asymmetric_reinforce": lambda p, q, baseline_shift=-0.1: (
    p * (q - baseline_shift),
    q * max(p + baseline_shift, 0),
  ),
  "gdpo": lambda p, q, weights=(1.0,), **_: _same(np.sqrt(p * q)),
  "grpo": lambda p, q, epsilon=1e-6: _same(p * q / (np.sqrt(p * q) + epsilon)),
  "grpo_mean": lambda p, q: _same(p * q),
  "log_mean_exp": lambda p, q, eta=1.0: _same(
    p * q * (np.exp(eta) - 1) / (eta * (p * np.exp(eta) + q))
  ),
  "maxrl": lambda p, q: _same(q),
  "mt_grpo": lambda p, q, epsilon=1e-6: _same(p * q / (np.sqrt(p * q) + epsilon)),
  "opo": None,  # on the lengths
  "opob": None,  # on the norms of gradients
  "otb": None,  # on the tokens' energies, and on the lengths
  "pass_at_k": lambda p, q, k=4: _same(k * p * q**k),
  "power": lambda p, q, alpha=2.0: _same(p * q**alpha),
  "power_asym": lambda p, q, alpha=2.0, delta=0.5: (p * q**alpha, p * q**alpha / delta),
  "reinforce": lambda p, q: (p, 0.0),
  "reinforce_plus_plus": lambda p, q, **_: _same(np.sqrt(p * q)),
  "reinforce_signed": lambda p, q: (p, q),
  "rloo": lambda p, q: _same(p * q),
  "weighted_reinforce": lambda p, q, success_weight=0.1: (success_weight * p, q),
}
