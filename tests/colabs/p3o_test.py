"""What the notebook on P3O plots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.colab import p3o
from rlvr_jax.colab import toy as toys

DRIFT = 0.8


@pytest.fixture(scope="module")
def case():
  toy = toys.make_toy(prompts=2, length=3, vocabulary=5, width=6)
  kernels = jax.random.normal(jax.random.key(0), (2, 6, 5))
  return p3o.Case(toy, kernels[0], kernels[1])


def token_ratios(case):
  """ρ of every token, by NumPy."""
  batch = p3o.rollouts(case, case.kernel)
  return np.exp(
    np.asarray(p3o.drifted_logprobs(case, DRIFT, batch) - batch.behavior_logprobs, np.float64)
  )


def test_effective_sample_size_over_the_drift(case):
  found = p3o.ess(case, jnp.array([0.0, DRIFT]))
  rho = token_ratios(case)
  np.testing.assert_allclose(found.batch, [1, rho.sum() ** 2 / rho.size / (rho**2).sum()], 1e-5)
  of_responses = rho.sum(-1) ** 2 / rho.shape[-1] / (rho**2).sum(-1)
  np.testing.assert_allclose(found.sequence, [1, of_responses.mean()], rtol=1e-5)


def test_forces_are_those_of_the_formulas(case):
  rho = token_ratios(case).ravel()
  e = rho.sum() ** 2 / rho.size / (rho**2).sum()
  capped = p3o.forces(case, DRIFT, p3o.LOSSES[p3o.CAP])
  A = np.asarray(capped.coefficients)
  assert set(A) == {-1.0, 1.0}
  np.testing.assert_allclose(capped.ratios, rho, rtol=1e-4)
  np.testing.assert_allclose(capped.forces, np.minimum(rho, e) * A, rtol=1e-4)
  full = p3o.forces(case, DRIFT, p3o.LOSSES[p3o.P3O])
  pull = (1 - e) * (1 / rho - 1)
  np.testing.assert_allclose(full.forces, np.minimum(rho, e) * A + pull, rtol=1e-3, atol=1e-5)
  clipped = p3o.forces(case, DRIFT, p3o.LOSSES[p3o.CLIP])
  inside = np.where(A > 0, rho <= 1.2, rho >= 0.8)
  np.testing.assert_allclose(clipped.forces, inside * rho * A, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_at_no_drift_losses_have_the_direction_of_reinforce(case):
  found = [
    p3o.directions(case, p3o.LOSSES[name], np.zeros(1), seeds=1) for name in (p3o.P3O, p3o.CLIP)
  ]
  np.testing.assert_allclose(found[0].cosine, found[1].cosine, rtol=1e-4)
  np.testing.assert_allclose(found[0].length, found[1].length, rtol=1e-4)
  assert found[0].cosine.shape == (1, 1) and 0 < float(found[0].cosine[0, 0]) <= 1
