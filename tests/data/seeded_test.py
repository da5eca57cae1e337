"""The tasks that are drawn: steps and tour, their demonstrations, and the grader of walks."""

import itertools
import random
import re

import numpy as np
import pytest

from rlvr_jax.data import tasks
from rlvr_jax.rewards import Outcome, by_name
from rlvr_jax.rewards.graders import gsm8k
from rlvr_jax.rewards.tour import tour as grade_tour

SIZES = dict(train_size=200, warm_start_size=200, held_out_size=50)
GRADERS = {"steps": gsm8k, "tour": grade_tour}


def make(name, **kwargs):
  return getattr(tasks, name)(**(SIZES | kwargs))


def problems(source):
  return [source[index] for index in range(len(source))]


def solved(task):
  grade = GRADERS[task.name]
  return np.mean([grade(p.solution, p.reference).outcome == "correct" for p in task.warm_start])


@pytest.mark.parametrize("name", ["steps", "tour"])
def test_problems_are_repeatable_and_held_out_ones_are_not_trained_on(name):
  task, again = make(name), make(name)
  assert problems(task.train) == problems(again.train)
  questions = [{p.question for p in problems(s)} for s in (task.train, task.warm_start)]
  held_out = {p.question for p in problems(task.held_out)}
  assert len(held_out) == 50 and len(questions[1]) == 200
  assert not held_out & (questions[0] | questions[1])
  assert problems(make(name, train_seed=9).train)[0] != task.train[0]
  with pytest.raises(ValueError, match=r"are \(1, 1, 3\); set them to three different numbers"):
    make(name, warm_start_seed=1)


def test_both_in_a_mixture_are_graded_by_their_own():
  parts = {name: dict(name=name, kwargs=SIZES) for name in ("steps", "tour")}
  task = tasks.mixture(parts=parts, weights=dict.fromkeys(parts, 1.0), size=40, seed=0)
  graders = {by_name.by_reference(p.solution, p.reference).outcome for p in problems(task.held_out)}
  assert task.grader == "by_reference" and "correct" in graders
  assert graders <= {"correct", "wrong"}


def test_few_questions_are_not_given_twice():
  with pytest.raises(ValueError, match="task steps with seed 2 has too few distinct"):
    make("steps", terms=2, product_share=0.0)  # 81 questions


def test_steps_are_right_but_for_the_share_that_is_not():
  """Every line is checked by its own arithmetic, and follows from the one before."""
  line = re.compile(r"(\d+)([+*])(\d+)=(\d+)")
  wrong, lines, lengths = 0, 0, []
  for problem in make("steps", wrong_step_share=0.1, warm_start_size=400).warm_start:
    *work, last = problem.solution.split("\n")
    assert problem.answer == str(eval(problem.question.removesuffix("=")))
    total = int(re.match(r"\d+", problem.question)[0])
    for text in work:
      left, sign, right, value = line.fullmatch(text).groups()
      expected = int(left) * int(right) if sign == "*" else int(left) + int(right)
      wrong += expected != int(value)
      total = int(value)
    lines += len(work)
    assert last == f"#### {total}"
    lengths.append(len(problem.solution) + 1)
  assert wrong / lines == pytest.approx(0.1, abs=0.02)
  assert 60 < np.percentile(lengths, 5) < np.percentile(lengths, 95) < 130
  assert solved(make("steps", wrong_step_share=0.0)) == 1
  assert 0.4 < solved(make("steps")) < 0.8


def test_demonstrated_walks_are_right_unless_detours_exceed_the_budget():
  assert solved(make("tour", detour_share=0.0, slack=1.0)) == 1
  assert 0.8 < solved(make("tour")) < 1
  walks = [problem.solution.split("\n") for problem in make("tour").warm_start]
  assert {len(legs) for legs in walks} == {4}
  lengths = [len("".join(legs)) for legs in walks]
  assert max(lengths) <= 60 and len(set(lengths)) > 20


def legal(walk, problem, width):
  """An independent check, by coordinates of names."""
  reference, at = problem.reference, {}
  for index, name in enumerate(reference["cells"]):
    at[name] = np.array([index // width, index % width])
  path = [reference["start"], *walk]
  steps = [np.abs(at[a] - at[b]).sum() for a, b in itertools.pairwise(path)]
  visits = re.search(".*".join(map(re.escape, reference["goals"])) + "$", walk)
  within = len(walk) <= reference["budget"]
  return set(steps) == {1} and not set(walk) & set(reference["walls"]) and bool(visits) and within


def test_the_grader_of_walks_agrees_with_an_independent_check():
  """On demonstrations, and on those with a cell changed, left out or added."""
  number = random.Random(0)
  outcomes = []
  for problem in make("tour", width=5, walls=4, goals=2, slack=1.3).warm_start:
    walk, cells = problem.solution.replace("\n", ""), problem.reference["cells"]
    at = number.randrange(len(walk))
    other = number.choice(cells)
    for text in (
      walk,
      walk[:at] + other + walk[at + 1 :],
      walk[:at] + walk[at + 1 :],
      walk + other,
    ):
      if text:
        found = grade_tour(text, problem.reference).outcome
        assert (found == Outcome.CORRECT) == legal(text, problem, 5), (text, problem)
        outcomes.append(found)
  assert set(outcomes) == {Outcome.CORRECT, Outcome.WRONG}
  assert outcomes.count(Outcome.CORRECT) > 100


@pytest.mark.parametrize(
  ("walk", "outcome", "detail"),
  [
    ("BCF", "correct", ""),
    (" B\nCF\n", "correct", ""),
    ("BCFIFCF", "wrong", "7 cells, at most 6 are allowed"),
    ("BCFI", "wrong", "does not end on the last goal"),
    ("BAB", "wrong", "1 goals are not visited"),
    ("ADGHIF", "wrong", "cell 1 is not adjacent"),
    ("DEF", "wrong", "cell 2 is a wall"),
    ("BC!", "unparseable", "not a list of cells"),
    ("  ", "unparseable", "not a list of cells"),
  ],
)
def test_what_is_wrong_with_a_walk_is_said(walk, outcome, detail):
  """A B C / D E F / G H I, from A through B to F, E is a wall."""
  reference = dict(cells="ABCDEFGHI", start="A", goals="BF", walls="E", budget=6)
  grade = grade_tour(walk, reference)
  assert grade.outcome == outcome and detail in grade.detail


@pytest.mark.parametrize(
  ("name", "kwargs", "message"),
  [
    ("steps", dict(terms=1), "terms = 1 is not an integer ≥ 2"),
    ("steps", dict(wrong_step_share=1.5), r"wrong_step_share = 1\.5 is not a number in \[0, 1\]"),
    ("tour", dict(width=9), r"width = 9 is not an integer in \[3, 8\]"),
    ("tour", dict(walls=60), r"walls = 60 is not an integer in \[0, 59\]"),
    ("tour", dict(slack=0.5), r"slack = 0\.5 is not a number in \[1, 60\]"),
    ("tour", dict(longest=4, walls=30), "width = 8, walls = 30 and goals = 4, none of 1000 drawn"),
  ],
)
def test_settings_out_of_range(name, kwargs, message):
  with pytest.raises(ValueError, match=message):
    make(name, **kwargs)
