"""Graders of a completion's form."""

import re

import pytest

from rlvr_jax.rewards import Outcome
from rlvr_jax.rewards.by_name import load_grader
from rlvr_jax.rewards.formats import boxed, pattern, think_answer


def _check(grade, good, said=""):
  assert (grade.outcome, grade.score) == (
    (Outcome.CORRECT, 1.0) if good else (Outcome.WRONG, 0.0)
  ), grade
  assert said in grade.detail


@pytest.mark.parametrize(
  ("completion", "problem"),
  [
    (r"so \boxed{5}", ""),
    (r"\fbox{\{1\}}", ""),
    (r"<think>\boxed{1}</think> \boxed{2}", ""),
    (r"\boxed{\boxed{2}}", ""),
    (r"\boxed 5", ""),
    ("5", "0 boxes"),
    (r"\boxed{1} \boxed{2}", "2 boxes"),
    (r"\boxed{1} \boxed{2", "never closed"),
    (r"\boxed{ }", "an empty box"),
    (r"<think>\boxed{1}", "no </think>"),
  ],
)
def test_boxed(completion, problem):
  _check(boxed(completion, {}), not problem, problem)


@pytest.mark.parametrize(
  ("completion", "problem"),
  [
    ("<think>hm</think>5", ""),
    (" <think>\nhm\n</think>\n\nThe answer is 5", ""),
    ("hm</think>5", "does not start with <think>"),
    ("<think><think>hm</think>5", "more than one thought"),
    ("<think>hm", "no </think>"),
    ("<think> </think>5", "empty"),
    ("<think>hm</think> ", "empty"),
    ("<think>hm</think>5</think>6", "more than one"),
    ("<think>a<think>hm</think>5", "more than one"),
  ],
)
def test_think_answer(completion, problem):
  _check(think_answer(completion, {}), not problem, problem)


def test_pattern():
  regex = r"\A<a>.+</a>\Z"
  _check(pattern("<a>x\ny</a>", {}, regex=regex), True)
  _check(pattern("<a>x</a>.", {}, regex=regex), False, "no match")
  with pytest.raises(re.error, match="unterminated subpattern"):
    load_grader("pattern(regex='(')")
