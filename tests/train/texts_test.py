"""Prompts that fit, and which grader gets which reference."""

import json
import logging

import pytest
from train import tiny

from rlvr_jax.data import ByteTokenizer, Problem, Task
from rlvr_jax.rewards import GraderStartError, cgroups
from rlvr_jax.train.texts import (
  BY_REFERENCE,
  fitting,
  grader_pool,
  warn_of_long_texts,
  with_graders,
)

GSM8K = "rlvr_jax.rewards.graders:gsm8k"
DIGITS = "rewards.user_graders:digits"


def problem(question, reference):
  return Problem(question=question, answer="7", solution="#### 7", reference=reference)


def task(grader, *references, question="1 and 6?"):
  problems = tuple(problem(question, reference) for reference in references)
  return Task(name="t", train=problems, warm_start=(), held_out=problems, grader=grader)


WRAPPED = {"grader": GSM8K, "reference": {"answer": "7"}, "dataset": "gsm8k"}


def test_a_replaced_grader_and_the_extra_ones_get_what_a_part_of_a_mixture_would():
  mixture = task(BY_REFERENCE, WRAPPED)
  assert with_graders(tiny.config(), mixture).train[0].reference == WRAPPED
  replaced = with_graders(tiny.config(grading__grader=GSM8K), mixture)
  assert (replaced.grader, replaced.train[0].reference) == (GSM8K, {"answer": "7"})
  extra = with_graders(tiny.config(grading__extra=((DIGITS, 0.5),)), mixture)
  first, second = extra.held_out[0].reference["parts"]
  assert (first["grader"], first["reference"]) == (BY_REFERENCE, WRAPPED)
  expected = {"grader": DIGITS, "weight": 0.5, "reference": {"answer": "7"}}
  assert second == expected
  with grader_pool(tiny.config(grading__extra=((DIGITS, 0.5),)), extra) as pool:
    (grade,) = pool.grade(["#### 7"], [extra.held_out[0].reference])
  assert grade.outcome == "correct" and grade.score == pytest.approx(1 + 0.25 / 6)
  assert grade.answer == "7"


@pytest.mark.parametrize(
  ("grader", "reference", "extra"),
  [
    (BY_REFERENCE, {**WRAPPED, "grader": "rewards.user_graders:nothere"}, ()),
    ("rewards.user_graders:nothere", {"answer": "7"}, ((DIGITS, 0.5),)),
  ],
)
def test_a_grader_that_only_references_name_is_tried_at_the_start(grader, reference, extra):
  config = tiny.config(grading__extra=extra)
  with pytest.raises(GraderStartError, match="nothere"):
    grader_pool(config, with_graders(config, task(grader, reference)))


def test_a_run_with_generated_programs_is_told_that_no_control_group_limits_them(caplog):
  reference = {"style": "asserts", "tests": ["assert f() == 7"]}
  wrapped = {"grader": "rlvr_jax.rewards.code:code", "reference": reference}
  for grader, given in ((GSM8K, {"answer": "7"}), (BY_REFERENCE, wrapped)):
    assert "control group" not in caplog.text
    with caplog.at_level(logging.WARNING):
      grader_pool(tiny.config(), with_graders(tiny.config(), task(grader, given))).close()
  assert caplog.text.count("no control group") == (cgroups.why_none() is not None)


def test_training_prompts_that_are_too_long_are_left_out_and_held_out_ones_never():
  short, long = problem("1+1=", {}), problem("11111+1111=", {})
  mixed = Task(name="t", train=(long, short, long), warm_start=(), held_out=(short,), grader=GSM8K)
  config = tiny.config(prompts__too_long="drop", warm_start__num_steps=0)
  kept = fitting(config, mixed, ByteTokenizer()).train
  assert [kept[i].question for i in range(len(kept))] == ["1+1="]
  held_out = Task(name="t", train=(short,), warm_start=(), held_out=(long,), grader=GSM8K)
  with pytest.raises(ValueError, match="a prompt has 11 tokens but max_prompt_length is 8"):
    fitting(config, held_out, ByteTokenizer())


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
