"""Reduction of metric records over micro-batches, devices and steps.

A metric carries its reduction (see `types.py`). So records are merged first, and values such as
means are computed once, at the end. Every function is pure and works under jit.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlvr_jax.types import (
  Array,
  EffectiveSampleSize,
  ExpertChoices,
  Max,
  Mean,
  Metric,
  Metrics,
  Min,
  Sum,
)

_EMPTY = {Max: -jnp.inf, Min: jnp.inf}  # the extremes of nothing


def _field_reduction(kind: type) -> Callable[[Array, Array], Array]:
  """The function that merges a field of two metrics of this kind."""
  if kind is Max:
    return jnp.maximum
  if kind is Min:
    return jnp.minimum
  if kind in (Mean, Sum, EffectiveSampleSize, ExpertChoices):
    return operator.add
  allowed = "Mean, Max, Min, Sum, EffectiveSampleSize, ExpertChoices"
  raise TypeError(f"{kind.__name__} is not a metric; use one of {allowed} from rlvr_jax.types.")


def merge(a: Metric, b: Metric) -> Metric:
  """Merges the records of two disjoint parts of the data.

  Sums are added; of two Max the larger is kept, of two Min the smaller.

  Raises:
    TypeError: `a` and `b` are of different kinds, or not metrics.
  """
  if type(a) is not type(b):
    raise TypeError(
      f"cannot merge {type(a).__name__} with {type(b).__name__}: the records of a metric must be"
      " of one kind; give a metric of another kind another name."
    )
  return jax.tree.map(_field_reduction(type(a)), a, b)


def value(metric: Metric) -> Array:
  """The value of a record; NaN for a mean, a sample size or an extreme without data.

  Mean: total / weight.
  EffectiveSampleSize: (Σw)² / (n·Σw²), in [1/n, 1]; 1 if all weights are 0.
  ExpertChoices: the statistic that it names.
  """
  match metric:
    case Mean(total=total, weight=weight):
      return jnp.where(weight == 0, jnp.nan, total / jnp.where(weight == 0, 1.0, weight))
    case EffectiveSampleSize(total=total, total_squares=squares, count=count):
      empty = (count == 0) | (squares == 0)
      # Divide before multiplying: Σw² itself may be near the end of float32's range.
      ratio = (total / jnp.where(empty, 1.0, squares)) * (total / jnp.where(empty, 1.0, count))
      return jnp.where(count == 0, jnp.nan, jnp.where(empty, 1.0, ratio))
    case ExpertChoices(choices=choices, statistic=statistic):
      E = choices.shape[-1]
      total = jnp.sum(choices, axis=-1, keepdims=True)
      shares = choices / jnp.where(total == 0, 1, total)
      logs = jnp.log(jnp.where(shares > 0, shares, 1))
      by_layer = {
        "entropy": -jnp.sum(shares * logs, axis=-1) / math.log(max(E, 2)),
        "largest": E * jnp.max(shares, axis=-1),
        "unused": jnp.mean(choices == 0, axis=-1),
      }
      return jnp.mean(by_layer[statistic])
    case Max(value=result) | Min(value=result):
      return jnp.where(result == _EMPTY[type(metric)], jnp.nan, result)
    case Sum(value=result):
      return result
  raise TypeError(f"{type(metric).__name__} is not a metric of rlvr_jax.types.")


def merge_metrics(a: Metrics, b: Metrics) -> Metrics:
  """Merges records by name; a record whose name is in only one argument is kept unchanged."""
  return a | {name: merge(a[name], metric) if name in a else metric for name, metric in b.items()}


def empty(metrics: Metrics) -> Metrics:
  """Records without data; merging with them changes nothing.

  They have the shapes and dtypes of the given arrays, or of the given `jax.ShapeDtypeStruct`s.
  """

  def make_empty(metric: Metric) -> Metric:
    _field_reduction(type(metric))  # raises TypeError unless it is a metric
    return jax.tree.map(lambda x: jnp.full(x.shape, _EMPTY.get(type(metric), 0), x.dtype), metric)

  return {name: make_empty(metric) for name, metric in metrics.items()}


def without_tokens(metrics: Metrics) -> Metrics:
  """The records without the per-token marks of `types.Mean`."""
  return {
    name: dataclasses.replace(metric, tokens=None) if isinstance(metric, Mean) else metric
    for name, metric in metrics.items()
  }


def values(metrics: Metrics) -> dict[str, Array]:
  """The value of every record."""
  return {name: value(metric) for name, metric in metrics.items()}
