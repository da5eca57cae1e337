"""DAPO's overlong shaping and filtering."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.ops.overlong import overlong_filter, overlong_penalty


def test_penalty_rises_linearly_over_the_buffer():
  lengths = jnp.array([[1, 80, 81], [90, 99, 100]])
  penalty = overlong_penalty(lengths, max_response_length=100, overlong_buffer=20)
  np.testing.assert_allclose(penalty, [[0, 0, 0.05], [0.5, 0.95, 1.0]], rtol=1e-6)


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_bad_buffer_is_named(buffer):
  with pytest.raises(ValueError, match=f"{buffer}.*100"):
    overlong_penalty(jnp.ones((1, 1)), max_response_length=100, overlong_buffer=buffer)


def test_filter_masks_the_truncated_responses():
  mask = jnp.array([[[1.0, 1, 0], [1, 1, 1]]])
  filtered = overlong_filter(mask, jnp.array([[True, False]]))
  np.testing.assert_array_equal(filtered, [[[1, 1, 0], [0, 0, 0]]])
  assert filtered.dtype == mask.dtype
