"""The task of one's own lines: what is read, what is held out, and what is refused."""

import datetime
import decimal
import functools
import gzip
import json
import logging
import re

import pyarrow
import pytest
from pyarrow import parquet
from train import tiny

from rlvr_jax.commands.check import Preflight
from rlvr_jax.data import HuggingFaceTokenizer, encode_prompts, tasks
from rlvr_jax.data.byte_pairs import save, train_byte_pairs
from rlvr_jax.rewards import graders
from rlvr_jax.train.setup.build import make_task
from rlvr_jax.train.setup.grading import used_graders, with_graders

LINES = [
  {"prompt": f"{a}+{b}=", "answer": a + b, "Level": a, "steps": f"{a}+{b}={a + b}"}
  for a in range(5)
  for b in range(4)
]


@pytest.fixture(name="write")
def _write(tmp_path):
  def write(lines, name="mine.jsonl"):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)

  return write


def questions(source):
  return [source[index].question for index in range(len(source))]


def test_a_line_is_a_problem_whose_reference_has_all_its_fields(write):
  task = tasks.jsonl(train=write(LINES, "mine.jsonl.gz"), held_out_size=5, grader="gsm8k")
  assert (len(task.train), len(task.held_out), len(task.warm_start)) == (15, 5, 0)
  problem = task.train[0]
  line = next(line for line in LINES if line["prompt"] == problem.question)
  assert problem.reference == line
  assert (problem.answer, problem.solution) == (str(line["answer"]), "")
  assert questions(task.train) == [
    q["prompt"] for q in LINES if q["prompt"] in questions(task.train)
  ]
  assert not set(questions(task.train)) & set(questions(task.held_out))


def test_fields_by_name_and_templates(write):
  lines = [{"q": f"{n} squared", "gold": str(n * n), "s": f"{n}*{n}"} for n in range(6)]
  task = tasks.jsonl(
    train=write(lines), held_out_size=2, grader="gsm8k", prompt="Q: {q}\nA:", answer="gold",
    solution="{s} #### {gold}", warm_start_size=1,
  )  # fmt: skip
  shown = task.warm_start[0]
  number = int(shown.question.split()[1])
  assert shown.question == f"Q: {number} squared\nA:"
  assert shown.solution == f"{number}*{number} #### {number**2}"
  assert graders.gsm8k(shown.solution, shown.reference).outcome.value == "correct"
  assert (len(task.train), len(task.held_out)) == (3, 2)


VERL = {
  "data_source": "openai/gsm8k",
  "prompt": [
    {"content": "Be brief.", "role": "system"},
    {"content": "What is 2+3?\n", "role": "user", "tool_calls": None},
  ],
  "ability": "math",
  "reward_model": {"ground_truth": "5", "style": "rule"},
  "extra_info": {"index": 0, "steps": ["2+3=5", "#### 5"]},
}
TRL = {
  "prompt": [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"},
  ],
  "ground_truth": 6,
}
CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_files_of_verl_and_trl_are_read_unchanged(write, tmp_path):
  """Messages are a prompt, which the chat template gets as they are; a dot leads into a field."""
  held_out = write([{**VERL, "prompt": "1?"}], "held_out.jsonl")
  parquet.write_table(pyarrow.Table.from_pylist([VERL]), tmp_path / "train.parquet")
  verl = tasks.jsonl(
    train=tmp_path / "train.parquet", held_out=held_out, grader="gsm8k",
    answer="reward_model.ground_truth", solution="{extra_info.steps.0}\n{extra_info[steps][1]}",
  ).train[0]  # fmt: skip
  assert (verl.question, verl.answer) == ("Be brief.\nWhat is 2+3?\n", "5")
  assert (verl.solution, verl.reference["extra_info"]["index"]) == ("2+3=5\n#### 5", 0)
  assert graders.gsm8k("#### 5", verl.reference).outcome.value == "correct"
  trl = tasks.jsonl(
    train=write([TRL]), held_out=write([{"prompt": "1?", "ground_truth": 1}], "test.jsonl"),
    grader="gsm8k", answer="ground_truth",
  ).train[0]  # fmt: skip
  save(train_byte_pairs(["one and two are three"] * 9, vocab_size=264), tmp_path / "model")
  (tmp_path / "model" / "chat_template.jinja").write_text(CHATML)
  tokenizer = HuggingFaceTokenizer(tmp_path / "model", prompt_format="chat")
  prompts = encode_prompts([verl, trl], tokenizer, 200)
  shown = [
    tokenizer.decode(row[-length:].tolist(), with_special=True)
    for row, length in zip(prompts.tokens, prompts.lengths, strict=True)
  ]
  turn = lambda role, text: f"<|im_start|>{role}\n{text}<|im_end|>\n"
  start = "<|im_start|>assistant\n"
  assert shown == [
    turn("system", "Be brief.") + turn("user", "What is 2+3?\n") + start,
    turn("user", "2+2?") + turn("assistant", "4") + turn("user", "And 3+3?") + start,
  ]
  as_text = tokenizer.encode_prompt("2+2?\n")  # where a template of texts ended in a new line
  assert as_text == tokenizer.encode_messages([{"role": "user", "content": "2+2?"}])


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (dict(prompt=None), r"line 1 does not fit: prompt is '\{prompt\}'.*prompt is None, expected"),
    (dict(prompt={"en": "2?"}), r"line 1 does not fit: .*prompt is \{'en': '2\?'\}, expected"),
    (
      dict(prompt=["2?"]),
      r"line 1 does not fit prompt = .*: a prompt's message is 2\?; a message must be \{",
    ),
    (
      dict(prompt=[{"role": "user"}]),
      r"line 1 does not fit prompt = .*: a prompt's message is \{'role'",
    ),
    (dict(prompt=[{"role": "user", "content": None}]), r"a prompt's message is"),
    (dict(prompt=[{"role": "usr", "content": "2?"}]), r"role\": one of \['system'"),
    (dict(prompt=[{"role": "user", "content": "2?", "name": "I"}]), r"a prompt's message is"),
    (
      dict(prompt=[{"role": "assistant", "content": "2"}]),
      "line 1 .* but the policy writes the assistant's next message",
    ),
    (dict(prompt=[{"role": "user", "content": " "}]), r"line 1 has an empty prompt"),
    (dict(answer=None), r"line 1 does not fit: answer is None, expected a text.*; set answer to"),
    (dict(answer=["4", "5"]), r"line 1 does not fit: answer is \['4', '5'\], expected a text"),
    (dict(answer={"ground_truth": "4"}), r"answer is \{'ground_truth': '4'\}, expected a text"),
    (dict(steps=[1, 2]), r"line 1 does not fit: solution is .*steps is \[1, 2\], expected a text"),
    (dict(prompt="2\ud83d?"), r"line 1 has a lone surrogate, '\\ud83d', at character 2 of the"),
    (dict(answer=float("nan")), r"line 1 does not fit: answer is nan, expected a text"),
    (dict(answer="\ude00"), r"line 1 has a lone surrogate, .* of answer: UTF-8 cannot encode it"),
  ],
)  # fmt: skip
def test_what_is_no_text_is_named_with_its_line(write, line, message):
  with pytest.raises(ValueError, match=message):
    tasks.jsonl(
      train=write([{**LINES[0], **line}, *LINES]),
      grader="gsm8k",
      held_out_size=5,
      solution="{steps}",
    )


def test_no_field_of_a_line_means_anything_to_us(write):
  """Names that graders of parts use, and our own, are the user's; a mixture keeps them, too."""
  odd = {
    "parts": [None, "x"], "grader": "mine", "reference": 3, "dataset": None, "where": 1,
    "messages": "m", "format": "{0}", "weight": [],
  }  # fmt: skip
  lines = [{**LINES[0], **odd, "prompt": f"{n}?"} for n in range(4)]
  parts = {
    grader: dict(name="jsonl", kwargs=dict(train=write(lines), held_out_size=1, grader=grader))
    for grader in ("gsm8k", "mathematics")
  }
  alone = tasks.jsonl(train=write(lines), held_out_size=1, grader="gsm8k")
  mixed = tasks.mixture(parts=parts, weights=dict(gsm8k=1, mathematics=1), seed=0)
  for task, own in ((alone, {"gsm8k"}), (mixed, {"gsm8k", "mathematics"})):
    extra = with_graders(tiny.config(grading__extra=(("boxed", 0.5),)).grading, "", task)
    for changed in (task, extra):
      problem = changed.train[0]
      assert {key: problem.own_reference[key] for key in odd} == odd
    assert set(used_graders(task)) == own
    assert set(used_graders(extra)) >= {"boxed", *own}


def test_columns_that_json_cannot_hold_are_not_read(tmp_path, caplog):
  day = datetime.date(2026, 1, 2)
  rows = [
    {
      **line, "when": datetime.datetime(2026, 1, 2), "day": day, "price": decimal.Decimal("1.5"),
      "image": b"\xff", "nested": [{"day": day}], "kept": [{"a": 1.5}],
    }
    for line in LINES
  ]  # fmt: skip
  parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "mine.parquet")
  mine = functools.partial(
    tasks.jsonl, train=tmp_path / "mine.parquet", held_out_size=5, grader="gsm8k"
  )
  with caplog.at_level(logging.INFO, logger="absl"):
    reference = mine().train[0].reference
  assert json.loads(json.dumps(reference)) == {**reference} and reference["kept"] == [{"a": 1.5}]
  assert set(reference) == {*LINES[0], "kept"}
  assert "when (timestamp[us]), day (date32[day]), price (decimal128(2, 1)), image" in caplog.text
  with pytest.raises(ValueError, match="no field 'price'"):
    mine(answer="price")


def test_json_lines_of_other_endings_are_read_or_named(write, tmp_path, caplog):
  expected = questions(tasks.jsonl(train=write(LINES), held_out_size=5, grader="gsm8k").train)
  for name in ("a.JSONL", "b.ndjson", "c.NDJSON", "d.jsonl.gz", "e.ndjson.gz"):
    task = tasks.jsonl(train=write(LINES, name), held_out_size=5, grader="gsm8k")
    assert questions(task.train) == expected, name
  told = r"no file of problems \(\.jsonl, .*\): found mine\.txt; rename files of JSON lines"
  with pytest.raises(FileNotFoundError, match=told):
    tasks.jsonl(train=write(LINES, "mine.txt"), held_out_size=5, grader="gsm8k")
  (tmp_path / "folder").mkdir()
  write(LINES, "folder/mine.jsonl")
  write(LINES[:3], "folder/more.jsonl.bz2")
  assert len(tasks.jsonl(train=tmp_path / "folder", held_out_size=5, grader="gsm8k").train) == 15
  told = r"some files are not read, .*: found more\.jsonl\.bz2; rename files of JSON lines"
  assert re.search(told, caplog.text)


def test_lines_with_one_prompt_are_told_so(write):
  lines = [{**line, "prompt": "Add."} for line in LINES[:8]]
  told = r"all 8 lines have the same prompt, 'Add\.', so none can be held out; put a field"
  with pytest.raises(ValueError, match=told):
    tasks.jsonl(train=write(lines), held_out_size=1, grader="gsm8k")


def test_what_is_held_out_does_not_depend_on_the_order_of_lines(write):
  held_out = lambda lines, seed=0: questions(
    tasks.jsonl(train=write(lines), held_out_size=6, split_seed=seed, grader="gsm8k").held_out
  )
  assert held_out(LINES) == held_out(LINES[::-1]) != held_out(LINES, seed=1)
  twice = LINES + [{**LINES[0], "prompt": " 0+0= "}]  # the same but for white space
  assert set(held_out(twice)) <= {*held_out(LINES), " 0+0= "}


def test_a_file_of_held_out_problems_keeps_theirs_out_of_training(write):
  held_out = write([*LINES[:3], LINES[0], {"prompt": "9+9=", "answer": "18"}], "test.jsonl")
  task = tasks.jsonl(train=write(LINES), held_out=held_out, grader="gsm8k")
  assert questions(task.held_out) == ["0+0=", "0+1=", "0+2=", "9+9="]
  assert questions(task.train) == [line["prompt"] for line in LINES[3:]]
  some = tasks.jsonl(train=write(LINES), held_out=held_out, held_out_size=2, grader="gsm8k")
  assert questions(some.held_out) == ["0+0=", "0+1="] and len(some.train) == 18


@pytest.mark.parametrize(("answers", "is_told"), [((1, 2, 3, 4), False), ((1, 2, 3, 1), True)])
def test_an_answer_is_common_if_problems_share_it(write, caplog, answers, is_told):
  lines = [{"prompt": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]
  train = write([*lines, {"prompt": "other?", "answer": 5}])
  with caplog.at_level(logging.WARNING):
    tasks.jsonl(train=train, held_out=write(lines, "test.jsonl"), grader="gsm8k")
  assert ("one answer is right for 50 %" in caplog.text) == is_told == bool(caplog.records)


def test_no_answer_where_the_grader_needs_none(write):
  lines = [{"prompt": f"write {n} words", "words": n} for n in range(4)]
  task = tasks.jsonl(train=write(lines), held_out_size=1, grader="mine:words", answer="")
  assert task.train[0].answer == "" and set(task.train[0].reference) == {"prompt", "words"}
  assert task.most_common_answer_share() == 0


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(answer="gold"), r"mine\.jsonl, line 1 has no field 'gold', only \['Level', 'answer'"),
    (dict(prompt="{question}"), r"line 1 does not fit: prompt is '\{question\}', .*'prompt'"),
    (
      dict(prompt="{promt}"),
      r"line 1 does not fit: prompt is '\{promt\}', but there is no field 'promt', only"
      r" \['Level', 'answer', 'prompt', 'steps'\]; did you mean 'prompt'\?$",
    ),
    (
      dict(prompt="{prompt:d}"),
      r"line 1 does not fit: .* a template that cannot be filled in .* allowed fields are"
      r" \['Level'",
    ),
    (dict(prompt=" "), r"line 1 has an empty prompt"),
    (dict(held_out_size=20), r"held_out_size = 20, but only 19 problems are available"),
    (dict(held_out_size=0), r"held_out_size = 0 is not an integer ≥ 1"),
    (dict(warm_start_size=2), r"no demonstrations: set solution to a template"),
    (
      dict(warm_start_size=15, solution="{steps}"),
      r"warm_start_size = 15, but only 14 problems are available",
    ),
  ],
)
def test_mistakes_name_the_line_and_the_remedy(write, change, message):
  with pytest.raises(ValueError, match=message):
    tasks.jsonl(**(dict(train=write(LINES), grader="gsm8k", held_out_size=5) | change))


def test_files_that_are_not_what_they_should_be(write, tmp_path):
  with pytest.raises(FileNotFoundError, match="there is no such file in /"):
    tasks.jsonl(train=tmp_path / "no.jsonl", grader="gsm8k", held_out_size=1)
  (tmp_path / "torn.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{"prompt": ')
  told = r"torn\.jsonl, line 2 is not JSON: Expecting value at character 1\d; fix this line$"
  with pytest.raises(ValueError, match=told):
    tasks.jsonl(train=tmp_path / "torn.jsonl", grader="gsm8k", held_out_size=1)
  (tmp_path / "torn.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{"prompt": \n{}\n')
  with pytest.raises(ValueError, match=told):  # the end of the line is not a line of its own
    tasks.jsonl(train=tmp_path / "torn.jsonl", grader="gsm8k", held_out_size=1)
  (tmp_path / "torn.json").write_text('[{"prompt": "1"},\n{"prompt": 1 2}]')
  with pytest.raises(ValueError, match=r"Expecting .* at line 2, character 14; fix this file$"):
    tasks.jsonl(train=tmp_path / "torn.json", grader="gsm8k", held_out_size=1)
  (tmp_path / "empty.jsonl").write_text("")
  with pytest.raises(ValueError, match=r"empty\.jsonl is empty\. Write the file again\.$"):
    tasks.jsonl(train=tmp_path / "empty.jsonl", grader="gsm8k", held_out_size=1)
  with pytest.raises(ValueError, match=r"all 4 problems of .* are held out"):
    path = write(LINES[:4])
    tasks.jsonl(train=path, held_out=path, grader="gsm8k")


def test_the_run_and_its_check_count_the_training_problems_alike(write, caplog):
  config = tiny.get_config()
  kwargs = dict(train=write(LINES), grader="gsm8k", solution="{steps}")
  config.task = dict(name="jsonl", kwargs=kwargs | dict(held_out_size=5, warm_start_size=6))
  config.warm_start.num_steps = 2  # few passes, of which nothing is said
  preflight = Preflight(config, "unused")
  preflight.check_tokenizer()
  with caplog.at_level(logging.INFO, logger="absl"):
    found = preflight.check_data()
  counts = "9 training problems, 6 warm-start problems, 5 held-out problems"
  assert found.text == counts
  assert f"mine.jsonl: {counts}" in caplog.text


def test_a_missing_file_is_named_first_by_its_field_and_with_near_names(write, tmp_path):
  write(LINES, "letters.jsonl")
  config = tiny.get_config()
  kwargs = dict(train=str(tmp_path / "leters.jsonl"), grader="gsm8k", held_out_size=1)
  config.task = dict(name="jsonl", kwargs=kwargs)
  with pytest.raises(ValueError, match="leters") as error:
    make_task(config.task)
  assert str(error.value) == (
    f"config.task.kwargs.train = {kwargs['train']!r}: there is no such file in {tmp_path};"
    " similar names: letters.jsonl"
  )
  config.task = dict(
    name="curriculum", kwargs=dict(parts=dict(a=dict(name="jsonl", kwargs=kwargs)))
  )
  with pytest.raises(ValueError, match=r"^config\.task\.kwargs\.parts\.a\.kwargs\.train = "):
    make_task(config.task)
  kwargs["train"] = str(tmp_path / "nowhere" / "letters.jsonl")
  config.task = dict(name="jsonl", kwargs=kwargs)
  with pytest.raises(ValueError, match=r"jsonl': there is no folder .*/nowhere$"):
    make_task(config.task)


def test_a_url_is_read_as_a_file_is(write):
  import fsspec

  with fsspec.open("memory://own/mine.jsonl", "w") as file:
    file.write("".join(json.dumps(line) + "\n" for line in LINES))
  here, there = write(LINES), "memory://own/mine.jsonl"
  mine = lambda path: tasks.jsonl(train=path, held_out_size=5, grader="gsm8k")
  assert questions(mine(there).train) == questions(mine(here).train)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.json"])
def test_a_line_that_is_nested_too_deeply_is_named(tmp_path, name):
  lines = [json.dumps(line) for line in LINES]
  lines[1] = f'{{"prompt": "2?", "x": {"[" * 100_000}'
  path = tmp_path / name
  path.write_text("\n".join(lines))
  with pytest.raises(ValueError, match=f"{name}.*it is nested too deeply"):
    tasks.jsonl(train=str(path), grader="gsm8k", held_out_size=1)
