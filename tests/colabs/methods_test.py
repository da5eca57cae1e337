"""Coefficients and token weights against their formulas."""

import numpy as np
import pytest

from rlvr_jax import advantages, losses
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
    (losses.ppo_clip(), 1, [0.5, 0.9, 1, 1.1, 0]),
    (losses.ppo_clip(), -1, [0, -0.9, -1, -1.1, -2]),
  ],
)
def test_token_weights_are_those_of_the_formula(loss, sign, expected):
  np.testing.assert_allclose(methods.token_weights(loss, RATIOS, sign), expected, rtol=1e-5)


def test_token_weights_of_a_loss_with_statistics():
  found = methods.token_weights(losses.p3o(), np.ones(3, np.float32), 1.0)
  np.testing.assert_allclose(found, 1.0, rtol=1e-6)  # all ratios 1: REINFORCE


def test_a_place_of_rollouts_is_a_file_or_a_numbered_batch():
  with pytest.raises(
    ValueError, match=r"rollouts = 'a/store': give FILE.safetensors, or a store and the"
  ):
    same_rollouts.read_recorded_batch("a/store")
