"""Several graders in one, named by references."""

import pytest

from rlvr_jax.rewards import (
  Grade,
  GraderPool,
  GraderStartError,
  Outcome,
  outcome_policy,
  rewards_from_grades,
)
from rlvr_jax.rewards.by_name import by_reference, load_grader, weighted, weighted_reference

GSM8K = "gsm8k"
MATHEMATICS = "mathematics"
BOXED = "boxed"
WEIGHTED = "weighted"
BY_REFERENCE = "by_reference"


@pytest.fixture
def own(tmp_path, monkeypatch):
  """Writes a module of graders and gives the function that names them."""
  monkeypatch.syspath_prepend(tmp_path)
  count = len(list(tmp_path.parent.glob("*/own_*.py")))

  def write(text):
    name = f"own_{tmp_path.name}_{count}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(text)
    return lambda function: f"{name}:{function}"

  return write


def test_weighted_sums_the_scores_and_takes_the_first_outcome():
  reference = weighted_reference(MATHEMATICS, {"answer": "5"}, [(BOXED, 0.25)])
  assert [part["weight"] for part in reference["parts"]] == [1.0, 0.25]
  texts = {r"\boxed{5.0}": 1.25, "#### 5": 1.0, r"\boxed{6}": 0.25, "6": 0.0, "": 0.0}
  grades = [weighted(text, reference) for text in texts]
  assert [grade.score for grade in grades] == list(texts.values())
  assert [grade.parts for grade in grades] == [(1, 1), (1, 0), (0, 1), (0, 0), (0, 0)]
  with GraderPool(WEIGHTED) as pool:
    assert pool.grade([*texts], [reference] * 5) == grades
  outcomes = ["correct", "correct", "wrong", "wrong", "unparseable"]
  assert [grade.outcome.value for grade in grades] == outcomes
  assert [grade.answer for grade in grades] == ["5", "5", "6", "6", ""]
  assert "mathematics: wrong 0 6; boxed: correct 1" in grades[2].detail
  rewards = rewards_from_grades(
    grades, outcome_policy({"wrong": "score", "unparseable": "score"})
  ).rewards
  assert rewards.tolist() == list(texts.values())


def test_weighted_needs_parts():
  with pytest.raises(ValueError, match="'parts' is empty"):
    weighted("", {"parts": []})


def test_a_crashed_part_crashes_the_whole():
  reference = weighted_reference(BOXED, {"answer": ""}, [(MATHEMATICS, 1.0)])
  grade = weighted(r"\boxed{5}", reference)
  assert grade.outcome is Outcome.CRASHED and "gold answer: '' is empty" in grade.detail


def test_a_sum_that_no_float32_holds_is_refused():
  reference = weighted_reference(BOXED, {}, [(BOXED, 1e30), (BOXED, 1e30)])
  with pytest.raises(ValueError, match=r"returned score 2e\+30, expected a number within"):
    load_grader(WEIGHTED)(r"\boxed{5}", reference)


def test_plain_numbers_and_exceptions_of_parts(own):
  name = own(
    "def half(completion, reference): return 0.5\n"
    "def broken(completion, reference): raise OSError('gone')\n"
  )
  reference = weighted_reference(GSM8K, {"answer": "5"}, [(name("half"), -1)])
  assert weighted("5", reference).score == 0.5
  with pytest.raises(OSError, match="gone"):
    weighted("5", weighted_reference(GSM8K, {"answer": "5"}, [(name("broken"), 1)]))


def test_by_reference():
  grade = by_reference("#### 5", {"grader": GSM8K, "reference": {"answer": "5"}})
  assert grade == Grade(Outcome.CORRECT, 1.0, "5", "5")
  inner = weighted_reference(GSM8K, {"answer": "5"}, [(BOXED, 0.5)])
  assert by_reference(r"\boxed{5}", {"grader": WEIGHTED, "reference": inner}).score == 1.5


def test_parts_are_loaded_and_tested_once_at_first_use(own):
  name = own(
    "calls = []\n"
    "def grade(completion, reference): return len(calls)\n"
    "def grade_self_test(): calls.append(1)\n"
  )
  reference = {"grader": name("grade"), "reference": {}}
  assert [by_reference("", reference).score for _ in range(3)] == [1.0] * 3


def test_mixture_through_the_pool(own):
  name = own(
    "def untestable(completion, reference): return 1\n"
    "def untestable_self_test(): raise OSError('no licence')\n"
  )
  tasks = [GSM8K, MATHEMATICS, "no_such:grader", "no path", name("untestable"), GSM8K]
  references = [{"grader": path, "reference": {"answer": "5"}} for path in tasks]
  with GraderPool(BY_REFERENCE, preload=[MATHEMATICS]) as pool:
    grades = pool.grade(["#### 5"] * len(tasks), references)
  assert [grade.outcome.value for grade in grades] == [
    "correct", "correct", "crashed", "crashed", "crashed", "correct",
  ]  # fmt: skip
  said = ["No module named 'no_such'", "grader = 'no path' is not a component", "no licence"]
  assert all(text in grade.detail for text, grade in zip(said, grades[2:5], strict=True)), grades
  with pytest.raises(GraderStartError, match="no licence"):
    GraderPool(BY_REFERENCE, preload=[name("untestable")])
