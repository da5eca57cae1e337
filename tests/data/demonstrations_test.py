"""Step-by-step solutions: right at the end and on the way there."""

import re

import pytest

from rlvr_jax.data import demonstrations

SETTINGS = {"chain_sum": {"allow_negation": True, "min_terms": 1}, "gcd": {"max_numbers": 4}}


def _entries(dataset):
  from reasoning_gym.factory import create_dataset  # a second, which few tests need

  settings = {"seed": 5, "size": 200} | SETTINGS.get(dataset, {})
  return create_dataset(dataset, **settings)


@pytest.mark.parametrize("dataset", demonstrations.__all__)
def test_ends_with_the_answer(dataset):
  entries = _entries(dataset)
  for entry in entries:
    steps, mark, answer = getattr(demonstrations, dataset)(entry).rpartition("#### ")
    assert mark and answer == entry["answer"]
    assert entries.score_answer(answer, entry) == 1
    assert not steps or steps.endswith("\n")


@pytest.mark.parametrize("dataset", ["chain_sum", "gcd"])
def test_equations_hold(dataset):
  checked = 0
  for entry in _entries(dataset):
    for line in getattr(demonstrations, dataset)(entry).splitlines()[:-1]:
      left, operator, right, result = re.fullmatch(
        r"(-?\d+)([-+%])(-?\d+)=(-?\d+)", line
      ).groups()  # fmt: skip
      left, right = int(left), int(right)
      value = {"+": left + right, "-": left - right, "%": left % (right or 1)}[operator]
      assert value == int(result), line
      checked += 1
  assert checked > 200


def test_texts():
  chain_sum = {"answer": "-4", "metadata": {"expression": "4 - -1 - 9"}}
  assert demonstrations.chain_sum(chain_sum) == "4--1=5\n5-9=-4\n#### -4"
  gcd = {"answer": "2", "metadata": {"numbers": [12, 8, 6]}}
  assert demonstrations.gcd(gcd) == "12%8=4\n8%4=0\n4%6=4\n6%4=2\n4%2=0\n#### 2"
  spell = {"answer": "tac", "metadata": {"word": "cat"}}
  assert demonstrations.spell_backward(spell) == "c a t\nt a c\n#### tac"
  count = {"answer": "2", "metadata": {"target_letter": "n", "span": ["No", "one", "of"]}}
  assert demonstrations.letter_counting(count) == "No 1\none 2\nof 2\n#### 2"
  numbers = {"original_numbers": ["2", "-1", "2"], "sorted_numbers": ["-1", "2", "2"]}
  sort = {"answer": "['-1', '2', '2']", "metadata": numbers}
  assert demonstrations.number_sorting(sort) == (
    "-1 | 2 2\n2 | 2\n2 |\n#### ['-1', '2', '2']"
  )  # fmt: skip
