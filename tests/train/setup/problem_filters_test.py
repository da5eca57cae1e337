"""Which problems fit, and what is said of long ones."""

import json
import re

import pytest
from train import tiny
from train.sums import sums

from rlvr_jax.commands.train import FAILURES
from rlvr_jax.data import ByteTokenizer, Problem, Task, tasks
from rlvr_jax.data.batches import encode_prompts
from rlvr_jax.data.sources import Chosen, Concatenated, Mixed
from rlvr_jax.data.tokenizer import PromptError
from rlvr_jax.train.setup.build import batch_shape, build
from rlvr_jax.train.setup.problem_filters import describe_long_texts, limit_lengths


def limit_for(config, task):
  return limit_lengths(
    task,
    ByteTokenizer(),
    batch_shape(config),
    too_long=config.prompts.too_long,
    warm_starts=config.warm_start.num_steps > 0,
  )


def told_of(config):
  return describe_long_texts(config.model.checkpoint, batch_shape(config))


def problem(question):
  return Problem(question=question, answer="7", solution="#### 7", reference={})


def test_training_prompts_that_are_too_long_are_left_out_and_held_out_ones_never():
  short, long = problem("1+1="), problem("11111+1111=")
  mixed = Task(name="t", train=(long, short, long), warm_start=(), held_out=(short,), grader="a:b")
  config = tiny.config(prompts__too_long="drop", warm_start__num_steps=0)
  kept = limit_for(config, mixed).train
  assert [kept[i].question for i in range(len(kept))] == ["1+1="]
  assert kept.keys() == Chosen.of([short]).keys()
  held_out = Task(name="t", train=(short,), warm_start=(), held_out=(long,), grader="a:b")
  with pytest.raises(ValueError, match=r"11 tokens but config\.max_prompt_length is 8"):
    limit_for(config, held_out)


def test_held_out_prompts_are_left_out_where_the_configuration_says_so():
  short, long = problem("1+1="), problem("11111+1111=")
  mixed = Task(name="t", train=(short,), warm_start=(), held_out=(long, short), grader="a:b")
  config = tiny.config(prompts__too_long="drop_everywhere", warm_start__num_steps=0)
  kept = limit_for(config, mixed).held_out
  assert [kept[i].question for i in range(len(kept))] == ["1+1="]


def listed_late():
  """A list of problems of which only the last one is too long."""
  return [*[problem(f"{n}+1=") for n in range(150)], problem("11111+1111=")]


def test_a_long_prompt_late_in_a_list_is_found_at_the_start():
  lists = {
    "list": listed_late(),
    "chosen": Chosen.of(listed_late()),
    "concatenated": Concatenated([Chosen.of([problem("1+1=")]), Chosen.of(listed_late())]),
    "mixed": Mixed([Chosen.of(listed_late())], [1.0], [0], size=1_000),
  }
  config = tiny.config(warm_start__num_steps=0)
  told = (
    r"^training problem 150: a prompt has 11 tokens but config\.max_prompt_length is 8: raise"
    r" config\.max_prompt_length, or .* config\.prompts\.too_long = 'drop' "
  )
  for source in lists.values():
    task = Task("t", train=source, warm_start=(), held_out=(problem("1+1="),), grader="a:b")
    with pytest.raises(PromptError, match=told):
      limit_for(config, task)
    config.prompts.too_long = "drop"
    assert len(limit_for(config, task).train) < len(source)
    config.prompts.too_long = "error"


def test_a_long_prompt_of_a_file_is_named_by_its_line(tmp_path):
  path = tmp_path / "mine.jsonl"
  lines = [{"prompt": p.question, "answer": p.answer} for p in listed_late()]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  held_out = tmp_path / "test.jsonl"
  held_out.write_text(json.dumps({"prompt": "2-1=", "answer": "1"}) + "\n")
  task = tasks.jsonl(train=path, held_out=held_out, grader="gsm8k")
  with pytest.raises(PromptError, match=r"mine\.jsonl, line 151: a prompt has 11 tokens"):
    limit_for(tiny.config(warm_start__num_steps=0), task)


GENERATED = dict(train_size=10**6, long_from=100)


def test_a_grader_of_the_run_hides_no_long_prompt(tmp_path):
  file = tmp_path / "lines.jsonl"
  prompts = ["q"] * 300 + ["q" * 90]
  lines = [json.dumps({"prompt": f"{p}{n}", "answer": "1"}) + "\n" for n, p in enumerate(prompts)]
  file.write_text("".join(lines))
  task = dict(name="jsonl", kwargs=dict(train=str(file), held_out_size=1, grader="gsm8k"))
  with pytest.raises(PromptError, match="301"):
    build(tiny.config(task=task, max_prompt_length=16, grading__extra=(("boxed", 0.1),)))


def test_what_is_generated_is_measured_when_it_is_drawn():
  """A million problems are not generated to be measured; the run then ends with one line."""
  task = limit_for(tiny.config(warm_start__num_steps=0), sums(**GENERATED))
  with pytest.raises(FAILURES, match=r"^a prompt has 3\d tokens .* begins 'as long as no"):
    encode_prompts([task.train[100]], ByteTokenizer(), tiny.config().max_prompt_length)


@pytest.mark.slow
def test_a_run_that_draws_a_long_prompt_ends_with_one_line(tmp_path):
  flags = ("--config.warm_start.num_steps=0", f"--config.task.kwargs={GENERATED}")
  output = tiny.run(tmp_path / "run", *flags, expect=1)
  assert re.search(r"^error: a prompt has 3\d tokens .*'drop'", output.splitlines()[-1]), output
  assert "Traceback" not in output


@pytest.mark.parametrize(
  ("scaling", "longest"),
  [
    (None, 40),
    (dict(type="yarn", factor=2.0, original_max_position_embeddings=40), 80),
    (dict(type="linear", factor=2.0), 40),  # whose files say the longer length already
  ],
)
def test_longer_texts_than_the_checkpoint_was_made_for_are_told(tmp_path, scaling, longest):
  settings = dict(model_type="qwen2", max_position_embeddings=40, rope_scaling=scaling)
  (tmp_path / "config.json").write_text(json.dumps(settings))
  lengths = dict(max_prompt_length=30, max_response_length=longest - 30)
  fields = dict(model__checkpoint=str(tmp_path), model__preset="")
  assert not told_of(tiny.config(**fields, **lengths))
  assert not told_of(tiny.config(**lengths | dict(max_response_length=10**6)))
  lengths["max_response_length"] += 1
  text = told_of(tiny.config(**fields, **lengths))
  assert f"made for {longest} tokens" in text and f"= {longest + 1}." in text
