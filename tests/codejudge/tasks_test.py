"""What tests want of a program."""

import pytest

from rlvr_jax.codejudge.tasks import names_used


@pytest.mark.parametrize(
  ("tests", "names", "modules"),
  [
    (["assert f(1) == 2"], ["f"], []),
    (["assert set(f(1)) == {int(g(2))}"], ["f", "g"], []),
    (["assert math.isclose(f(1), 2)"], ["f"], ["math"]),
    (["import math as m\nassert m.isclose(f(1), 2)"], ["f"], []),
    (["assert sum(1, 2) == 3"], ["sum"], []),
    (["def h(x): return f(x)", "y = 3", "assert h(y) and [z for z in f(1)]"], ["f"], []),
    (["assert bisect([1], 1) == 1"], ["bisect"], []),
  ],
)
def test_names_of_the_program(tests, names, modules):
  assert names_used(tuple(tests)) == (names, modules)
