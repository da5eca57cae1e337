"""Which problems fit, and what is said of long ones."""

import json
import logging

import pytest
from train import tiny

from rlvr_jax.data import ByteTokenizer, Problem, Task
from rlvr_jax.data.sources import Chosen
from rlvr_jax.train.problem_filters import fitting, warn_of_long_texts


def problem(question):
  return Problem(question=question, answer="7", solution="#### 7", reference={})


def test_training_prompts_that_are_too_long_are_left_out_and_held_out_ones_never():
  short, long = problem("1+1="), problem("11111+1111=")
  mixed = Task(name="t", train=(long, short, long), warm_start=(), held_out=(short,), grader="a:b")
  config = tiny.config(prompts__too_long="drop", warm_start__num_steps=0)
  kept = fitting(config, mixed, ByteTokenizer()).train
  assert [kept[i].question for i in range(len(kept))] == ["1+1="]
  assert kept.keys() == Chosen.of([short]).keys()
  held_out = Task(name="t", train=(short,), warm_start=(), held_out=(long,), grader="a:b")
  with pytest.raises(ValueError, match="a prompt has 11 tokens but max_prompt_length is 8"):
    fitting(config, held_out, ByteTokenizer())


def test_held_out_prompts_are_left_out_where_the_configuration_says_so():
  short, long = problem("1+1="), problem("11111+1111=")
  mixed = Task(name="t", train=(short,), warm_start=(), held_out=(long, short), grader="a:b")
  config = tiny.config(prompts__too_long="drop_everywhere", warm_start__num_steps=0)
  kept = fitting(config, mixed, ByteTokenizer()).held_out
  assert [kept[i].question for i in range(len(kept))] == ["1+1="]


@pytest.mark.parametrize(
  ("scaling", "longest"),
  [
    (None, 40),
    (dict(type="yarn", factor=2.0, original_max_position_embeddings=40), 80),
    (dict(type="linear", factor=2.0), 40),  # whose files say the longer length already
  ],
)
def test_longer_texts_than_the_checkpoint_was_made_for_are_told(tmp_path, caplog, scaling, longest):
  settings = dict(model_type="qwen2", max_position_embeddings=40, rope_scaling=scaling)
  (tmp_path / "config.json").write_text(json.dumps(settings))
  lengths = dict(max_prompt_length=30, max_response_length=longest - 30)
  fields = dict(model__checkpoint=str(tmp_path), model__preset="")
  with caplog.at_level(logging.WARNING):
    warn_of_long_texts(tiny.config(**fields, **lengths))
    warn_of_long_texts(tiny.config(**lengths | dict(max_response_length=10**6)))
    assert not caplog.text
    lengths["max_response_length"] += 1
    warn_of_long_texts(tiny.config(**fields, **lengths))
  assert f"made for {longest} tokens" in caplog.text and f"= {longest + 1}." in caplog.text
