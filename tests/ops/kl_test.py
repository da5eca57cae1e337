"""KL estimators against exact KL, and against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.ops import kl

P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.2, 0.2, 0.6])
ONES = jnp.ones(3)


def _expectation(estimator, **kwargs):
  """E_p of the estimator, exactly, by summing over the three outcomes."""
  return float(np.sum(P * estimator(jnp.log(P), jnp.log(Q), ONES, **kwargs)))


def test_k1_and_k3_are_unbiased_for_kl_of_the_first_from_the_second():
  exact = np.sum(P * np.log(P / Q))
  assert _expectation(kl.k1) == pytest.approx(exact, rel=1e-5)
  assert _expectation(kl.k3) == pytest.approx(exact, rel=1e-5)


def test_k2_is_half_the_squared_log_ratio():
  assert _expectation(kl.k2) == pytest.approx(np.sum(P * np.log(P / Q) ** 2) / 2, rel=1e-5)


def test_k3_bounds_the_exponent_only():
  result = kl.k3(jnp.array([0.0, -1.0]), jnp.array([20.0, -2.0]), ONES[:2], log_ratio_bound=10.0)
  np.testing.assert_allclose(result, [np.exp(10) - 1 - 20, np.exp(-1)], rtol=1e-5)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k2, kl.k3])
@pytest.mark.parametrize("fill", [np.nan, -np.inf])
def test_what_is_masked_changes_neither_value_nor_gradient(estimator, fill):
  mask = jnp.array([1.0, 0, 1])
  spoil = lambda x: jnp.where(mask > 0, jnp.log(x), fill)
  total = lambda p, q: jnp.sum(estimator(p, q, mask))
  spoilt = jax.value_and_grad(total, argnums=(0, 1))(spoil(P), spoil(Q))
  clean = jax.value_and_grad(total, argnums=(0, 1))(jnp.log(P), jnp.log(Q))
  jax.tree.map(np.testing.assert_array_equal, spoilt, clean)
