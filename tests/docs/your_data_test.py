"""What docs/your_data.md tells one to write and to run."""

import importlib
import json

import pytest
from train import tiny

from docs import snippets
from rlvr_jax.data.byte_pairs import save, train_byte_pairs
from rlvr_jax.data.curriculum import Curriculum
from rlvr_jax.data.tokenizer import encode_prompt
from rlvr_jax.train.setup.build import build

PAGE = snippets.page("your_data.md")


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
  yield from snippets.in_folder(PAGE, tmp_path, monkeypatch)


def test_the_files_make_a_task_and_a_curriculum(folder):
  snippets.run(PAGE.commands[0])
  task = build(importlib.import_module("my_run").get_config().lock()).task
  assert (len(task.held_out), len(task.warm_start)) == (200, 300)
  problem = task.train[0]
  exact = importlib.import_module("my_grader").exact
  assert problem.question == f"{problem.reference['numbers']} max "
  assert problem.answer == max(problem.reference["numbers"].split())
  assert exact(problem.solution, problem.reference) == 1.0
  assert exact("1" + problem.solution, problem.reference) == 0.0
  own = importlib.import_module("my_task").sums(size=400)
  assert [len(problems) for problems in (own.train, own.warm_start, own.held_out)] == [
    100,
    100,
    200,
  ]
  assert not {p.question for p in own.held_out} & {
    p.question for p in [*own.train, *own.warm_start]
  }
  assert exact(own.train[0].solution, own.train[0].reference) == 1.0
  sampled = build(importlib.import_module("my_curriculum").get_config().lock()).task.train
  assert isinstance(sampled, Curriculum) and len(sampled) == len(task.train)


def test_the_block_for_a_checkpoint_takes_the_checkpoint_s_shape(folder):
  """Whichever checkpoint it is: here a tiny one under that name."""
  snippets.run(PAGE.commands[0])
  config = importlib.import_module("my_model").get_config().lock()
  model = folder / config.model.checkpoint
  save(train_byte_pairs(["one and two are three"] * 9, vocab_size=264), model)
  (model / "chat_template.jinja").write_text(
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}<|assistant|>"
  )
  sizes = dict(vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
  heads = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
  (model / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **heads}))
  config.max_prompt_length = 200  # this tokenizer has few pieces
  parts = build(config)
  assert parts.model.config.width == 32 and len(parts.task.held_out) == 200
  shown = parts.tokenizer.decode(encode_prompt(parts.task.train[0], parts.tokenizer))
  assert shown.startswith("<|user|>Which of these numbers is the largest: ")
  assert shown.endswith("?<|assistant|>")  # the token that ends a turn is special


@pytest.mark.slow
def test_the_commands_train(folder):
  first, *trained = PAGE.commands
  snippets.run(first)
  for command in trained:
    snippets.run(command, "--config.num_updates=2", "--config.warm_start.num_steps=2")
  assert len(trained) == 3  # the first is --mode=check
  for workdir in ("runs/mine", "runs/curriculum"):
    assert [r["step"] for r in tiny.records(folder / workdir, "train")] == [1, 2]
  assert "curriculum/seen" in tiny.records(folder / "runs/curriculum", "train")[0]
