"""Tasks by name: what they hold, and what they refuse."""

import json
import logging
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest
from reasoning_gym.factory import create_dataset

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


def test_seeds_decide_each_set_by_itself():
  base, other = _reasoning_gym(), _reasoning_gym(train_seed=1001)
  assert list(base.held_out) == list(other.held_out)
  assert list(base.warm_start) == list(other.warm_start)
  assert _questions(base.train) != _questions(other.train)


def test_exhausted_space_is_an_error():
  with pytest.raises(ValueError, match=r"no question left.*Lower the sizes or widen the settings"):
    _reasoning_gym(settings=SMALL, held_out_size=201)
  everything = _reasoning_gym(settings=SMALL, held_out_size=200, warm_start_size=0)
  with pytest.raises(ValueError, match=r"no question left.*200 are taken"):
    everything.train[0]


def test_train_source_bounds():
  train = _reasoning_gym().train
  for index in (-1, 500):
    with pytest.raises(IndexError, match="out of range for 500"):
      train[index]


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


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"dataset": "chainsum"}, "unknown reasoning_gym dataset 'chainsum'; near names: .'chain_sum'"),
    ({"settings": {"max_term": 3}}, "no setting 'max_term'; near names: .'max_terms'"),
    ({"settings": {"seed": 3}}, "settings has 'seed': give it by train_seed"),
    ({"settings": {"min_terms": 5, "max_terms": 2}}, "refuses settings .*max_terms must be >="),
    ({"held_out_seed": 1}, "held_out_seed is 1, train_seed 1 .*must differ"),
    ({"held_out_seed": 2}, "held_out_seed is 2.*warm_start_seed 2"),
    ({"train_size": 0}, "train_size is 0, must be at least 1"),
    ({"held_out_size": 0}, "held_out_size is 0"),
    ({"warm_start_size": -1}, "warm_start_size is -1"),
    ({"prompt": "{qestion}"}, "prompt is '{qestion}', a template whose fields may be .*'question'"),
    ({"prompt": "{answer}"}, "prompt is '{answer}'"),
    ({"solution": "{"}, "solution is '{', a template"),
    ({"dataset": "maze", "solution": "steps"}, "'maze' has no step-by-step.*chain_sum"),
    ({"dataset": "rush_hour"}, "'rush_hour' gives no answers.*warm_start_size to 0"),
    ({"dataset": "arc_agi"}, "'arc_agi' cannot be graded in another process"),
  ],
)
def test_bad_arguments(kwargs, message):
  with pytest.raises(ValueError, match=message):
    _reasoning_gym(**kwargs)


def test_datasets_that_depend_on_the_hash_seed(monkeypatch):
  monkeypatch.delenv("PYTHONHASHSEED", raising=False)
  with pytest.raises(ValueError, match="start with PYTHONHASHSEED=0"):
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


# ---- GSM8K


def _write_gsm8k(folder, train=20, test=8):
  for split, size, offset in (("train", train, 0), ("test", test, 10_000)):
    rows = [
      {
        "question": f"Ann’s {i} hens lay 2 eggs each. How many?",
        "answer": f"She has {i}*2=<<{i}*2={2 * i}>>{2 * i} eggs.\n#### {2 * i:,}",
      }
      for i in range(offset, offset + size)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{split}.jsonl").write_text(lines)
  return folder


def _gsm8k(source, prepared, **kwargs) -> Task:
  sizes = {"warm_start_size": 5, "held_out_size": 6}
  return tasks.gsm8k(data_dir=source, prepared_dir=prepared, **(sizes | kwargs))


@pytest.fixture(name="source")
def _source(tmp_path):
  folder = tmp_path / "source"
  folder.mkdir()
  return _write_gsm8k(folder)


def test_gsm8k(source, tmp_path):
  task = _gsm8k(source, tmp_path / "prepared")
  assert (len(task.warm_start), len(task.train), len(task.held_out)) == (5, 15, 6)
  problem = task.held_out[1]
  assert problem.question == "Ann’s 10001 hens lay 2 eggs each. How many?\n"
  assert problem.solution == "She has 10001*2=20002 eggs.\n#### 20,002"
  assert (problem.answer, problem.reference) == ("20,002", {"answer": "20,002"})
  # The order is the published one, the second time (from the prepared records) as the first.
  numbers = [int(p.question.split()[1]) for p in (*task.warm_start, *task.train)]
  assert numbers == list(range(20))
  assert _gsm8k(source, tmp_path / "prepared") == task


def test_gsm8k_leaves_out_held_out_questions(source, tmp_path):
  train, test = source / "train.jsonl", source / "test.jsonl"
  train.write_text(test.read_text().splitlines()[2] + "\n" + train.read_text())
  task = _gsm8k(source, tmp_path / "prepared")
  assert len(task.train) + len(task.warm_start) == 20
  held_out = set(_questions(task.held_out))
  assert not held_out & set(_questions(task.train) + _questions(task.warm_start))


def test_gsm8k_prepares_anew_when_the_source_changes(source, tmp_path):
  _gsm8k(source, tmp_path / "prepared")
  _write_gsm8k(source, train=30)
  assert len(_gsm8k(source, tmp_path / "prepared").train) == 25


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_gsm8k_damaged_prepared_records(source, tmp_path, damage):
  _gsm8k(source, tmp_path / "prepared")
  (records,) = (tmp_path / "prepared").rglob("*train.array_record*")
  records.unlink() if damage == "remove" else os.truncate(records, 40_000)
  with pytest.raises(ValueError, match=r"prepared GSM8K records in .* are damaged.*delete that"):
    _gsm8k(source, tmp_path / "prepared")


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b'{"question": "How ma', r"train.jsonl, line 21 is torn or not JSON .*'{\"question\": \"How"),
    (b"\xff\xfe", "line 21 is torn or not JSON"),
    (b"[1]", "line 21 is not a JSON object"),
    (b'{"question": "q"}', "line 21 has answer = None, expected a text"),
    (b'{"question": "q", "answer": "no mark"}', "line 21 has an answer ending in 'no mark'"),
  ],
)
def test_gsm8k_bad_line(source, tmp_path, line, message):
  path = source / "train.jsonl"
  path.write_bytes(path.read_bytes() + line)
  with pytest.raises(ValueError, match=message):
    _gsm8k(source, tmp_path / "prepared")


def test_gsm8k_missing_or_empty_file(source, tmp_path):
  (source / "test.jsonl").write_text("")
  with pytest.raises(ValueError, match=r"test.jsonl is empty"):
    _gsm8k(source, tmp_path / "prepared")
  (source / "test.jsonl").unlink()
  with pytest.raises(FileNotFoundError, match=r"to hold train.jsonl and test.jsonl.*test.jsonl'"):
    _gsm8k(source, tmp_path / "prepared")
  (source / "test.jsonl").mkdir()
  with pytest.raises(IsADirectoryError, match="cannot read the GSM8K file"):
    _gsm8k(source, tmp_path / "prepared")


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"held_out_size": 9}, "held_out_size is 9, but there are only 8"),
    ({"warm_start_size": 20}, "warm_start_size is 20, but there are only 19"),
    ({"prompt": "{answer}"}, "prompt is '{answer}', a template whose fields may be .'question'"),
  ],
)
def test_gsm8k_bad_arguments(source, tmp_path, kwargs, message):
  with pytest.raises(ValueError, match=message):
    _gsm8k(source, tmp_path / "prepared", **kwargs)


def test_gsm8k_does_not_import_tensorflow(source, tmp_path):
  script = (
    "import sys\nfrom rlvr_jax.data import tasks\n"
    f"tasks.gsm8k(data_dir={str(source)!r}, prepared_dir={str(tmp_path / 'prepared')!r}, "
    "warm_start_size=1, held_out_size=1)\n"
    "assert 'tensorflow_datasets' in sys.modules and 'tensorflow' not in sys.modules\n"
  )
  root = pathlib.Path(__file__).parent.parent.parent
  environment = os.environ | {"PYTHONPATH": str(root)}
  subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=60)


@pytest.mark.skipif("RLVR_SHARED" not in os.environ, reason="RLVR_SHARED is not set")
def test_gsm8k_as_published(tmp_path):
  source = pathlib.Path(os.environ["RLVR_SHARED"]) / "data" / "gsm8k"
  task = _gsm8k(source, tmp_path, warm_start_size=100, held_out_size=1319)
  problems = [*task.warm_start, *task.train, *task.held_out]
  assert len(problems) == 8792
  for problem in problems:
    assert graders.gsm8k(problem.solution, problem.reference).outcome is Outcome.CORRECT
    perturbed = problem.solution + "1"  # the final number, with a digit more
    assert graders.gsm8k(perturbed, problem.reference).outcome is Outcome.WRONG
    assert "<<" not in problem.solution
  assert task.warm_start[0].solution.endswith("clips altogether in April and May.\n#### 72")
  shutil.rmtree(tmp_path)
