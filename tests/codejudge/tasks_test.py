"""What tests want of a program."""

import ast
import itertools

import pytest

from rlvr_jax.codejudge.harness.judge import _conjuncts
from rlvr_jax.codejudge.tasks import check, names_used


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


@pytest.mark.parametrize(
  ("test", "setup", "name"),
  [
    ("assert np.allclose(f(1), 2)", "", "np"),
    ("assert f(np.zeros(3)) == 3", "", "np"),
    ("assert dt.date(2000, 1, 1) == f()", "", "dt"),
    ("assert dt.date(2000, 1, 1) == f()", "import datetime as dt", None),
    ("import datetime as dt\nassert dt.date(2000, 1, 1) == f()", "", None),
    ("assert math.isclose(f(1), 2)", "", None),
    ("assert root.value == f(root)", "", None),
    ("assert root.value == 3", "root = Node(3)", None),
    ("assert Solution.f(1) == 2", "", None),
    ("assert Solution().f(1) == 2", "", None),
  ],
)
def test_a_module_that_nobody_imports_is_an_error(test, setup, name):
  tests = {"style": "asserts", "tests": [test], "setup": setup}
  if name is None:
    return check(tests)
  message = f"a test uses '{name}' as a module, but neither the tests nor the setup import it"
  with pytest.raises(ValueError, match=message):
    check(tests)


@pytest.mark.parametrize(
  ("test", "calls"),
  [
    ("f(0) and f(1)", 2),
    ("not (f(0) or f(1))", 2),
    ("not any(f(x) for x in (0, 1))", 2),
    ("any(f(x) for x in (0, 1)) == False", 2),
    ("(not any(f(x) for x in (0, 1))) is True", 2),
    ("all(f(x) for x in (0, 1))", 2),
    ("all(f(x) and f(x + 1) for x in (0, 2))", 4),
    ("not any(f(x) or f(x + 1) for x in (0, 2))", 4),
    ("all(map(f, (0, 1)))", 2),
    ("not any(map(f, (0, 1)))", 2),
    ("f(0) == 1 == f(1)", 2),
    ("not (f(0) < 1 < f(1) < f(2))", 3),
    ("f(0) and not (f(1) or not (f(2) and all([f(3)])))", 4),
    ("any(f(x) for x in (0, 1))", None),
    ("f(0) or f(1)", None),
    ("f(0) == True", None),
  ],
)
def test_parts_of_an_assert_mean_the_same_and_make_all_calls(test, calls):
  """Whatever the calls return; `calls` is how many there are where any could be left out."""
  parts = [
    ast.fix_missing_locations(part) for part in _conjuncts(ast.parse(test, mode="eval").body)
  ]
  compiled = [compile(ast.Expression(part), "test", "eval") for part in parts]
  for answers in itertools.product((0, 1, 2), repeat=calls or 2):
    made = []
    f = lambda x, answers=answers, made=made: made.append(x) or answers[x]
    got = [bool(eval(part, {"f": f})) for part in compiled]  # each is an assert of its own
    assert calls in (None, len(made)), (answers, made)
    assert all(got) == bool(eval(test, {"f": f})), answers
