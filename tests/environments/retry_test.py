"""Trying again: what comes back, and what a later try is worth."""

import pytest

from rlvr_jax.environments import Turn, retry
from rlvr_jax.environments.dialogues import EnvironmentPool
from rlvr_jax.rewards import GraderPool
from rlvr_jax.rewards.by_name import weighted_reference

PROBLEM = {"question": "q", "answer": "42", "reference": {}}


def opened(verdicts, **options):
  """An environment whose grader gives these verdicts, one per text."""
  verdicts = iter(verdicts)
  environment = retry(grade=lambda text: next(verdicts), **options)
  assert environment.reset(PROBLEM, 0) is None
  return environment


def test_a_right_answer_ends_it_with_the_discounted_score():
  wrong = ("wrong", 0.0, "")
  environment = opened([wrong, wrong, ("correct", 2.0, "")], tries=4, discount=0.5)
  assert environment.step("a") == Turn("That is wrong.\nTry again; 3 tries are left.")
  assert environment.step("b") == Turn("That is wrong.\nTry again; 2 tries are left.")
  assert environment.step("c") == Turn(done=True, score=0.5, correct=True)
  assert opened([("correct", 1.0, "")]).step("a") == Turn(done=True, score=1.0, correct=True)


def test_the_last_wrong_try_ends_it_with_its_score():
  environment = opened([("unparseable", 0.0, ""), ("wrong", 0.25, "")], tries=2, discount=0.5)
  assert environment.step("a") == Turn("No answer was found in it.\nTry again; 1 try is left.")
  assert environment.step("b") == Turn(done=True, score=0.125, correct=False)
  assert opened([("timeout", 0.0, "")], tries=1).step("a") == Turn(
    done=True, score=0.0, correct=False
  )


def test_feedback_is_shown_and_nothing_else():
  replies = [
    opened([("wrong", 0.0, feedback)]).step("test 1 of 2, 42").reply for feedback in ("x", "")
  ]
  assert replies == [f"That is wrong.\n{x}Try again; 2 tries are left." for x in ("x\n", "")]


@pytest.mark.parametrize(
  ("options", "message"),
  [({"tries": 0}, "tries = 0"), ({"discount": 1.5}, "discount = 1.5"), ({"discount": -1}, "= -1")],
)
def test_wrong_hyper_parameters(options, message):
  with pytest.raises(ValueError, match=message):
    opened([], **options)


TESTS = {"style": "function", "entry_point": "f", "cases": [{"input": [2], "output": 3}]}
WRONG, RIGHT = (f"```python\ndef f(x):\n  return x{more}\n```" for more in ("", " + 1"))
FAILED = "test 1 of 1, input [2]: AssertionError: got 2, expected 3\n"
UNREAD = r"a \equiv 3 \pmod{7}"  # the grader's detail may quote it


GRADED = [
  ("code", TESTS, WRONG, FAILED, RIGHT),
  ("mathematics", {"answer": UNREAD}, r"\boxed{program: 5}", "", rf"\boxed{{{UNREAD}}}"),
  ("weighted", weighted_reference("code", TESTS, [("boxed", 0.0)]), WRONG, FAILED, RIGHT),
]


def test_with_the_graders_of_tasks():
  """And a grader that crashes is a fault of its own, not a try."""
  begin = lambda pool, grader, reference: pool.reset(
    {**PROBLEM, "reference": {"grader": grader, "reference": reference}}, 0
  )
  with (
    GraderPool("by_reference", preload=["code"], timeout_s=30.0) as graders,
    EnvironmentPool("retry(discount=0.5)", deadline_s=30.0, grade=graders.submit) as pool,
  ):
    for grader, reference, wrong, shown, right in GRADED:
      dialogue = begin(pool, grader, reference).result(60).dialogue
      reply = pool.step(dialogue, wrong).result(60).reply
      assert reply == f"That is wrong.\n{shown}Try again; 2 tries are left.", grader
      assert pool.step(dialogue, right).result(60) == Turn(done=True, score=0.5, correct=True)
    dialogue = begin(pool, "rewards.faulty_graders:faulty", {}).result(60).dialogue
    failure = pool.step(dialogue, "raise a fault").result(60)
  assert failure.kind == "failed" and "ValueError: a fault" in failure.detail
