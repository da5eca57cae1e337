"""What an interval says about a claim that was written down before its runs."""

import pytest

from experiments.testbed.claims import verdict


@pytest.mark.parametrize(
  ("claimed", "low", "high", "expected"),
  [
    ("more", 0.01, 0.09, "found"),
    ("more", -0.01, 0.09, "undecided"),
    ("more", -0.02, 0.02, "excluded beyond the margin"),
    ("more", 0.001, 0.02, "excluded beyond the margin"),  # so small a difference does not matter
    ("more", -0.09, -0.01, "reversed"),
    ("equal", -0.02, 0.02, "found"),
    ("equal", -0.02, 0.04, "undecided"),
    ("equal", 0.01, 0.04, "excluded: they differ"),
    ("equal", -0.04, -0.01, "excluded: they differ"),
    ("not less", -0.02, 0.09, "found"),
    ("not less", 0.01, 0.02, "found"),
    ("not less", -0.04, 0.02, "undecided"),
    ("not less", -0.04, -0.01, "reversed"),
    ("not less", -0.09, -0.04, "excluded beyond the margin"),
  ],
)
def test_the_verdict_of_an_interval(claimed, low, high, expected):
  assert verdict(claimed, low, high, matters=0.03) == expected
