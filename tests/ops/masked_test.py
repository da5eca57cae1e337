"""Reductions under a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.ops import masked

MASK = jnp.array([[1.0, 0, 1], [0, 0, 0]])
VALUES = jnp.array([[2.0, 5.0, 4.0], [1.0, 1.0, 1.0]])


@pytest.mark.parametrize("fill", [jnp.nan, jnp.inf])
@pytest.mark.parametrize(
  "reduce, expected",
  [
    (lambda x: masked.masked_sum(x, MASK, -1), [6.0, 0.0]),
    (lambda x: masked.masked_mean(x, MASK, -1), [3.0, 0.0]),
    (lambda x: masked.masked_max(x, MASK, -1, initial=-1.0), [4.0, -1.0]),
    (lambda x: masked.masked_min(x, MASK, -1, initial=9.0), [2.0, 9.0]),
  ],
)
def test_value_and_gradient_ignore_what_is_masked(reduce, expected, fill):
  def total(x):
    return jnp.sum(jnp.exp(reduce(x))), reduce(x)

  spoilt = jnp.where(MASK > 0, VALUES, fill)
  gradient, values = jax.grad(total, has_aux=True)(spoilt)
  clean_gradient, _ = jax.grad(total, has_aux=True)(VALUES)
  np.testing.assert_array_equal(values, expected)
  np.testing.assert_array_equal(gradient, clean_gradient)
  assert np.all(np.asarray(gradient)[np.asarray(MASK) == 0] == 0)


def test_precision_is_raised_to_float32_and_no_further():
  assert masked.upcast(jnp.bfloat16(1)).dtype == jnp.float32
  assert masked.masked_count(jnp.ones((300, 10), jnp.bfloat16)) == 3000
  with jax.enable_x64(True):
    assert masked.upcast(jnp.float64(1)).dtype == jnp.float64


def test_mean_metric_adds_up_over_parts():
  whole = masked.mean_metric(VALUES, MASK)
  parts = [masked.mean_metric(VALUES[i : i + 1], MASK[i : i + 1]) for i in range(2)]
  assert sum(p.total for p in parts) == whole.total == 6
  assert sum(p.weight for p in parts) == whole.weight == 2
