"""Policies small enough that all their batches can be enumerated, and what n_eff must be for them.

The derivation is README.md, which this file's symbols follow. A policy has one prompt or
several, a vocabulary of three tokens and responses of at most two tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlvr_jax.evaluate.compare import markdown_table

Floats = npt.NDArray[np.float64]

END = 2  # the stop token; the others are 0 and 1
LENGTH = 2  # tokens of the longest response; one without a stop token is cut
RESPONSES = ((END,), (0, END), (1, END), (0, 0), (0, 1), (1, 0), (1, 1))
WIDTH = 2  # of a hidden state
CENTERED, UNCENTERED, GRPO = "r − r̄", "r", "(r − r̄)/deviation"


class Outcomes(NamedTuple):
  """Everything that a rollout of one prompt can be: S responses with their rewards."""

  probs: Floats  # f64[S], of the distribution that samples
  features: Floats  # f64[S, F], g
  rewards: Floats  # f64[S], r


class Policy(NamedTuple):
  """A policy on one prompt: the softmax of a head's products with hidden states."""

  head: Floats  # f64[WIDTH, 3], shared by all prompts
  hidden: Floats  # f64[3, WIDTH], before the first token, after token 0, and after token 1


class Energies(NamedTuple):
  """Expectations of the numerator and the denominator of n_eff."""

  together: float  # E ‖Σ A g‖²
  separate: float  # E Σ A² ‖g‖²

  @property
  def n_eff(self) -> float:
    """The ratio of the two expectations."""
    return self.together / self.separate if self.separate > 0 else 1.0


class Enumerated(NamedTuple):
  """Exact expectations over all batches."""

  energies: Energies
  n_eff: float  # E[n_eff] over the batches whose coefficients carry a gradient
  alpha: float  # E[clip(1 − n_eff, 0, 1)], likewise


# --- a policy's outcomes --------------------------------------------------------------------------


def random_policy(rng: np.random.Generator, *, scale: float = 1.0) -> Policy:
  return Policy(scale * rng.normal(size=(WIDTH, 3)), rng.normal(size=(3, WIDTH)))


def make_outcomes(
  policy: Policy,
  success: Floats,
  *,
  sampler: Policy | None = None,
  temperature: float = 1.0,
  top: int = 3,
  feature: str = "score",
  mean_over_tokens: bool = False,
  without_cut: bool = False,
) -> Outcomes:
  """Enumerates responses and rewards.

  Args:
    policy: the target policy, whose gradients are taken.
    success: f64[7], the chance that a response of `RESPONSES` gets the reward 1.
    sampler: what samples, at `temperature`, from its `top` most likely tokens; None: `policy`.
    feature: "score" or "sampled".
    mean_over_tokens: whether g is divided by the response's length.
    without_cut: whether g of a response without a stop token is 0, as with `overlong.filter`.
  """
  sampler = policy if sampler is None else sampler
  probs, features = [], []
  for response in RESPONSES:
    chance, g = 1.0, np.zeros((WIDTH, 3))
    for position, token in enumerate(response):
      prefix = 0 if position == 0 else 1 + response[0]
      chance *= _softmax(sampler.hidden[prefix] @ sampler.head / temperature, top)[token]
      onehot = np.eye(3)[token]
      softmax = _softmax(policy.hidden[prefix] @ policy.head) if feature == "score" else 0.0
      g += np.outer(policy.hidden[prefix], softmax - onehot)
    if mean_over_tokens:
      g /= len(response)
    if without_cut and response[-1] != END:
      g *= 0
    probs.append(chance)
    features.append(g.ravel())
  weights = np.stack([np.asarray(probs) * success, np.asarray(probs) * (1 - success)])
  rewards = np.repeat([1.0, 0.0], len(RESPONSES))
  both = Outcomes(weights.ravel(), np.concatenate([features, features]), rewards)
  possible = both.probs > 0
  return Outcomes(*(x[possible] for x in both))


def _softmax(logits: Floats, top: int = 3) -> Floats:
  """Probabilities of the `top` most likely tokens, 0 for the others."""
  weights = np.exp(logits - logits.max())
  weights[np.argsort(weights)[: logits.size - top]] = 0.0
  return weights / weights.sum()


# --- by formula -----------------------------------------------------------------------------------


class Moments(NamedTuple):
  """Moments of one prompt's rollouts, under the distribution that samples."""

  mean: Floats  # h = E[g]; 0 on-policy
  signal: Floats  # C = E[(r − p) g]; on-policy μ = E[r g]
  raw_signal: Floats  # E[r g] = C + p h
  squared_signal: Floats  # τ = E[(r − p)² (g − h)]
  variance: float  # σ² = Var r
  energy: float  # E ‖g‖²
  centered_energy: float  # E[(r − p)² ‖g‖²]
  raw_energy: float  # E[r² ‖g‖²]


def moments(outcomes: Outcomes) -> Moments:
  probs, g, r = outcomes
  a, squares = r - probs @ r, np.sum(g**2, axis=1)
  h = probs @ g
  return Moments(
    mean=h,
    signal=(probs * a) @ g,
    raw_signal=(probs * r) @ g,
    squared_signal=(probs * a**2) @ (g - h),
    variance=float(probs @ a**2),
    energy=float(probs @ squares),
    centered_energy=float(probs @ (a**2 * squares)),
    raw_energy=float(probs @ (r**2 * squares)),
  )


def expected_energies(prompts: Sequence[Moments], G: int, *, centered: bool = True) -> Energies:
  """E ‖Σ A g‖² and E Σ A²‖g‖² for G independent rollouts of each prompt, A = r − r̄ or A = r.

  Holds for any feature and any sampler; on-policy `mean` is 0 and two of the terms vanish.
  """
  if centered:
    separate = sum(
      (G - 1) / G * ((G - 1) * m.centered_energy + m.variance * m.energy) for m in prompts
    )
    pairs = sum(
      (G - 1) * ((G - 1) ** 2 + 1) / G * _square(m.signal)
      - (G - 1) * m.variance * _square(m.mean)
      - 2 * (G - 1) ** 2 / G * float(m.mean @ m.squared_signal)
      for m in prompts
    )
    sums = [(G - 1) * m.signal for m in prompts]
  else:
    separate = sum(G * m.raw_energy for m in prompts)
    pairs = sum(G * (G - 1) * _square(m.raw_signal) for m in prompts)
    sums = [G * m.raw_signal for m in prompts]
  between = _square(np.sum(sums, axis=0)) - sum(_square(x) for x in sums)
  return Energies(separate + pairs + between, separate)


def drawn_energies(population: Sequence[Moments], P: int, G: int) -> Energies:
  """The same, centered, for P prompts that are drawn independently from a population."""
  single = [expected_energies([m], G) for m in population]
  within, separate = np.mean(single, axis=0)
  mean = (G - 1) * np.mean([m.signal for m in population], axis=0)
  return Energies(P * within + P * (P - 1) * _square(mean), P * separate)


def below_one(outcomes: Outcomes, successes: int, G: int) -> float:
  """‖ν₁ − ν₀‖² − ‖ν₁‖²/k − ‖ν₀‖²/(G − k) for k successes of G; n_eff is below 1 where it is < 0.

  ν₁ and ν₀ are the mean features of successes and failures. Holds given k, in the ratio of the two
  expectations, for every A = w(k)(r − r̄), such as GRPO's.
  """
  probs, g, r = outcomes
  right, wrong = (np.average(g[r == x], axis=0, weights=probs[r == x]) for x in (1, 0))
  distance = _square(right - wrong)
  return distance - _square(right) / successes - _square(wrong) / (G - successes)


def expected_participation_ratio(prompts: Sequence[Outcomes], G: int) -> float:
  """E[(tr K)²]/E‖K‖_F², which does not depend on rewards or coefficients."""
  squares = [np.sum(x.features**2, axis=1) for x in prompts]
  energies = np.array([x.probs @ s for x, s in zip(prompts, squares, strict=True)])
  fourth = np.array([x.probs @ s**2 for x, s in zip(prompts, squares, strict=True)])
  second = np.stack([second_moment(x).ravel() for x in prompts])
  inner = second @ second.T
  norms = G * fourth.sum() + G**2 * inner.sum() - G * np.trace(inner)
  return float((G**2 * energies.sum() ** 2 + G * np.sum(fourth - energies**2)) / norms)


def limit_participation_ratio(prompts: Sequence[Outcomes]) -> float:
  """(tr M)²/tr M² of the prompts' mean M: what PR tends to as G grows."""
  second = np.mean([second_moment(x) for x in prompts], axis=0)
  return float(np.trace(second) ** 2 / np.sum(second**2))


def second_moment(outcomes: Outcomes) -> Floats:
  """M = E[g gᵀ], f64[F, F]; the Fisher matrix if the policy itself samples."""
  return outcomes.features.T @ (outcomes.probs[:, None] * outcomes.features)


def _square(x: Floats) -> float:
  return float(x @ x)


# --- by enumeration, and by sampling --------------------------------------------------------------


def coefficients(rewards: Floats, estimator: str) -> Floats:
  """A of groups, f64[..., G]."""
  if estimator == UNCENTERED:
    return rewards
  centered = rewards - rewards.mean(axis=-1, keepdims=True)
  if estimator == CENTERED:
    return centered
  deviation = rewards.std(axis=-1, keepdims=True, ddof=1)
  return np.where(deviation > 0, centered / (deviation + 1e-6), 0.0)


def group_sums(outcomes: Outcomes, chosen: npt.NDArray[Any], A: Floats) -> tuple[Floats, Floats]:
  """Σ A g, f64[n, F], and Σ A²‖g‖², f64[n], of groups of chosen outcomes, i64[n, G]."""
  features = outcomes.features[chosen]
  squares = np.sum(features**2, axis=-1)
  return np.einsum("ng,ngf->nf", A, features), np.sum(A**2 * squares, axis=-1)


def enumerate_batches(
  prompts: Sequence[Outcomes],
  G: int,
  estimator: str = CENTERED,
  counted: Callable[[Floats], npt.NDArray[np.bool_]] | None = None,
) -> Enumerated:
  """Adds up all batches of G rollouts of each of one or two prompts.

  Args:
    counted: rewards f64[n, G] of groups → which of them count; None: all.
  """
  groups = []
  for outcomes in prompts:
    chosen = np.array(list(itertools.product(range(len(outcomes.probs)), repeat=G)))
    weights = np.prod(outcomes.probs[chosen], axis=1)
    rewards = outcomes.rewards[chosen]
    if counted is not None:
      weights = weights * counted(rewards)
    groups.append((weights, *group_sums(outcomes, chosen, coefficients(rewards, estimator))))
  if len(groups) == 1:
    ((weights, sums, separate),) = groups
    together = np.sum(sums**2, axis=1)
  else:
    first, second = groups
    weights = np.outer(first[0], second[0]).ravel()
    squares = np.sum(first[1] ** 2, axis=1)[:, None] + np.sum(second[1] ** 2, axis=1)
    together = (squares + 2 * first[1] @ second[1].T).ravel()
    separate = np.add.outer(first[2], second[2]).ravel()
  return _expectations(weights / weights.sum(), together, separate)


def sample_batches(
  prompts: Sequence[Outcomes], G: int, count: int, seed: int, estimator: str = CENTERED
) -> dict[str, float]:
  """The same from `count` sampled batches, with the ratio's standard error, and the mean PR."""
  rng = np.random.default_rng(seed)
  sums, separate, features = [], [], []
  for outcomes in prompts:
    chosen = rng.choice(len(outcomes.probs), size=(count, G), p=outcomes.probs)
    found = group_sums(outcomes, chosen, coefficients(outcomes.rewards[chosen], estimator))
    sums.append(found[0])
    separate.append(found[1])
    features.append(outcomes.features[chosen])
  together, separates = np.sum(np.sum(sums, axis=0) ** 2, axis=1), np.sum(separate, axis=0)
  found_mean = _expectations(np.full(count, 1 / count), together, separates)
  n_eff, error = ratio_and_error(together, separates)
  g = np.concatenate(features, axis=1)
  gram = g @ g.transpose(0, 2, 1)
  squares = np.sum(gram**2, axis=(1, 2))
  traces = np.trace(gram, axis1=1, axis2=2)
  ratios = traces[squares > 0] ** 2 / squares[squares > 0]
  return dict(
    n_eff=n_eff,
    error=error,
    mean_n_eff=found_mean.n_eff,
    alpha=found_mean.alpha,
    participation_ratio=float(ratios.mean()),
  )


def ratio_and_error(together: npt.ArrayLike, separate: npt.ArrayLike) -> tuple[float, float]:
  """Σ together/Σ separate of independent blocks, and its standard error by the delta method."""
  numerators, denominators = (np.asarray(x, np.float64) for x in (together, separate))
  ratio = numerators.sum() / denominators.sum()
  residuals = numerators - ratio * denominators
  n = len(residuals)
  return float(ratio), float(residuals.std(ddof=1) * np.sqrt(n) / denominators.sum())


def _expectations(weights: Floats, together: Floats, separate: Floats) -> Enumerated:
  carries = separate > 1e-12 * separate.max()
  n_eff = together[carries] / separate[carries]
  shares = weights[carries] / weights[carries].sum()
  alpha = np.clip(1 - n_eff, 0, 1)
  energies = Energies(float(weights @ together), float(weights @ separate))
  return Enumerated(energies, float(shares @ n_eff), float(shares @ alpha))


# --- the conditions of the page -------------------------------------------------------------------

CONTENT = np.array([0.1, 0.9, 0.1, 0.7, 0.5, 0.3, 0.1])  # chance of success of each response
LUCK = np.full(len(RESPONSES), 0.5)  # a reward that has nothing to do with the response
ENUMERATED_G, SAMPLED_G, LARGE_G = 3, 8, 64
SAMPLES = 20_000


def conditions(success: Floats, seed: int = 0) -> dict[str, list[Outcomes]]:
  """Name → prompts of a batch; the policy, its older version and its hidden states are random."""
  rng = np.random.default_rng(seed)
  policy = random_policy(rng)
  older = policy._replace(head=policy.head + 0.5 * rng.normal(size=policy.head.shape))
  near = policy._replace(hidden=policy.hidden + 0.1 * rng.normal(size=policy.hidden.shape))
  make = lambda **how: make_outcomes(policy, success, **how)
  own = make()
  return {
    "on-policy, one prompt": [own],
    "on-policy, two prompts that agree": [own, make_outcomes(near, success)],
    "on-policy, two prompts that conflict": [own, make_outcomes(policy, 1 - success)],
    "rollouts of an older policy": [make(sampler=older)],
    "rollouts at temperature 1.5": [make(temperature=1.5)],
    "rollouts of the two likeliest tokens": [make(top=2)],
    "on-policy, g a mean over tokens": [make(mean_over_tokens=True)],
    "on-policy, cut responses filtered": [make(without_cut=True)],
    "on-policy, `sampled`": [make(feature="sampled")],
  }


def measure_condition(prompts: Sequence[Outcomes], seed: int) -> dict[str, float]:
  """All figures of one condition."""
  found = [moments(outcomes) for outcomes in prompts]
  exact = enumerate_batches(prompts, ENUMERATED_G)
  by_formula = expected_energies(found, ENUMERATED_G)
  n_eff = lambda G, centered=True: expected_energies(found, G, centered=centered).n_eff
  figures = {
    "mean_share": sum(_square(m.mean) for m in found) / sum(m.energy for m in found),
    "signal_share": sum(_square(m.signal) for m in found) / sum(m.centered_energy for m in found),
    "enumerated": exact.energies.n_eff,
    "formula_error": abs(exact.energies.n_eff - by_formula.n_eff),
    "mean_n_eff": exact.n_eff,
    "alpha": exact.alpha,
    "at_8": n_eff(SAMPLED_G),
    "at_64": n_eff(LARGE_G),
    "uncentered_at_8": n_eff(SAMPLED_G, False),
    "pr_at_8": expected_participation_ratio(prompts, SAMPLED_G),
    "pr_at_64": expected_participation_ratio(prompts, LARGE_G),
    "pr_limit": limit_participation_ratio(prompts),
  }
  sampled = sample_batches(prompts, SAMPLED_G, SAMPLES, seed)
  return figures | {f"sampled_{name}": value for name, value in sampled.items()}


# --- a search for n_eff below 1 -------------------------------------------------------------------

SEARCHED = 2000
SIZES = (2, 4, 8, 16, 64)


def search(count: int = SEARCHED, seed: int = 1) -> dict[str, dict[str, float]]:
  """Condition → least n_eff over random policies, rewards and group sizes, and the share below 1.

  Rewards are 0 or 1, by the response. n_eff is the ratio of expectations, by formula.
  """
  rng = np.random.default_rng(seed)
  found: dict[str, list[float]] = {}
  for _ in range(count):
    policy, other, older = (random_policy(rng, scale=rng.uniform(0.2, 3)) for _ in range(3))
    success = rng.permutation(len(RESPONSES)) < rng.integers(1, len(RESPONSES))
    success = success.astype(np.float64)
    other = other._replace(head=policy.head)
    lagging = policy._replace(head=policy.head + 0.2 * older.head)
    own = moments(make_outcomes(policy, success))
    second = moments(make_outcomes(other, rng.permutation(success)))
    how: dict[str, dict[str, Any]] = {
      "an older policy": dict(sampler=lagging),
      "temperature 1.5": dict(temperature=1.5),
      "mean over tokens": dict(mean_over_tokens=True),
      "cut responses filtered": dict(without_cut=True),
      "`sampled`": dict(feature="sampled"),
    }
    others = {name: moments(make_outcomes(policy, success, **kw)) for name, kw in how.items()}
    for G in SIZES:
      values = {
        "on-policy, one prompt": expected_energies([own], G),
        "on-policy, one prompt, uncentered": expected_energies([own], G, centered=False),
        "on-policy, two prompts": expected_energies([own, second], G),
        "on-policy, prompts drawn from two": drawn_energies([own, second], 8, G),
      }
      values |= {name: expected_energies([m], G) for name, m in others.items()}
      for name, energies in values.items():
        found.setdefault(name, []).append(energies.n_eff)
  return {
    name: {"least": float(np.min(x)), "below_1": float(np.mean(np.asarray(x) < 1 - 1e-9))}
    for name, x in found.items()
  }


# --- tables ---------------------------------------------------------------------------------------


def measure() -> dict[str, dict[str, dict[str, float]]]:
  """Reward → condition → figures."""
  return {
    name: {
      condition: measure_condition(prompts, seed=0)
      for condition, prompts in conditions(success).items()
    }
    for name, success in (("content", CONTENT), ("luck", LUCK))
  }


def tables(
  tiny: Mapping[str, Mapping[str, Mapping[str, float]]],
  found: Mapping[str, Mapping[str, float]],
) -> str:
  """Tables of the figures of `measure` and `search`, as Markdown."""
  headings = ["‖h‖²/E‖g‖²", "G = 3", "G = 64", "A = r", "luck", "luck, α", "PR"]
  rows = {
    name: [
      f"{x['mean_share']:.3f}",
      *(f"{x[key]:.2f}" for key in ("enumerated", "at_64", "uncentered_at_8")),
      f"{luck['at_8']:.3f}",
      f"{luck['alpha']:.2f}",
      f"{x['pr_at_8']:.2f}",
    ]
    for (name, x), luck in zip(tiny["content"].items(), tiny["luck"].values(), strict=True)
  }
  error = max(x["formula_error"] for figures in tiny.values() for x in figures.values())
  least = {name: [f"{x['least']:.3f}", f"{x['below_1']:.1%}"] for name, x in found.items()}
  sizes = ", ".join(map(str, SIZES))
  return "\n\n".join(
    [
      "Tiny policies: n_eff as the ratio of expectations, for a reward by content and one by luck."
      f" G = 3 and α: all batches enumerated, {error:.0e} from the formula at most. G = 8 where"
      " nothing else stands.",
      markdown_table(headings, rows, "condition"),
      f"{SEARCHED} random tiny policies with random rewards of 0 and 1, G = {sizes}: the least"
      " n_eff by formula, and how many are below 1.",
      markdown_table(["least n_eff", "below 1"], least, "condition"),
    ]
  )
