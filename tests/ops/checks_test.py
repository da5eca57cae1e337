"""Hyper-parameter checks."""

import math

import pytest

from rlvr_jax.ops.checks import check_between, check_choice, check_integer, check_order


@pytest.mark.parametrize("value", [1.1, -0.1, math.nan, "0.5", None, True])
def test_what_is_not_a_number_in_range_is_refused_with_the_range(value):
  with pytest.raises(ValueError, match=r"loss: epsilon = .*\[0, 1\]"):
    check_between("loss", "epsilon", value, low=0.0, high=1.0)


def test_an_open_end_excludes_its_bound():
  check_between("loss", "c", 0.0, low=0.0)
  with pytest.raises(ValueError, match=r"\(0, inf\)"):
    check_between("loss", "c", 0.0, low=0.0, open_low=True)


def test_a_choice_lists_the_allowed():
  check_choice("loss", "cap", "a", ("a", "b"))
  with pytest.raises(ValueError, match=r"cap = 'c'.*\['a', 'b'\]"):
    check_choice("loss", "cap", "c", ("a", "b"))


@pytest.mark.parametrize("value", [0, 1.0, 1.5, "2", None, True])
def test_what_is_not_a_whole_number_is_refused(value):
  check_integer("sketch", "copies", 1, low=1)
  with pytest.raises(ValueError, match=r"sketch: copies = .* is not an integer ≥ 1; .* 1 or more"):
    check_integer("sketch", "copies", value, low=1)
  with pytest.raises(ValueError, match=r"copies = 8 is not an integer in \[1, 7\]; set copies"):
    check_integer("sketch", "copies", 8, low=1, high=7)


def test_bounds_that_cross_name_both():
  check_order("salt", ("low", 1), ("high", 1))
  with pytest.raises(ValueError, match=r"low = 2 is above high = 1; lower low or raise high"):
    check_order("salt", ("low", 2), ("high", 1))
