"""A curriculum: what is sampled how often, and that a restored position repeats it."""

import copy
import json
import re

import numpy as np
import pytest

from rlvr_jax.data import Problem, tasks
from rlvr_jax.data.curriculum import Curriculum
from rlvr_jax.data.draws import ShuffledDraws, problem_draws
from rlvr_jax.data.sources import Chosen

SIZES = dict(train_size=50, warm_start_size=0, held_out_size=4)


def level(operations):
  """Problems with as many sums and products."""
  return {"name": "steps", "kwargs": SIZES | {"terms": operations + 1}}


@pytest.fixture(name="lines", scope="module")
def _lines(tmp_path_factory):
  path = tmp_path_factory.mktemp("curriculum") / "mine.jsonl"
  path.write_text("".join(f'{{"prompt": "q{n}", "answer": "{n}"}}\n' for n in range(41)))
  kwargs = dict(train=str(path), held_out_size=1, grader="mathematics")
  return {"mine": {"name": "jsonl", "kwargs": kwargs}}


def run(draws, solve_rate, first, last, versions=1):
  """Draws of a run with as many draws per version; returns the questions and the last state."""
  questions, state = [], None
  for version in range(first, last):
    drawn = [(version * versions + k) for k in range(versions)]
    asked = {draw: (draws.draw(draw, version), draws.get_state()) for draw in drawn}
    for draw, (problems, after) in asked.items():
      rates = np.array([solve_rate(p) for p in problems], np.float32)
      state, _ = draws.observe(draw, rates, after)
      questions.append([p.question for p in problems])
  return questions, state


def test_what_is_always_or_never_solved_is_sampled_less_by_the_factor_of_the_floor(lines):
  task = tasks.curriculum(parts=lines, floor=0.1)
  assert isinstance(task.train, Curriculum) and len(task.train) == 40
  draws = problem_draws(task.train, batch_size=4, seed=0)
  rate = lambda p: {0: 0.0, 1: 0.5, 2: 1.0}[int(p.answer) % 3]
  questions, _ = run(draws, rate, 0, 600)
  assert all(len(set(batch)) == 4 for batch in questions)
  late = [int(q[1:]) % 3 for batch in questions[100:] for q in batch]
  numbers = [int(task.train[i].answer) % 3 for i in range(40)]
  per_problem = np.bincount(late) / np.bincount(numbers)
  # Without repetition within a batch the frequent ones are a little rarer than 10 to 1.
  assert per_problem[1] / per_problem[0] == pytest.approx(9, rel=0.2)
  assert per_problem[0] == pytest.approx(per_problem[2], rel=0.25)


def test_a_group_without_a_grade_tells_nothing(lines):
  draws = problem_draws(tasks.curriculum(parts=lines).train, batch_size=4, seed=0)
  draws.draw(0, 0)
  rates = np.array([np.nan, 1.0, np.nan, 0.0], np.float32)
  state, _ = draws.observe(0, rates, draws.get_state())
  [(version, cells, observed)] = state["observed"]
  assert version == 0 and len(cells) == 2 and observed == [1.0, 0.0]


def test_levels_follow_the_policy(lines):
  task = tasks.curriculum(parts={"one": level(1), "two": level(4)}, by="part", weight="hard")
  draws = problem_draws(task.train, batch_size=10, seed=0)
  solved = lambda p: float(len(re.findall(r"[+*]", p.question)) < 2)
  first, (_, metrics) = draws.draw(0, 0), draws.observe(0, np.full(10, 0.5), draws.get_state())
  assert metrics["curriculum/estimate/one"] == metrics["curriculum/estimate/two"] == 0.5
  assert metrics["curriculum/share/one"] + metrics["curriculum/share/two"] == 1.0
  assert 2 <= sum(solved(p) for p in first) <= 8
  run(draws, solved, 1, 8)
  late = [p for draw in range(8, 28) for p in draws.draw(draw, 100 + draw)]
  assert np.mean([solved(p) for p in late]) < 0.12  # the floor, 0.05 to 1
  twos = [p.question for p in late if not solved(p)]
  assert len(set(twos[:30])) == 30  # each once before any comes again


@pytest.mark.parametrize("by", ["problem", "part"])
def test_a_restored_run_draws_the_same(lines, by):
  parts = lines if by == "problem" else {"one": level(1), "two": level(4)}
  source = lambda: tasks.curriculum(parts=parts, by=by).train
  rate = lambda p: (len(p.question) * 7 + int(p.answer)) % 5 / 4
  begun = problem_draws(source(), batch_size=6, seed=3)
  expected, _ = run(begun, rate, 0, 10, versions=2)
  first = problem_draws(source(), batch_size=6, seed=3)
  _, state = run(first, rate, 0, 5, versions=2)
  again = problem_draws(source(), batch_size=6, seed=3)
  again.set_state(json.loads(json.dumps(state)))
  assert run(again, rate, 5, 10, versions=2)[0] == expected[10:]
  other = problem_draws(source(), batch_size=6, seed=4)
  assert run(other, rate, 0, 10, versions=2)[0] != expected


def test_a_run_that_draws_ahead_is_restored_with_all_that_it_observed(lines):
  """Two draws are open: a draw's rates are applied before the state of the next one is saved."""
  source = lambda: tasks.curriculum(parts=lines).train
  rates = lambda problems: np.array([int(p.answer) % 2 for p in problems], np.float32)
  draws = problem_draws(source(), batch_size=8, seed=0)
  opened = {n: (draws.draw(n, 0), draws.get_state()) for n in (0, 1)}
  for number in range(8):
    problems, after = opened.pop(number)
    state, _ = draws.observe(number, rates(problems), after)
    opened[number + 2] = draws.draw(number + 2, number + 1), draws.get_state()
    again = problem_draws(source(), batch_size=8, seed=0)
    again.set_state(json.loads(json.dumps(state)))
    # A much later draw has all that was observed until now, in both.
    found, expected = (d.draw(50, 100) for d in (again, copy.deepcopy(draws)))
    assert [p.question for p in found] == [p.question for p in expected]


def test_a_refresh_does_not_depend_on_how_far_grading_is(lines):
  """Two batches of one policy: the first may be graded before the second is drawn, or after."""
  rates = lambda problems: np.array([int(p.answer) % 2 for p in problems], np.float32)
  states = []
  for early in (True, False):
    draws = problem_draws(tasks.curriculum(parts=lines).train, batch_size=20, seed=0)
    one = draws.draw(0, 0)
    after_one = draws.get_state()
    found = draws.observe(0, rates(one), after_one) if early else None
    two = draws.draw(1, 0)
    after_two = draws.get_state()
    found = found or draws.observe(0, rates(one), after_one)
    last, _ = draws.observe(1, rates(two), after_two)
    states.append(copy.deepcopy((found[0], last, [p.question for p in draws.draw(2, 1)])))
  assert states[0] == states[1]


def test_a_change_and_a_filter_keep_it_a_curriculum(lines):
  task = tasks.curriculum(parts={"one": level(1), **lines}, by="part")
  assert task.grader == "by_reference" and len(task.train) == 90
  kept = task.train.where(lambda p: p.question.startswith("q"))
  assert isinstance(kept, Curriculum) and list(kept.parts) == ["mine"] and len(kept) == 40
  assert kept.map(lambda p: Problem("x", p.answer, "", {}))[3].question == "x"


def test_a_source_that_is_none_is_shuffled_as_ever():
  source = Chosen.of([Problem(str(n), "", "", {}) for n in range(8)])
  draws = problem_draws(source, batch_size=8, seed=1)
  assert isinstance(draws, ShuffledDraws)
  assert sorted(p.question for p in draws.draw(0, 0)) == list("01234567")
  state = draws.get_state()
  assert draws.observe(0, np.zeros(8), state) == (state, {})
  following = draws.draw(1, 0)
  draws.set_state(state)
  assert draws.draw(1, 0) == following


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(by="level"), r"by = 'level' is unknown; choose one of \['part', 'problem'\]"),
    (dict(weight="easy"), r"weight = 'easy' is unknown; choose one of \['hard', 'learnable'\]"),
    (dict(rate=0.0), r"rate = 0\.0 is not a number in \(0, 1\]"),
    (dict(floor=0.0), r"floor = 0\.0 is not a number in \(0, 1\]"),
    (dict(first=2.0), r"first = 2\.0 is not a number in \[0, 1\]"),
    (dict(parts={}), "parts is empty"),
    (
      dict(parts={"a": {"name": "curriculum", "kwargs": {}}}),
      "'a' of the curriculum is .* a name other than mixture, curriculum, guess",
    ),
    (dict(parts={"a": {"name": "steps", "kwargs": SIZES | {"train_size": 2_000_000}}}),
     "have 2000000 problems, .*set by = 'part'"),
  ],
)  # fmt: skip
def test_mistakes_have_a_message(lines, change, message):
  with pytest.raises(ValueError, match=message):
    tasks.curriculum(**({"parts": lines} | change))


def test_a_batch_of_more_problems_than_there_are(lines):
  refused = "takes 41 different problems, but the curriculum has only 40"
  with pytest.raises(ValueError, match=refused):
    problem_draws(tasks.curriculum(parts=lines).train, batch_size=41, seed=0)
