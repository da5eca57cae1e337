"""Means over seeds and differences paired by seed: intervals, tests, and numbers of seeds needed.

Runs with the same seed share the initial parameters, the order of the problems and the warm start.
So the difference between two methods varies less over seeds than either method does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from rlvr_jax.evaluate.pass_at_k import bootstrap_interval
from rlvr_jax.ops.checks import check_between

BySeed = Mapping[int, float]  # seed → value

_MOST_SEEDS = 10**6
_ROUNDING = 1e-12  # relative difference of values that are equal but for rounding


def mean_and_half_width(values: npt.ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
  """Mean over seeds, and the half-width of its interval by Student's t.

  Args:
    values: f[seeds].
    confidence: coverage, in (0, 1).
  Raises:
    ValueError: there are fewer than two seeds.
  """
  data = _check_seeds(values)
  half_width = special.stdtrit(data.size - 1, (1 + confidence) / 2) * _error_of_mean(data)
  return float(data.mean()), float(half_width)


class Difference(NamedTuple):
  """The mean over seeds of a difference, with its 95 % intervals."""

  num_seeds: int
  mean: float
  low: float  # end of the interval by Student's t
  high: float
  bootstrap_low: float  # percentile bootstrap over seeds; too narrow below about eight seeds
  bootstrap_high: float
  deviation: float  # standard deviation of the difference over seeds
  p: float  # p-value of the two-sided paired t-test


def paired_difference(values: BySeed, baseline: BySeed) -> Difference:
  """The difference `values` − `baseline`, over the seeds in both arguments.

  Raises:
    ValueError: the two arguments share fewer than two seeds.
  """
  seeds = sorted(values.keys() & baseline.keys())
  if len(seeds) < 2:
    raise ValueError(
      f"paired_difference: the seeds {sorted(values)} and the baseline's seeds {sorted(baseline)}"
      f" share {len(seeds)}, but at least 2 are needed; run both methods with the same seeds"
    )
  data = np.array([values[seed] - baseline[seed] for seed in seeds], np.float64)
  largest = max(abs(side[seed]) for side in (values, baseline) for seed in seeds)
  if np.ptp(data) <= _ROUNDING * largest:  # equal but for rounding
    data[:] = data.mean()
  mean, half_width = mean_and_half_width(data)
  bootstrap_low, bootstrap_high = bootstrap_interval(data, seed=0)
  return Difference(
    num_seeds=len(seeds),
    mean=mean,
    low=mean - half_width,
    high=mean + half_width,
    bootstrap_low=bootstrap_low,
    bootstrap_high=bootstrap_high,
    deviation=float(_error_of_mean(data) * np.sqrt(data.size)),
    p=_p_value(data),
  )


def _p_value(data: npt.NDArray[np.float64]) -> float:
  """The p-value of the two-sided t-test that the mean is 0."""
  mean, error = abs(data.mean()), _error_of_mean(data)
  if error == 0:
    return 1.0 if mean == 0 else 0.0
  return float(2 * special.stdtr(data.size - 1, -mean / error))


def holm(p_values: npt.ArrayLike) -> npt.NDArray[np.float64]:
  """p-values adjusted for multiple comparisons by Holm's step-down procedure.

  The k-th smallest of m p-values is multiplied by m − k + 1, and is at least the previous adjusted
  p-value. Rejecting where the result is ≤ α keeps the probability of any false rejection at or
  below α.

  Args:
    p_values: f[comparisons], in [0, 1].
  Returns:
    f64[comparisons], in [0, 1], in the given order.
  Source: "A simple sequentially rejective multiple test procedure", Holm 1979.
  """
  p = np.asarray(p_values, np.float64)
  order = np.argsort(p, kind="stable")
  stepped = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1))
  adjusted = np.empty_like(p)
  adjusted[order] = np.minimum(stepped, 1.0)
  return adjusted


def seeds_needed(deviation: float, difference: float = 0.02, power: float = 0.8) -> int:
  """Number of seeds with which a paired t-test at the 5 % level detects a difference.

  Args:
    deviation: standard deviation of the paired difference over seeds, in the metric's unit.
    difference: the true difference, > 0.
    power: probability of detecting the difference, in (0.05, 0.999].
  Returns:
    The smallest sufficient number of seeds, between 2 and a million.
  """
  check_between("seeds_needed", "difference", difference, low=0.0, open_low=True)
  check_between("seeds_needed", "power", power, low=0.05, high=0.999, open_low=True)
  if deviation == 0:
    return 2
  # `low` is too few seeds. After the first loop, `high` is enough seeds, or at least `_MOST_SEEDS`.
  low, high = 1, 2
  while high < _MOST_SEEDS and _power(high, difference / deviation) < power:
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    enough = _power(middle, difference / deviation) >= power
    low, high = (low, middle) if enough else (middle, high)
  return min(high, _MOST_SEEDS)


def _power(n: int, effect: float) -> float:
  """Power of the two-sided t-test at the 5 % level on n values; `effect` is mean / deviation."""
  limit = special.stdtrit(n - 1, 0.975)
  shift = effect * np.sqrt(n)
  above = 1.0 - special.nctdtr(n - 1, shift, limit)
  below = special.nctdtr(n - 1, shift, -limit)
  return float(above + np.nan_to_num(below))  # NaN if it is too small for a float


def standard_error_over_seeds(values: npt.ArrayLike) -> float:
  """Standard deviation over seeds divided by √seeds; `values`: f[seeds], two seeds or more."""
  return _error_of_mean(_check_seeds(values))


def standard_error_of_interval(low: float, high: float) -> float:
  """Standard error that corresponds to a 95 % interval, such as pass@k's bootstrap interval."""
  return (high - low) / (2 * float(special.ndtri(0.975)))


def _error_of_mean(data: npt.NDArray[np.float64]) -> float:
  """Standard error of the mean; exactly 0 if all values are equal, in spite of rounding."""
  return float(data.std(ddof=1) / np.sqrt(data.size)) if np.ptp(data) else 0.0


def _check_seeds(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
  """Returns the values as f64[seeds]; raises ValueError if there are fewer than two."""
  data = np.asarray(values, np.float64)
  if data.ndim != 1 or data.size < 2:
    raise ValueError(
      f"one value for each of two or more seeds is needed, got an array of shape {data.shape}"
    )
  return data
