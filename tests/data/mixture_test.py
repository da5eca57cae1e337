"""Mixtures of tasks: proportions, order, what is held out, and the graders of their parts."""

import collections
import dataclasses
import json
import logging

import pytest

from rlvr_jax.data import Problem, Task, tasks
from rlvr_jax.data.sources import Concatenated, question_key


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory, few_buckets):
  folder = tmp_path_factory.mktemp("mixture")
  gsm8k = lambda n: {"question": f"G{n}", "answer": f"#### {n}"}
  math = lambda n: {"problem": f"M{n}", "answer": str(n)}
  files = {
    "gsm8k/train": [gsm8k(n) for n in range(10)],
    "gsm8k/test": [gsm8k(n) for n in range(100, 103)],
    "math/train": [math(n) for n in range(30)],
    "math/test": [{"problem": "G3", "answer": "3"}, math(101)],  # one that gsm8k trains on
  }
  for name, rows in files.items():
    path = folder / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return folder


def listed():
  """A task of a user's own, whose problems are plain lists."""
  problems = [Problem(question="1?", answer="1", solution="1", reference={})]
  return Task("own", train=problems, warm_start=(), held_out=problems, grader="a:b")


def _all(source):
  return [source[index] for index in range(len(source))]


def _all_questions(source):
  return [problem.question for problem in _all(source)]


def _part(folder, name, **kwargs):
  settings = {"dataset": name, "data_dir": folder / name, "prepared_dir": folder / "prepared"}
  return {"name": "published", "kwargs": settings | {"prompt": "{question}"} | kwargs}


SUMS = {
  "name": "reasoning_gym",
  "kwargs": {
    "dataset": "chain_sum", "train_size": 40, "warm_start_size": 2, "held_out_size": 3,
    "train_seed": 1, "warm_start_seed": 2, "held_out_seed": 3,
    "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
  },
}  # fmt: skip


def _mixture(folder, **kwargs):
  parts = {"words": _part(folder, "gsm8k"), "contest": _part(folder, "math"), "sums": SUMS}
  weights = {"words": 0.5, "contest": 0.3, "sums": 0.2}
  return tasks.mixture(**({"parts": parts, "weights": weights, "size": 200, "seed": 0} | kwargs))


@pytest.fixture(name="train", scope="module")
def _train(folder):
  """Of three parts: 200 problems in proportions of 5, 3 and 2."""
  return _mixture(folder).train


@pytest.fixture(name="problems", scope="module")
def _problems(train):
  return _all(train)


def test_proportions_hold_in_every_stretch(problems):
  assert len(problems) == 200
  datasets = [problem.own_reference["dataset"] for problem in problems]
  for start in range(0, 200, 20):
    counts = collections.Counter(datasets[start : start + 20])
    assert counts == pytest.approx({"gsm8k": 10, "math": 6, "chain_sum": 4}, abs=1)


def test_each_part_is_gone_through_before_it_begins_again_in_another_order(problems):
  words = [p.question for p in problems if p.question.startswith("G")]
  left = sorted(f"G{n}" for n in range(10) if n != 3)  # 3 is held out by the other part
  rounds = [words[start : start + 9] for start in range(0, 90, 9)]
  assert all(sorted(each) == left for each in rounds)
  assert len({tuple(each) for each in rounds}) > 5


def test_the_same_every_time_in_any_order_and_by_seed(folder, train, problems):
  second, other = _mixture(folder), _mixture(folder, seed=1)
  backwards = [second.train[index] for index in reversed(range(40))]
  assert problems[:40] == backwards[::-1]
  assert problems[:40] != [other.train[index] for index in range(40)]
  for index in (-1, 200):
    with pytest.raises(IndexError, match="out of range for 200"):
      train[index]


def test_a_parts_order_does_not_depend_on_the_others(folder):
  parts = {"words": _part(folder, "gsm8k")}
  alone = tasks.mixture(parts=parts, weights={"words": 1}, size=20, seed=0)
  beside = tasks.mixture(parts={"sums": SUMS} | parts, weights={"words": 2, "sums": 1}, seed=0)
  first = [beside.train[index].question for index in range(40)]
  words = [question for question in first if question.startswith("G")]
  assert words[:20] == _all_questions(alone.train)
  renamed = tasks.mixture(parts={"w": parts["words"]}, weights={"w": 1}, size=20, seed=0)
  assert _all_questions(renamed.train) != words[:20]


def test_size_0_goes_through_each_part(folder):
  task = _mixture(folder, size=0)
  assert len(task.train) == 200  # 40 sums at a share of 0.2
  questions = {task.train[index].question for index in range(200)}
  assert {f"M{n}" for n in range(30)} < questions and {"G0", "G9"} < questions


def test_nothing_held_out_by_any_part_is_trained_on_by_another(folder):
  parts = {"words": _part(folder, "gsm8k", warm_start_size=4),
           "contest": _part(folder, "math", prompt="Solve: {question}")}  # fmt: skip
  task = _mixture(folder, parts=parts, weights={"words": 1, "contest": 1}, size=40)
  assert "Solve: G3" in [problem.question for problem in _all(task.held_out)]
  assert "G3" not in [problem.question for problem in _all(task.train)]
  assert [problem.question for problem in _all(task.warm_start)] == ["G0", "G1", "G2"]


def test_a_part_that_is_generated_keeps_clear_of_the_others_held_out(folder):
  other = {"name": "reasoning_gym", "kwargs": SUMS["kwargs"] | {"held_out_seed": 400,
           "held_out_size": 60, "warm_start_seed": 900, "train_seed": 700}}  # fmt: skip
  task = tasks.mixture(parts={"a": SUMS, "b": other}, weights={"a": 1, "b": 1}, seed=0)
  held_out = {question_key(problem.question) for problem in _all(task.held_out)}
  assert len(task.held_out) == 63
  assert not held_out & {question_key(problem.question) for problem in _all(task.train)}
  assert not held_out & {question_key(problem.question) for problem in _all(task.warm_start)}


def test_held_out_problems_follow_one_another_and_name_their_graders(folder):
  task = _mixture(folder)
  assert (task.name, len(task.held_out)) == ("words+contest+sums", 8)
  references = [problem.reference for problem in _all(task.held_out)]
  names = [problem.own_reference["dataset"] for problem in _all(task.held_out)]
  assert names == ["gsm8k"] * 3 + ["math"] * 2 + ["chain_sum"] * 3
  assert task.grader == "by_reference"
  assert references[0]["grader"] == "gsm8k"
  assert references[3]["reference"] == {"answer": "3", "dataset": "math"}
  assert references[7]["grader"] == "reasoning_gym"
  assert references[7]["reference"]["metadata"]
  assert [p.own_reference["dataset"] for p in _all(task.warm_start)] == ["chain_sum"] * 2
  json.dumps(references)


def test_one_grader_for_all_parts_stays_as_it_is(folder):
  parts = {"easy": _part(folder, "math"), "again": _part(folder, "math")}
  task = _mixture(folder, parts=parts, weights={"easy": 1, "again": 1})
  assert task.grader == "mathematics"
  assert task.held_out[1].reference == {"answer": "101", "dataset": "math"}


def test_a_part_that_names_graders_is_not_wrapped_twice(folder):
  parts = {"words": _part(folder, "gsm8k", held_out_dataset="math",
                          held_out_data_dir=folder / "math"), "sums": SUMS}  # fmt: skip
  task = _mixture(folder, parts=parts, weights={"words": 1, "sums": 1})
  assert task.held_out[0].reference == {
    "grader": "mathematics",
    "reference": {"answer": "3", "dataset": "math"},
  }


def test_changes_of_a_source_add_up():
  double = lambda p: dataclasses.replace(p, answer=p.answer * 2)
  mark = lambda p: dataclasses.replace(p, answer=p.answer + "!")
  task = tasks.reasoning_gym(**SUMS["kwargs"])
  for source in (task.train, task.held_out):
    assert source.map(double).map(mark)[1].answer == source[1].answer * 2 + "!"


def test_concatenated_with_empty_sources():
  joined = Concatenated([(), ("a", "b"), (), ("c",)])
  assert [joined[index] for index in range(len(joined))] == ["a", "b", "c"]


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    (
      {"weights": {"words": 1}},
      r"weights has the labels \['words'\], and parts has the labels \['contest', 's",
    ),
    ({"parts": {}, "weights": {}}, r"at least one, but weights has the labels \[\]"),
    ({"weights": {"words": 1, "contest": 0, "sums": 1}}, r"'contest'\] = 0 is not a number in \(0"),
    (
      {"weights": {"words": 1, "contest": float("nan"), "sums": 1}},
      r"mixture: .*'contest'\] = nan",
    ),
    ({"size": -1}, "size = -1"),
    (
      {"parts": {"a": {"name": "mixture", "kwargs": {}}}, "weights": {"a": 1}},
      "'a' of the mixture is .*name and kwargs, and a name other than mixture, curriculum, guess",
    ),
    (
      {"parts": {"a": {"name": "published", "kwargs": {"dataset": "x"}}}, "weights": {"a": 1}},
      "part 'a' of the mixture: published needs a value of data_dir",
    ),
    (
      {"parts": {"a": {"name": "publish", "kwargs": {}}}, "weights": {"a": 1}},
      r"part 'a' of the mixture: 'publish' is unknown; did you mean 'published'",
    ),
    (
      {"parts": {"a": {"name": "published", "kwargs": {"data": "x"}}}, "weights": {"a": 1}},
      r"published takes no 'data'; did you mean one of \['dataset', 'data_dir'",
    ),
    (
      {"parts": {"a": {"name": f"{__name__}:listed", "kwargs": {}}}, "weights": {"a": 1}},
      "a source of .*listed is neither a Chosen nor a Generated; make it one of",
    ),
    ({"parts": {"a": {"name": "published"}}, "weights": {"a": 1}}, "the keys name and kwargs"),
  ],
)
def test_bad_arguments(folder, kwargs, message):
  with pytest.raises(ValueError, match=message):
    _mixture(folder, **kwargs)


def test_a_part_with_nothing_to_train_on(folder):
  parts = {"a": _part(folder, "gsm8k"), "b": _part(folder, "math", split="")}
  with pytest.raises(ValueError, match="part 'b' of the mixture has no problem to train on"):
    _mixture(folder, parts=parts, weights={"a": 1, "b": 1})


def test_a_mixture_warns_of_a_common_answer(folder, caplog):
  with caplog.at_level(logging.WARNING):
    _mixture(folder)
  assert "task words+contest+sums: one answer is right for" in caplog.text
