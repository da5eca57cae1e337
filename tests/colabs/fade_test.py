"""What the notebook on FADE plots."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from rlvr_jax import advantages
from rlvr_jax.colab import fade


@pytest.mark.parametrize(
  ("estimator", "success", "failure"),
  [
    (advantages.grpo_mean(), lambda p, q: p * q, lambda p, q: p * q),
    (
      advantages.power_asym(alpha=3.0, delta=0.5),
      lambda p, q: p * q**3,
      lambda p, q: 2 * p * q**3,
    ),
    (advantages.asym(delta=4.0), lambda p, q: p * q, lambda p, q: p * q / 4),
  ],
)
def test_masses_are_those_of_the_formulas(estimator, success, failure):
  found = fade.masses(estimator, group_size=8)
  p = np.arange(9) / 8
  np.testing.assert_allclose(found.solve_rate, p)
  np.testing.assert_allclose(found.success, success(p, 1 - p), atol=1e-6)
  np.testing.assert_allclose(found.failure, failure(p, 1 - p), atol=1e-6)


def test_the_controller_shows_its_exponents_and_their_masses():
  fade.draw_controller(solve_rate=0.4, entropy=0.8, target_entropy=1.2)
  alphas, deltas, masses = plt.gcf().axes
  assert masses.get_title() == r"$\alpha$ = 2.25, $\delta$ = 0.60"
  curve, point = alphas.get_lines()
  assert point.get_ydata() == [2.25] and float(curve.get_ydata()[-1]) == 1.0
  assert float(np.min(deltas.get_lines()[0].get_ydata())) == pytest.approx(0.3)
  success, failure = masses.get_lines()
  np.testing.assert_allclose(failure.get_ydata()[1:-1], success.get_ydata()[1:-1] / 0.6, rtol=1e-5)
  plt.close("all")
