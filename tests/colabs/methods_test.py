"""Coefficients and token weights against their formulas; what the pictures show of a comparison."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from rlvr_jax import advantages, losses, parts
from rlvr_jax.colab import methods
from rlvr_jax.train import same_rollouts


def test_coefficients_are_those_of_the_formula():
  found = methods.coefficients(advantages.rloo(), 4)
  c = np.arange(5)
  expected = 4 / 3 * (1 - c / 4), -4 / 3 * c / 4
  np.testing.assert_allclose(found.success[1:], expected[0][1:], atol=1e-6)
  np.testing.assert_allclose(found.failure[:-1], expected[1][:-1], atol=1e-6)
  assert np.isnan(found.success[0]) and np.isnan(found.failure[-1])


RATIOS = np.array([0.5, 0.9, 1.0, 1.1, 2.0], np.float32)


@pytest.mark.parametrize(
  ("loss", "sign", "expected"),
  [
    (losses.reinforce(), 1, [1, 1, 1, 1, 1]),
    (losses.ppo_clip(), 1, [0.5, 0.9, 1, 1.1, 0]),
    (losses.ppo_clip(), -1, [0, -0.9, -1, -1.1, -2]),
    (losses.cispo(epsilon_low=1.0), 1, [0.5, 0.9, 1, 1.1, 1.2]),
    (losses.topr(), -1, [-0.5, -0.9, -1, -1, -1]),
  ],
)
def test_token_weights_are_those_of_the_formula(loss, sign, expected):
  np.testing.assert_allclose(methods.token_weights(loss, RATIOS, sign), expected, rtol=1e-5)


def test_token_weights_of_a_loss_with_statistics():
  found = methods.token_weights(losses.p3o(), np.ones(3, np.float32), 1.0)
  np.testing.assert_allclose(found, 1.0, rtol=1e-6)  # all ratios 1: REINFORCE


def comparison():
  numbers = {
    lag: {"grpo": {"cosine": 1.0, "ess": 1.0}, "rloo": {"cosine": 0.5 - lag}} for lag in (0, 1)
  }
  matrix = np.array([[1.0, 0.5], [0.5, 1.0]])
  return same_rollouts.Comparison(["grpo", "rloo"], [0, 1], numbers, {0: matrix, 1: -matrix}, None)


def test_a_metric_has_a_row_for_every_recipe_and_a_point_for_every_lag():
  axes = Figure().subplots()
  methods.plot_by_lag(axes, comparison(), "cosine", "cosine to GRPO")
  fresh, stale = axes.lines
  np.testing.assert_array_equal(fresh.get_xydata(), [[1, 1], [0.5, 0]])
  np.testing.assert_array_equal(stale.get_xdata(), [1, -0.5])
  assert [label.get_text() for label in axes.get_yticklabels()] == ["grpo", "rloo"]
  assert float(fresh.get_color()) > float(stale.get_color())  # larger lags are darker
  other = Figure().subplots()
  methods.plot_by_lag(other, comparison(), "ess", "ESS")
  np.testing.assert_array_equal(other.lines[0].get_xdata(), [1, np.nan])


def test_cosines_are_written_in_their_squares():
  from matplotlib import pyplot

  methods.draw_cosines(comparison(), lag=1)
  axes = pyplot.gcf().axes[0]
  assert [text.get_text() for text in axes.texts] == ["-1.00", "-0.50", "-0.50", "-1.00"]
  np.testing.assert_array_equal(axes.images[0].get_array(), [[-1, -0.5], [-0.5, -1]])
  assert axes.get_title() == "1 updates after recording"
  pyplot.close("all")


def test_a_figure_has_a_panel_for_every_name_and_no_other():
  from matplotlib import pyplot

  methods.draw_coefficients(["grpo", "rloo", "maxrl", "fade"], 4)
  assert [axes.get_title() for axes in pyplot.gcf().axes] == ["grpo", "rloo", "maxrl", "fade"]
  pyplot.close("all")
  methods.draw_clip(epsilon_low=0.2, epsilon_high=0.28)
  assert pyplot.gca().get_title() == "ppo_clip, interval [0.8, 1.28]"
  success, failure = pyplot.gca().lines[:2]
  x, y = success.get_data()
  assert y[x > 1.29].max() == 0 and failure.get_ydata()[x > 1.29].max() < -1.28
  pyplot.close("all")


def test_a_batch_is_counted_by_successes():
  correct = np.array([[0, 0], [1, 0], [0, 1], [1, 1]], np.float32)
  batch = parts.batch_of(np.ones((4, 2, 1)), rewards=correct)
  axes = Figure().subplots()
  methods.plot_recorded(axes, batch)
  assert [bar.get_height() for bar in axes.patches] == [1, 2, 1]


def test_a_place_of_rollouts_is_a_file_or_a_numbered_batch():
  with pytest.raises(
    ValueError, match=r"rollouts = 'a/store': give FILE.safetensors, or a store and"
  ):
    same_rollouts.read_recorded_batch("a/store")
