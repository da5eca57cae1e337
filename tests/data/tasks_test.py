"""Tasks by name: what they hold, and what they refuse."""

import json
import logging
import os
import pathlib
import random
import re
import subprocess
import sys

import pytest

from rlvr_jax.data import Task, tasks
from rlvr_jax.rewards import Outcome, graders

SIZES = {"train_size": 500, "warm_start_size": 50, "held_out_size": 60}
SEEDS = {"train_seed": 1, "warm_start_seed": 2, "held_out_seed": 3}
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 questions


def _reasoning_gym(dataset="chain_sum", **kwargs):
  return tasks.reasoning_gym(**({"dataset": dataset} | SIZES | SEEDS | kwargs))


def _questions(source):
  return [source[index].question for index in range(len(source))]


def test_no_held_out_question_is_trained_on():
  """Seeds 1, 2, 3 alone would not do: reasoning-gym's problem i of seed s is i - 1 of s + 1."""
  task = _reasoning_gym(settings=SMALL)
  held_out = _questions(task.held_out)
  assert len(set(held_out)) == len(held_out) == 60
  assert len(set(_questions(task.warm_start))) == 50
  assert len(task.train) == 500
  assert not set(held_out) & set(_questions(task.train) + _questions(task.warm_start))


def test_a_colliding_draw_is_replaced_by_the_next_of_its_series():
  from reasoning_gym.factory import create_dataset  # a second, which few tests need

  task = _reasoning_gym(settings=SMALL)
  draws = create_dataset("chain_sum", **SMALL, seed=1, size=500)
  held_out = set(_questions(task.held_out))
  replaced = 0
  for index in range(500):
    series = [draws[index + k * 500]["question"] for k in range(20)]
    free = [question for question in series if question not in held_out]
    assert task.train[index].question == free[0]
    replaced += series[0] in held_out
  assert replaced > 50


def test_problems_are_the_same_every_time_and_in_any_order():
  first, second = _reasoning_gym(settings=SMALL), _reasoning_gym(settings=SMALL)
  order = random.Random(0).sample(range(500), 500)
  shuffled = {index: second.train[index] for index in order}
  assert [first.train[index] for index in range(500)] == [shuffled[i] for i in range(500)]
  assert list(first.held_out) == list(second.held_out)
  assert list(first.warm_start) == list(second.warm_start)


def test_exhausted_space_is_an_error():
  with pytest.raises(ValueError, match=r"no question left.*Lower the sizes or widen the settings"):
    _reasoning_gym(settings=SMALL, held_out_size=201)
  everything = _reasoning_gym(settings=SMALL, held_out_size=200, warm_start_size=0)
  with pytest.raises(ValueError, match=r"no question left.*200 are taken"):
    everything.train[0]


def test_templates():
  task = _reasoning_gym(prompt="{expression}=", solution="It is {answer}: {question}")
  problem = task.train[0]
  terms = problem.reference["metadata"]["expression"]
  assert problem.question == f"{terms}="
  assert problem.solution.startswith(f"It is {problem.answer}: State the final answer")
  assert eval(terms) == int(problem.answer)  # an expression of the dataset, digits and signs
  assert (
    _reasoning_gym(solution="steps")
    .warm_start[0]
    .solution.endswith(f"#### {_reasoning_gym().warm_start[0].answer}")
  )


@pytest.mark.parametrize(
  "dataset", ["chain_sum", "spell_backward", "letter_counting", "number_sorting", "gcd", "maze"]
)
def test_solutions_are_graded_correct_after_json(dataset):
  task = _reasoning_gym(dataset, solution="#### {answer}", train_size=20, warm_start_size=5)
  for problem in [*task.held_out, *task.warm_start, *(task.train[i] for i in range(20))]:
    reference = json.loads(json.dumps(problem.reference))
    assert graders.reasoning_gym(problem.solution, reference).outcome is Outcome.CORRECT
    wrong = graders.reasoning_gym("#### no answer", reference)
    assert wrong.outcome is Outcome.WRONG


def test_a_dataset_for_which_one_answer_is_right_is_warned_of(caplog):
  with caplog.at_level(logging.WARNING):
    _reasoning_gym("gcd", solution="{answer}")
    assert "accepts one answer" not in caplog.text
    _reasoning_gym("puzzle24", train_size=9, held_out_size=3, warm_start_size=0)
  assert "'puzzle24': its own program accepts one answer for every problem" in caplog.text


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    (
      {"dataset": "chainsum"},
      "unknown reasoning_gym dataset 'chainsum'; similar names: .'chain_sum'",
    ),
    ({"settings": {"max_term": 3}}, "no setting 'max_term'; similar names: .'max_terms'"),
    ({"settings": {"seed": 3}}, "settings has 'seed', but each phase has its own: set train_seed"),
    ({"settings": {"min_terms": 5, "max_terms": 2}}, "rejects settings .*max_terms must be >="),
    ({"held_out_seed": 1}, "held_out_seed is 1, train_seed 1 .*must differ"),
    ({"warm_start_size": -1}, "warm_start_size = -1"),
    ({"prompt": "{qestion}"}, "no field 'qestion', only .*; did you mean 'question'"),
    ({"solution": "{"}, "solution is '{', a template"),
    ({"dataset": "maze", "solution": "steps"}, "'maze' has no step-by-step.*chain_sum"),
    ({"dataset": "rush_hour"}, "'rush_hour' gives no answers.*warm_start_size to 0"),
  ],
)
def test_bad_arguments(kwargs, message):
  with pytest.raises(ValueError, match=message):
    _reasoning_gym(**kwargs)


def test_datasets_that_depend_on_the_hash_seed(monkeypatch):
  monkeypatch.delenv("PYTHONHASHSEED", raising=False)
  with pytest.raises(ValueError, match="set PYTHONHASHSEED=0"):
    _reasoning_gym("ransom_note")


def test_dataset_without_answers_can_be_trained_on_without_warm_start():
  task = _reasoning_gym("rush_hour", warm_start_size=0, held_out_size=5)
  assert (task.held_out[0].answer, task.held_out[0].solution) == ("", "")


def test_most_common_answer_share(caplog):
  with caplog.at_level(logging.WARNING):
    task = _reasoning_gym("gcd")
  answers = [problem.answer for problem in task.held_out]
  share = max(answers.count(answer) for answer in answers) / 60
  assert task.most_common_answer_share() == share > 0.1
  assert "one answer is right for" in caplog.text


# ---- published data sets


def _gsm8k_rows(numbers):
  return [
    {
      "question": f"Ann’s {i} hens lay 2 eggs each. How many?",
      "answer": f"She has {i}*2=<<{i}*2={2 * i}>>{2 * i} eggs.\n#### {2 * i:,}",
    }
    for i in numbers
  ]


def _write(folder, **splits):
  for split, rows in splits.items():
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return folder


def _published(source, **kwargs) -> Task:
  settings = {"dataset": "gsm8k", "data_dir": source, "prepared_dir": source.parent / "prepared"}
  return tasks.published(**(settings | kwargs))


def _all(source):
  return [source[index] for index in range(len(source))]


@pytest.fixture(name="source")
def _source(tmp_path, few_buckets):
  folder = tmp_path / "source"
  folder.mkdir()
  return _write(folder, train=_gsm8k_rows(range(20)), test=_gsm8k_rows(range(10_000, 10_008)))


@pytest.fixture(name="math")
def _math(tmp_path, few_buckets):
  """Levels 1 to 5 and one unknown; every other one has a solution of its own."""
  folder = tmp_path / "math"
  folder.mkdir()
  rows = [
    {
      "problem": f"Problem {n}{'!' * 10 * n}", "level": f"Level {n or '?'}", "answer": str(n),
      "solution": f"\\boxed{{{n}}}" if n % 2 else "", "type": "Algebra",
    }
    for n in range(6)
  ]  # fmt: skip
  return _write(folder, train=rows, test=[row | {"problem": "T" + row["problem"]} for row in rows])


def test_published(source):
  task = _published(source, warm_start_size=5, held_out_size=6)
  assert "tensorflow_datasets" in sys.modules and "tensorflow" not in sys.modules
  assert (len(task.warm_start), len(task.train), len(task.held_out)) == (5, 15, 6)
  problem = task.held_out[1]
  assert problem.question == "Ann’s 10001 hens lay 2 eggs each. How many?\n"
  assert problem.solution == "She has 10001*2=20002 eggs.\n#### 20,002"
  assert problem.answer == "20,002"
  assert problem.reference == {"answer": "20,002", "dataset": "gsm8k"}
  assert (task.name, task.grader) == ("gsm8k", "gsm8k")
  # The order is the published one, the second time (from the prepared records) as the first.
  problems = _all(task.warm_start) + _all(task.train)
  assert [int(problem.question.split()[1]) for problem in problems] == list(range(20))
  again = _published(source, warm_start_size=5, held_out_size=6)
  assert _all(again.warm_start) + _all(again.train) == problems
  for index in (-1, 15):
    with pytest.raises(IndexError, match="out of range for 15"):
      task.train[index]


def test_published_leaves_out_held_out_questions(source, caplog):
  taken = _gsm8k_rows([10_002])[0]
  taken["question"] = taken["question"].replace(" ", "  ")  # but for white space
  _write(source, train=[taken, *_gsm8k_rows(range(20))])
  with caplog.at_level(logging.INFO):
    task = _published(source, warm_start_size=5)
  assert "gsm8k/train: 20 of 21 problems; not 1 held out" in caplog.text
  assert len(task.train) + len(task.warm_start) == 20
  questions = {" ".join(q.split()) for q in _questions(task.train) + _questions(task.warm_start)}
  assert not questions & {" ".join(q.split()) for q in _questions(task.held_out)}


def test_published_of_one_split_held_out_of_anothers_training(math, tmp_path):
  rows = [{"ID": f"2024-I-{n}", "Problem": f"Problem {n}{'!' * 10 * n}", "Answer": n}
          for n in (2, 4, 7)]  # fmt: skip
  aime = tmp_path / "aime"
  aime.mkdir()
  held_out = {"held_out_dataset": "aime_2024", "held_out_data_dir": _write(aime, test=rows)}
  task = _published(math, dataset="math", **held_out)
  assert [p.answer for p in _all(task.train)] == ["0", "1", "3", "5"]
  assert [p.reference for p in _all(task.held_out)] == [
    {"answer": answer, "dataset": "aime_2024"} for answer in ("2", "4", "7")
  ]
  assert task.grader == "mathematics"
  assert task.train[0].question.endswith("put your final answer within \\boxed{}.")


def test_published_names_the_grader_where_the_held_out_one_differs(source, math):
  task = _published(source, held_out_dataset="math", held_out_data_dir=math)
  assert task.grader == "by_reference"
  assert task.train[0].reference == {
    "grader": "gsm8k",
    "reference": {"answer": "0", "dataset": "gsm8k"},
  }
  assert task.held_out[1].reference["grader"] == "mathematics"
  own = _published(source, held_out_dataset="math", held_out_data_dir=math, grader="a.b:c")
  assert (own.grader, own.train[0].reference["answer"]) == ("a.b:c", "0")


def test_published_held_out_problems_alone(math):
  task = _published(math, dataset="math", split="")
  assert (len(task.train), len(task.warm_start), len(task.held_out)) == (0, 0, 6)


def test_published_filters(math, caplog):
  with caplog.at_level(logging.INFO):
    task = _published(
      math, dataset="math", min_difficulty=2, max_difficulty=4, max_question_characters=40
    )
  assert "2 of 6 problems; not 3 with a difficulty unknown or outside [2, 4]" in caplog.text
  assert ", 2 of more than 40 characters" in caplog.text
  assert [p.answer for p in _all(task.train)] == ["2", "3"]
  assert len(task.held_out) == 6  # held-out sets stay comparable
  assert len(_published(math, dataset="math").train) == 6
  with pytest.raises(ValueError, match=r"none of the 6 problems of math/train.*6 with a diff"):
    _published(math, dataset="math", min_difficulty=6.0)


def test_published_warm_start_takes_problems_with_solutions(math):
  task = _published(math, dataset="math", warm_start_size=2)
  assert [p.answer for p in _all(task.warm_start)] == ["1", "3"]
  assert [p.answer for p in _all(task.train)] == ["0", "2", "4", "5"]
  with pytest.raises(ValueError, match="warm_start_size = 4, but only 3 problems are available"):
    _published(math, dataset="math", warm_start_size=4)


def test_published_prompt_templates(source, math):
  task = _published(math, dataset="math", prompt="{subject} {difficulty} {id}: {question}")
  assert task.train[1].question == "Algebra 1 train/2: Problem 1" + "!" * 10
  assert _published(source, prompt="{interface}{question}").train[0].question.startswith("Ann")


def test_published_programs(tmp_path):
  row = {"text": "Write f.", "code": "def f(): return 1", "test_list": ["assert f() == 1"]}
  (tmp_path / "source").mkdir()
  source = _write(tmp_path / "source", mbpp=[row | {"task_id": 11}, row | {"task_id": 601}])
  with pytest.raises(ValueError, match=r"none of the 1 problems of mbpp/train.*1 held out"):
    _published(source, dataset="mbpp")  # one question twice
  _write(source, mbpp=[row | {"task_id": 11}, row | {"task_id": 601, "text": "Write f now."}])
  task = _published(source, dataset="mbpp")
  assert task.grader == "code"
  assert "Write f now.\n\nYour code should pass these tests:\n\nassert f() == 1\n" in (
    task.train[0].question
  )
  assert task.most_common_answer_share() == 0  # none is named
  fraction = _published(source, dataset="mbpp", grader="code(reward='fraction')")
  assert fraction.grader == "code(reward='fraction')"


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"held_out_size": 9}, "held_out_size = 9, but only 8 problems are available"),
    ({"held_out_size": -1}, "held_out_size = -1 is not an integer ≥ 0"),
    ({"warm_start_size": 20}, "warm_start_size = 20, but only 19 problems are available"),
    ({"warm_start_size": -1}, "warm_start_size = -1"),
    ({"max_question_characters": -1}, "max_question_characters = -1"),
    ({"split": "", "warm_start_size": 1}, 'warm_start_size is given but split is ""'),
    ({"split": "test"}, "split and held_out_split are both 'test' of gsm8k: nothing would be left"),
    ({"split": "validation"}, r"gsm8k has no split 'validation' .*only \['test', 'train'\]"),
    ({"prepared_dir": "gs://bucket/p"}, "prepared_dir = 'gs://bucket/p' is a URL"),
    (
      {"prompt": "{answer}"},
      r"'{answer}', but there is no field 'answer', only .'difficulty', 'id', .*'question'",
    ),
  ],
)
def test_published_bad_arguments(source, kwargs, message):
  with pytest.raises(ValueError, match=message):
    _published(source, **kwargs)


def test_reasoning_gym_is_an_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as where it is not installed
  monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
  graders._load_reasoning_gym_scorer.cache_clear()
  for kind, call in (("task", _reasoning_gym), ("grader", graders.reasoning_gym_self_test)):
    told = rf'the {kind} reasoning_gym needs .*: pip install "rlvr_jax\[reasoning-gym\]"$'
    with pytest.raises(ImportError, match=told):
      call()


def test_sums_hold_numbers_out():
  task = tasks.sums()
  train, held_out = list(task.train), list(task.held_out)
  assert (len(train), len(held_out)) == (1365, 155)  # as experiments/pretrained has it
  of = lambda problems: {n for p in problems for n in re.findall(r"\d+", p.question)}
  assert not of(train) & of(held_out) and len(of(held_out)) == 10
  for problem in train + held_out:
    a, sign, b = re.fullmatch(r"What is (\d+) ([+-]) (\d+)\?", problem.question).groups()
    assert int(problem.answer) == int(a) + (int(b) if sign == "+" else -int(b)) >= 0
  with pytest.raises(ValueError, match="sums: held_out_numbers"):
    tasks.sums(largest=3, held_out_numbers=3)


def test_tasks_do_not_import_tensorflow_datasets_before_they_need_it():
  script = "import sys, rlvr_jax.data.tasks; assert 'tensorflow_datasets' not in sys.modules"
  root = pathlib.Path(__file__).parent.parent.parent
  environment = os.environ | {"PYTHONPATH": str(root)}
  subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=300)


# ---- the published files themselves

shared = pytest.mark.skipif("RLVR_SHARED" not in os.environ, reason="RLVR_SHARED is not set")


@pytest.fixture(name="as_published", scope="module")
def _as_published(tmp_path_factory):
  """The task of a published data set; prepared records are shared by the tests here."""
  data = pathlib.Path(os.environ["RLVR_SHARED"]) / "data"
  prepared = tmp_path_factory.mktemp("prepared")
  return lambda name, **kwargs: tasks.published(
    dataset=name, data_dir=data / name, prepared_dir=prepared, **kwargs
  )


@pytest.mark.slow
@shared
def test_gsm8k_as_published(as_published):
  task = as_published("gsm8k", warm_start_size=100)
  assert (len(task.warm_start), len(task.train), len(task.held_out)) == (100, 7373, 1319)
  trained = _all(task.warm_start) + _all(task.train)
  held_out = _all(task.held_out)
  assert not {problem.question for problem in trained} & {problem.question for problem in held_out}
  for problem in trained + held_out:
    assert graders.gsm8k(problem.solution, problem.reference).outcome is Outcome.CORRECT
    steps, answer = problem.solution.rsplit("####", 1)
    perturbed = f"{steps}####{answer.replace(',', '')}1"  # the final number, with a digit more
    assert graders.gsm8k(perturbed, problem.reference).outcome is Outcome.WRONG
    assert "<<" not in problem.solution
  assert trained[0].solution.endswith("clips altogether in April and May.\n#### 72")


@pytest.mark.slow
@shared
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_mbpp_as_published(as_published):
  sizes = {"prompt": 10, "test": 500, "validation": 90, "train": 374}
  tasks_of = {split: as_published("mbpp", split="", held_out_split=split) for split in sizes}
  assert {split: len(task.held_out) for split, task in tasks_of.items()} == sizes
  train = as_published("mbpp").train
  test_questions = {p.question.partition("\n\n")[0] for p in _all(tasks_of["test"].held_out)}
  assert not test_questions & {p.question.partition("\n\n")[0] for p in _all(train)}
  assert 350 < len(train) < 374  # some questions stand in both splits, with other tests
  for task in tasks_of.values():
    for problem in _all(task.held_out):
      reference = json.loads(json.dumps(problem.reference))
      assert reference["style"] == "asserts" and len(reference["tests"]) == 3
      code = problem.solution.removeprefix("```python\n").removesuffix("\n```")
      compile(code, "solution", "exec")
  first = tasks_of["prompt"].held_out[0]
  assert "minimum cost path" in first.question and "def min_cost" in first.solution


@shared
def test_humaneval_as_published(as_published):
  held_out = _all(as_published("humaneval", split="").held_out)
  assert len(held_out) == 164
  for problem in held_out:
    assert problem.reference["prompt"] in problem.question
    code = problem.solution.removeprefix("```python\n").removesuffix("\n```")
    compile(code + "\n" + problem.reference["test"], "solution", "exec")
  assert held_out[0].reference["entry_point"] == "has_close_elements"
