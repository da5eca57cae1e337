"""Lets a policy try again until the grader finds its answer right, or no tries are left."""

from __future__ import annotations

from rlvr_jax.environments.base import Environment, Grade, Problem, Turn
from rlvr_jax.ops.checks import check_between, check_integer

_VERDICTS = {
  "wrong": "That is wrong.",
  "unparseable": "No answer was found in it.",
  "timeout": "It took too long.",
}


class _Retry:
  """The tries at one problem."""

  def __init__(self, grade: Grade, tries: int, discount: float):
    self._grade = grade
    self._tries = tries
    self._discount = discount
    self._num_done = 0

  def reset(self, problem: Problem, seed: int) -> None:
    del problem, seed

  def step(self, text: str) -> Turn:
    """Grades the policy's text, which counts as one try."""
    outcome, score, feedback = self._grade(text)
    score *= self._discount**self._num_done
    self._num_done += 1
    if outcome == "correct" or self._num_done == self._tries:
      return Turn(done=True, score=score, correct=outcome == "correct")
    left = self._tries - self._num_done
    again = f"Try again; {left} {'try is' if left == 1 else 'tries are'} left."
    return Turn("\n".join(filter(None, (_VERDICTS[outcome], feedback, again))))


def retry(*, grade: Grade, tries: int = 3, discount: float = 1.0) -> Environment:
  """Tells the policy whether its answer is right, and lets it try again.

  A right answer or the last try ends the dialogue, with the grade's score · discount^(earlier
  tries); graders normally give 0 to wrong answers. A reply has the outcome and the grader's
  feedback, if there is any. The feedback for programs is the first failing test, with its expected
  output: k tries show at most k − 1 tests.

  Args:
    grade: the task's grader for the problem, from the run.
    tries: answers allowed, ≥ 1.
    discount: factor of the score for each earlier try, in [0, 1].
  Raises:
    ValueError: a hyper-parameter is out of range.
  """
  check_integer("retry", "tries", tries, low=1)
  check_between("retry", "discount", discount, low=0.0, high=1.0)
  return _Retry(grade, tries, discount)
