"""Trying again: what comes back, and what a later try is worth."""

import pytest

from rlvr_jax.environments import Turn, retry
from rlvr_jax.environments.pool import EnvironmentPool
from rlvr_jax.rewards import GraderPool

PROBLEM = {"question": "q", "answer": "42", "reference": {}}


def opened(verdicts, **options):
  """An environment whose grader gives these verdicts, one per text."""
  verdicts = iter(verdicts)
  environment = retry(grade=lambda text: next(verdicts), **options)
  assert environment.reset(PROBLEM, 0) is None
  return environment


def test_a_right_answer_ends_it_with_the_discounted_score():
  wrong = ("wrong", 0.0, "gold 42, answer 41")
  environment = opened([wrong, wrong, ("correct", 2.0, "")], tries=4, discount=0.5)
  assert environment.step("a") == Turn("That is wrong.\nTry again; 3 tries are left.")
  assert environment.step("b") == Turn("That is wrong.\nTry again; 2 tries are left.")
  assert environment.step("c") == Turn(done=True, score=0.5, correct=True)
  assert opened([("correct", 1.0, "")]).step("a") == Turn(done=True, score=1.0, correct=True)


def test_the_last_wrong_try_ends_it_with_its_score():
  environment = opened(
    [("unparseable", 0.0, "no number"), ("wrong", 0.25, "")], tries=2, discount=0.5
  )
  assert environment.step("a") == Turn("No answer was found in it.\nTry again; 1 try is left.")
  assert environment.step("b") == Turn(done=True, score=0.125, correct=False)
  assert opened([("timeout", 0.0, "")], tries=1).step("a") == Turn(
    done=True, score=0.0, correct=False
  )


@pytest.mark.parametrize(
  ("detail", "is_shown"),
  [
    ("test 2 of 3, input 3: AssertionError: got 3, expected 4", True),
    ("program: NameError: name 'x' is not defined", True),
    ("memory limit exceeded", True),
    ("memory limit exceeded by 42", False),
    ("42", False),
    ("the gold answer: 42", False),
    ("code: wrong 0 test 1 of 2", False),
    ("", False),
  ],
)
def test_only_details_of_programs_are_shown(detail, is_shown):
  reply = opened([("wrong", 0.0, detail)]).step("a").reply
  assert (f"\n{detail}.\n" in reply) == is_shown
  assert is_shown or reply == "That is wrong.\nTry again; 2 tries are left."


def test_a_grader_without_a_verdict_is_a_fault():
  with pytest.raises(RuntimeError, match="no verdict: crashed"):
    opened([("crashed", 0.0, "OSError")]).step("a")


@pytest.mark.parametrize(
  ("options", "message"),
  [({"tries": 0}, "tries = 0"), ({"discount": 1.5}, "discount = 1.5"), ({"discount": -1}, "= -1")],
)
def test_wrong_hyper_parameters(options, message):
  with pytest.raises(ValueError, match=message):
    opened([], **options)


@pytest.mark.parametrize(
  ("grader", "reference", "wrong", "shown", "right"),
  [
    ("gsm8k", {"answer": "42"}, "#### 41", "That is wrong.\nTry", "#### 42"),
    (
      "code",
      {"style": "function", "entry_point": "f", "cases": [{"input": [2], "output": 3}]},
      "```python\ndef f(x):\n  return x\n```",
      "test 1 of 1, input [2]: AssertionError: got 2, expected 3.\nTry",
      "```python\ndef f(x):\n  return x + 1\n```",
    ),
  ],
)
def test_with_the_graders_of_tasks(grader, reference, wrong, shown, right):
  with (
    GraderPool(grader, timeout_s=30.0) as graders,
    EnvironmentPool("retry(discount=0.5)", deadline_s=30.0, grade=graders.submit) as pool,
  ):
    problem = {**PROBLEM, "reference": reference}
    dialogue = pool.reset(problem, 0).result(60).dialogue
    reply = pool.step(dialogue, wrong).result(60).reply
    assert shown in reply and ("42" in reply) == (grader == "code" and "42" in shown)
    assert pool.step(dialogue, right).result(60) == Turn(done=True, score=0.5, correct=True)
