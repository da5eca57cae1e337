"""pass@k, mean@n, majority@n and intervals over problems: NumPy, float64."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]
_LEAST_VOTES = 3  # samples of a problem


def pass_at_k(num_samples: npt.ArrayLike, num_correct: npt.ArrayLike, k: int) -> Floats:
  """Unbiased pass@k = 1 − C(n−c, k) / C(n, k): probability that k samples include a correct one.

  The ratio of binomials is the product over i = 0..k−1 of (n−c−i)/(n−i): no factorial, no
  cancellation. It is exact up to rounding for n in the thousands.

  Args:
    num_samples: i[...], n ≥ 1, samples per problem.
    num_correct: i[...], 0 ≤ c ≤ n, number of correct samples; broadcast against `num_samples`.
    k: 1 ≤ k ≤ n.
  Returns:
    f64[...], in [0, 1].
  Raises:
    ValueError: k is outside [1, n] or c outside [0, n].
  Source: "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), eq. 1.
  """
  n, c = np.broadcast_arrays(np.asarray(num_samples), np.asarray(num_correct))
  if n.size and not 1 <= k <= n.min():
    raise ValueError(
      f"pass@k with k = {k} and n = {n.min()} samples: k must be between 1 and n; "
      "draw more samples per problem or choose a smaller k"
    )
  if np.any((c < 0) | (c > n)):
    raise ValueError("num_correct must lie between 0 and num_samples.")
  i = np.arange(k, dtype=np.float64)
  n, c = n[..., None].astype(np.float64), c[..., None].astype(np.float64)
  # With fewer than k wrong samples, one of the integers n−c−i is 0, and so is the product.
  all_wrong = np.prod((n - c - i) / (n - i), axis=-1)
  return 1.0 - all_wrong


def mean_at_n(correct: npt.ArrayLike) -> Floats:
  """Mean correctness of the n samples of each problem: [problems, n] → f64[problems]."""
  return np.asarray(correct, np.float64).mean(axis=-1)


def majority_at_n(answers: Sequence[Sequence[Hashable]], correct: npt.ArrayLike) -> Floats:
  """Correctness of the most frequent answer of each problem.

  Ties are broken at random; the result is the expected value over the tied answers. A sample
  without an answer (`None`) does not vote; a problem without votes counts as wrong.

  Args:
    answers: `[problems][n]`, hashable answers in a normal form (equal answers compare equal).
    correct: bool[problems, n].
  Returns:
    f64[problems], in [0, 1].
  Raises:
    ValueError: the shapes differ, or equal answers were graded differently.
  """
  correct = np.asarray(correct, bool)
  if correct.shape[:1] != (len(answers),) or any(len(row) != correct.shape[1] for row in answers):
    raise ValueError(f"answers must have the shape of correct, {correct.shape}.")
  return np.array([_majority(row, graded) for row, graded in zip(answers, correct, strict=True)])


def _majority(answers: Sequence[Hashable], correct: npt.NDArray[np.bool_]) -> float:
  """The expected correctness of the most frequent answer of one problem, see `majority_at_n`."""
  votes: dict[Hashable, int] = {}
  grades: dict[Hashable, bool] = {}
  for answer, is_correct in zip(answers, correct, strict=True):
    if answer is None:
      continue
    votes[answer] = votes.get(answer, 0) + 1
    if grades.setdefault(answer, bool(is_correct)) != bool(is_correct):
      raise ValueError(f"the answer {answer!r} is graded both correct and wrong for one problem.")
  most = max(votes.values(), default=0)
  tied = [grades[answer] for answer, count in votes.items() if count == most]
  return float(np.mean(tied)) if tied else 0.0


def bootstrap_interval(
  values_per_problem: npt.ArrayLike,
  *,
  confidence: float = 0.95,
  num_resamples: int = 2000,
  seed: int,
) -> tuple[float, float]:
  """Percentile bootstrap interval of the mean over problems.

  Problems are resampled, not samples: the samples of one problem are not independent samples of
  the benchmark.

  Args:
    values_per_problem: f[problems].
    confidence: coverage, in (0, 1).
    num_resamples: number of bootstrap means.
    seed: seed of the resampling; the same seed gives the same interval.
  Returns:
    (low, high).
  Source: "An Introduction to the Bootstrap" (Efron and Tibshirani 1993), ch. 13.
  """
  data = np.asarray(values_per_problem, np.float64)
  if data.ndim != 1 or not data.size:
    raise ValueError(f"values_per_problem must be one number per problem, got shape {data.shape}.")
  if not 0 < confidence < 1:
    raise ValueError(f"confidence must lie in (0, 1), got {confidence}.")
  rng = np.random.default_rng(seed)
  # One resample at a time, so that memory holds only one row.
  means = np.array(
    [data[rng.integers(data.size, size=data.size)].mean() for _ in range(num_resamples)]
  )
  tail = 100 * (1 - confidence) / 2
  low, high = np.percentile(means, [tail, 100 - tail])
  return float(low), float(high)


def wilson_interval(
  share: float, num_problems: int, *, confidence: float = 0.95
) -> tuple[float, float]:
  """Wilson's interval of a share: (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n).

  It has a positive width even for shares of 0 and 1: for 0 of n it is [0, z²/(n + z²)], where
  z = 1.96 at 95 %.

  Args:
    share: p, in [0, 1].
    num_problems: n ≥ 1.
    confidence: coverage, in (0, 1).
  Returns:
    (low, high), within [0, 1].
  Source: "Probable Inference, the Law of Succession, and Statistical Inference" (Wilson 1927).
  """
  if not 0 <= share <= 1 or num_problems < 1 or not 0 < confidence < 1:
    raise ValueError(
      f"wilson_interval: share = {share}, num_problems = {num_problems}, confidence = {confidence};"
      " allowed are a share in [0, 1], num_problems ≥ 1, and a confidence in (0, 1)"
    )
  z, n = float(special.ndtri((1 + confidence) / 2)), num_problems
  center = (share + z**2 / (2 * n)) / (1 + z**2 / n)
  half_width = z / (1 + z**2 / n) * float(np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)))
  low = 0.0 if share == 0 else max(0.0, center - half_width)
  high = 1.0 if share == 1 else min(1.0, center + half_width)
  return low, high


def interval_over_problems(scores: npt.ArrayLike, *, seed: int) -> tuple[float, float]:
  """The 95 % interval of a mean of scores in [0, 1].

  The interval comes from the bootstrap over problems, which accounts for the spread of the scores.
  If all problems have the same score, such as 0 of n or n of n, the interval is Wilson's. All
  resamples would then be equal, and the bootstrap would report no uncertainty.

  Args:
    scores: f[problems], in [0, 1].
    seed: seed of the bootstrap.
  Returns:
    (low, high).
  """
  scores = np.asarray(scores, np.float64)
  if scores.size and np.all(scores == scores.flat[0]):
    return wilson_interval(float(scores.flat[0]), scores.size)
  return bootstrap_interval(scores, seed=seed)


def summarize(
  correct: npt.ArrayLike,
  *,
  ks: Sequence[int],
  seed: int,
  answers: Sequence[Sequence[Hashable]] | None = None,
) -> dict[str, float]:
  """pass@k for each k, mean@n and, given answers, majority@n, each with its 95 % interval.

  Args:
    correct: bool[problems, n].
    ks: the values of k of pass@k, each ≤ n.
    seed: seed of the bootstrap.
    answers: `[problems][n]`, see `majority_at_n`. majority@n is omitted if `answers` is None or
      n < 3.
  Returns:
    {"pass@1": …, "pass@1_low": …, "pass@1_high": …, …, "mean": …, "majority": …}; `mean` and
    `majority` also have `_low` and `_high`.
  """
  correct = np.asarray(correct, bool)
  if correct.ndim != 2 or not correct.size:
    raise ValueError(f"correct must be a non-empty array [problems, n], got shape {correct.shape}.")
  count, n = correct.sum(axis=1), correct.shape[1]
  per_problem = {f"pass@{k}": pass_at_k(n, count, k) for k in ks}
  per_problem["mean"] = mean_at_n(correct)
  if answers is not None and n >= _LEAST_VOTES:
    per_problem["majority"] = majority_at_n(answers, correct)
  summary: dict[str, float] = {}
  for name, scores in per_problem.items():
    summary[name] = float(scores.mean())
    summary[f"{name}_low"], summary[f"{name}_high"] = interval_over_problems(scores, seed=seed)
  return summary
