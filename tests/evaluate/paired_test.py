"""Statistics over seeds against textbook values."""

import numpy as np
import pytest

from rlvr_jax.evaluate import paired

OURS, THEIRS = {0: 0.5, 1: 0.7, 2: 0.6, 7: 0.1}, {2: 0.3, 1: 0.5, 0: 0.4, 9: 0.9}


def test_a_difference_is_taken_seed_by_seed():
  """0.1, 0.2, 0.3: Student's t at two degrees is 4.302653; one resample in 27 is all 0.1.

  At two degrees P(|t| > x) is 1 - x/√(2 + x²), here with x = √12.
  """
  found = paired.paired_difference(OURS, THEIRS)
  assert found.num_seeds == 3
  half = 4.302653 * 0.1 / np.sqrt(3)
  np.testing.assert_allclose(found[1:4], [0.2, 0.2 - half, 0.2 + half], rtol=1e-6)
  np.testing.assert_allclose([found.bootstrap_low, found.bootstrap_high], [0.1, 0.3])
  assert found.deviation == pytest.approx(0.1)
  assert found.p == pytest.approx(1 - np.sqrt(12 / 14))
  swapped = paired.paired_difference(THEIRS, OURS)
  assert (swapped.mean, swapped.p) == (-found.mean, found.p)


def test_no_noise_is_no_doubt():
  same = {0: 0.25, 1: 0.5}
  assert paired.paired_difference(same, same).p == 1.0
  more = paired.paired_difference({0: 0.5, 1: 0.75}, same)
  assert (more.low, more.high, more.p) == (0.25, 0.25, 0.0)
  message = r"seeds \[0, 1\] and the baseline's seeds \[1, 2\] share 1, but at least 2 are needed"
  with pytest.raises(ValueError, match=message):
    paired.paired_difference(same, {1: 0.1, 2: 0.2})


def test_the_t_interval_covers_the_truth_as_often_as_it_says():
  rng = np.random.default_rng(0)
  halves = [paired.mean_and_half_width(rng.normal(size=4)) for _ in range(2000)]
  covered = np.mean([abs(mean) < half for mean, half in halves])
  assert abs(covered - 0.95) < 3 * np.sqrt(0.95 * 0.05 / 2000)


def test_holm_multiplies_the_smallest_most():
  np.testing.assert_allclose(paired.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
  np.testing.assert_allclose(paired.holm([0.5, 0.6]), [1, 1])
  assert paired.holm([0.2]) == [0.2] and paired.holm([]).size == 0


@pytest.mark.parametrize(("effect", "seeds"), [(1.0, 10), (0.5, 34), (0.2, 199), (10.0, 3)])
def test_seeds_needed_are_those_of_tables_of_power(effect, seeds):
  """Cohen's effect sizes at a power of 0.8, two-sided: 10, 34 and 199 pairs."""
  assert paired.seeds_needed(0.02 / effect, 0.02) == seeds


def test_seeds_needed_at_the_ends():
  assert paired.seeds_needed(0.0) == 2
  assert paired.seeds_needed(1e6, 0.02) == 10**6
  assert paired.seeds_needed(0.02, power=0.95) > paired.seeds_needed(0.02)
  with pytest.raises(ValueError, match=r"difference = 0\.0 is not a number in \(0"):
    paired.seeds_needed(0.1, 0.0)


def test_standard_errors():
  assert paired.standard_error_over_seeds([0.1, 0.2, 0.3]) == pytest.approx(0.1 / np.sqrt(3))
  assert paired.standard_error_over_seeds([0.1, 0.1, 0.1]) == 0  # NumPy's deviation is 1.7e-17
  assert paired.standard_error_of_interval(0.1, 0.3) == pytest.approx(0.2 / (2 * 1.959964))
  with pytest.raises(ValueError, match=r"or more seeds is needed, got an array of shape \(1,\)"):
    paired.standard_error_over_seeds([0.1])
