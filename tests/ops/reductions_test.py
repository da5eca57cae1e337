import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.ops import reductions
from rlvr_jax.types import EffectiveSampleSize, Max, Mean, Min, Sum


def record(x, w):
  """The records of values x with weights w."""
  return {
    "mean": Mean(total=jnp.sum(x * w), weight=jnp.sum(w)),
    "max": Max(value=jnp.max(x)),
    "min": Min(value=jnp.min(x)),
    "sum": Sum(value=jnp.sum(x)),
    "ess": EffectiveSampleSize(
      total=jnp.sum(w), total_squares=jnp.sum(w**2), count=jnp.float64(w.size)
    ),
  }


@pytest.fixture
def data(x64):
  rng = np.random.default_rng(0)
  return rng.normal(size=(5, 7)), rng.uniform(0.1, 2.0, size=(5, 7))


def expected(x, w):
  return {
    "mean": np.sum(x * w) / np.sum(w),
    "max": x.max(),
    "min": x.min(),
    "sum": x.sum(),
    "ess": w.sum() ** 2 / (w.size * (w**2).sum()),
  }


def assert_equal(metrics, x, w):
  found = reductions.values(metrics)
  for name, value in expected(x, w).items():
    np.testing.assert_allclose(found[name], value, rtol=1e-13, err_msg=name)


def test_merging_parts_of_unequal_size_equals_the_whole(data):
  x, w = (a.ravel() for a in data)
  parts = [record(x[i:j], w[i:j]) for i, j in ((0, 3), (3, 4), (4, 35))]
  merged = reductions.merge_metrics(reductions.merge_metrics(parts[2], parts[0]), parts[1])
  assert_equal(merged, x, w)


def test_records_of_a_loop_that_begins_empty_equal_the_whole(data):
  x, w = data

  @jax.jit
  def run(x, w):
    start = reductions.empty(jax.eval_shape(lambda: record(x[0], w[0])))
    add = lambda i, metrics: reductions.merge_metrics(metrics, record(x[i], w[i]))
    return jax.lax.fori_loop(0, len(x), add, start)

  assert_equal(run(x, w), x, w)


def test_what_is_over_nothing_has_no_value():
  zero = jnp.zeros(())
  of_nothing = dict(
    mean=Mean(total=zero, weight=zero),
    ess=EffectiveSampleSize(total=zero, total_squares=zero, count=zero),
    max=Max(value=-jnp.inf),
    min=Min(value=jnp.inf),
  )
  assert all(jnp.isnan(x) for x in reductions.values(of_nothing).values())
  assert reductions.value(Max(value=jnp.inf)) == jnp.inf
  assert reductions.value(Sum(value=zero)) == 0
  assert reductions.value(EffectiveSampleSize(total=zero, total_squares=zero, count=zero + 3)) == 1


def test_non_finite_values_are_not_hidden():
  nan = Mean(total=jnp.float32(jnp.nan), weight=jnp.float32(2))
  assert jnp.isnan(reductions.value(nan))
  assert jnp.isnan(reductions.value(reductions.merge(Max(value=jnp.nan), Max(value=1.0))))


def test_a_name_in_one_dict_only_is_kept():
  a, b = {"x": Sum(value=1.0)}, {"x": Sum(value=2.0), "y": Max(value=3.0)}
  merged = reductions.merge_metrics(a, b)
  assert merged == {"x": Sum(value=3.0), "y": Max(value=3.0)} == reductions.merge_metrics(b, a)


def test_unequal_kinds_and_foreign_records_are_refused():
  with pytest.raises(TypeError, match="cannot merge Sum with Max"):
    reductions.merge(Sum(value=1.0), Max(value=1.0))
  with pytest.raises(TypeError, match="float is not a metric"):
    reductions.merge(1.0, 2.0)
  with pytest.raises(TypeError, match="float is not a metric"):
    reductions.value(1.0)
