"""Which grader gets which reference."""

import contextlib
import dataclasses
import json
import logging
import re

import numpy as np
import pytest
from rewards.user_graders import SECONDS
from train import tiny

from rlvr_jax.codejudge import cgroups
from rlvr_jax.data import Problem, Task
from rlvr_jax.data.by_name import make_tokenizer
from rlvr_jax.data.byte_pairs import save, train_byte_pairs
from rlvr_jax.data.sources import Candidates, Chosen, Concatenated, Generated
from rlvr_jax.data.task_utils import BY_REFERENCE
from rlvr_jax.environments.dialogues import EnvironmentPool, EnvironmentStartError
from rlvr_jax.rewards import GraderStartError
from rlvr_jax.rewards.graders import thought_prefix
from rlvr_jax.rollouts.answers import Asked
from rlvr_jax.rollouts.dialogues import Beginning, as_mapping
from rlvr_jax.rollouts.engine import Rollout
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.setup.grading import (
  WEIGHTED,
  announce_partial_credit,
  check_first_dialogue,
  check_first_grade,
  grader_pool,
  make_outcome_policy,
  start_pools,
  with_graders,
)
from rlvr_jax.train.start import every_line
from rlvr_jax.train.start.every_line import check_every_line

GSM8K = "gsm8k"
THINK = "think_answer"
DIGITS = "rewards.user_graders:digits"


def problem(question, reference):
  is_wrapped = reference.keys() == {"grader", "reference"}
  own = reference["reference"] if is_wrapped else reference
  made = Problem(question=question, answer="7", solution="#### 7", reference=own)
  return made.wrap(reference) if is_wrapped else made


def task(grader, *references, question="1 and 6?"):
  problems = tuple(problem(question, reference) for reference in references)
  return Task(name="t", train=problems, warm_start=(), held_out=problems, grader=grader)


def graded_task(config, task):
  return with_graders(config.grading, config.evaluation.grader, task)


def policy_of(config):
  return make_outcome_policy(config.grading.outcomes)


WRAPPED = {"grader": GSM8K, "reference": {"answer": "7"}}


def test_a_replaced_grader_and_the_extra_ones_get_what_a_part_of_a_mixture_would():
  mixture = task(BY_REFERENCE, WRAPPED)
  assert graded_task(tiny.config(), mixture).train[0].reference == WRAPPED
  both = dict(grading__grader=GSM8K, evaluation__grader=GSM8K)
  replaced = graded_task(tiny.config(**both), mixture)
  assert (replaced.grader, replaced.train[0].reference) == (GSM8K, {"answer": "7"})
  extra = graded_task(tiny.config(grading__extra=((DIGITS, 0.5),)), mixture)
  named = extra.train[0].reference
  first, second = named["reference"]["parts"]
  assert (extra.grader, named["grader"]) == (BY_REFERENCE, WEIGHTED)
  assert (first["grader"], first["reference"]) == (BY_REFERENCE, WRAPPED)
  expected = {"grader": DIGITS, "weight": 0.5, "reference": {"answer": "7"}}
  assert second == expected
  with grader_pool(tiny.config(grading__extra=((DIGITS, 0.5),)).grading, extra) as pool:
    (grade,) = pool.grade(["#### 7"], [named])
  assert grade.outcome == "correct" and grade.score == pytest.approx(1 + 0.25 / 6)
  assert grade.answer == "7"


@pytest.mark.parametrize(
  ("own", "given", "fields", "training", "held_out"),
  [
    (BY_REFERENCE, WRAPPED, dict(grading__grader=DIGITS), ("wrong", 0.5), ("correct", 1.0)),
    (
      *(GSM8K, {"answer": "7"}),
      dict(grading__grader=THINK, grading__extra=((DIGITS, 2.0),), evaluation__grader=DIGITS),
      ("wrong", 1.0),
      ("wrong", 0.5),
    ),
  ],
)
def test_held_out_problems_have_a_grader_of_their_own(own, given, fields, training, held_out):
  config = tiny.config(**fields)
  graded = graded_task(config, task(own, given))
  with grader_pool(config.grading, graded) as pool:
    references = [graded.train[0].reference, graded.held_out[0].reference]
    grades = pool.grade(["7", "7"], references)
  assert [(grade.outcome, grade.score) for grade in grades] == [training, held_out]


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
    grader_pool(config.grading, graded_task(config, task(grader, reference)))


@pytest.mark.parametrize("text", ["gsm8k()", " gsm8k "])
def test_the_task_s_own_grader_in_other_words_changes_nothing(text):
  own = task(GSM8K, {"answer": "7"})
  assert graded_task(tiny.config(grading__grader=text, evaluation__grader=text), own) is own


def test_a_thought_that_the_prompt_opens_is_no_answer():
  """Whichever graders there are: extra ones, and those of a mixture, get the same text."""
  config = tiny.config(
    max_prompt_length=20, max_response_length=24, batch__prompts=2, batch__group_size=2,
    warm_start__num_steps=0, grading__extra=((THINK, 0.5),),
    grading__outcomes__wrong="score", grading__outcomes__unparseable="score",
  )  # fmt: skip
  problems = tuple(problem(q, WRAPPED) for q in ("1 and 6? <think>\n", "1 and 6? "))
  mixture = Task("t", train=problems, warm_start=(), held_out=problems, grader=BY_REFERENCE)
  parts = build(config, task=mixture)
  texts = ["so 7. Wait, ", "so 6</think>#### 7"]
  ids = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
  samples = []
  with grader_pool(config.grading, parts.task) as pool:
    for index in range(2):
      asked = parts.task.train[index]
      prompt = np.frombuffer(asked.question.encode(), np.uint8).astype(np.int32)
      answers, rollouts = parts.make_answers(pool), []
      for number, tokens in enumerate(ids):
        arrays = {
          "tokens": np.resize(np.append(tokens, 256), 24),
          "behavior_logprobs": np.zeros(24, np.float32),
        }
        rollout = Rollout((0, index, number), prompt, np.zeros(2, np.uint32), arrays)
        rollout.length, rollout.stopped = len(tokens), True
        rollouts.append(rollout)
        answers.ask(rollout, Asked(asked, Beginning(), 0, thought_prefix(asked.question)))
      graded = {}
      while len(graded) < 2:
        found = answers.take(patience_s=0.0, until_one=True)
        graded |= {rollout.place[2]: grade for rollout, _, grade in found}
      grades = [graded[0], graded[1]]
      arrays = parts.grading.arrays(rollouts, grades)
      said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "4?"}]
      chat = dataclasses.replace(asked, messages=tuple(said))
      for of, messages in ((asked, said), (chat, None)):
        (first, _) = parts.grading.samples(of, 0, arrays, grades, messages)
        assert first["messages"] == said and first["prompt"] == asked.question
      samples += parts.grading.samples(asked, 0, arrays, grades)
      assert "messages" not in samples[-1]
  assert [s["outcome"] for s in samples] == ["unparseable", "correct", "correct", "correct"]
  assert [s["reward"] for s in samples] == [0.0, 1.5, 1.0, 1.0]
  assert [s["completion"] for s in samples] == texts * 2


def test_a_run_with_generated_programs_is_told_that_no_control_group_limits_them(caplog):
  reference = {"style": "asserts", "tests": ["assert f() == 7"]}
  wrapped = {"grader": "code", "reference": reference}
  for grader, given in ((GSM8K, {"answer": "7"}), (BY_REFERENCE, wrapped)):
    assert "control group" not in caplog.text
    with caplog.at_level(logging.WARNING):
      grader_pool(tiny.config().grading, graded_task(tiny.config(), task(grader, given))).close()
  assert caplog.text.count("no control group") == (cgroups.unavailable_reason() is not None)


FRACTION = "code(reward='fraction')"


@pytest.mark.parametrize(
  ("grader", "wrong", "environment", "said"),
  [
    ("my_module:grade", "0", "", "reward is 0, even if my_module:grade scores it between 0 and"),
    (FRACTION, "-0.5", "", f"reward is -0.5, even if {FRACTION}"),
    ("reasoning_gym", "0", "", "set config.grading.outcomes.wrong = score"),
    ("gsm8k", "0", "mine:make", "even if mine:make scores"),
    ("my_module:grade", "score", "", ""),
    ("code", "0", "", ""),
    ("gsm8k", "0", "guess", ""),
  ],
)
def test_partial_credit_that_would_be_lost_is_said(capsys, grader, wrong, environment, said):
  policy = policy_of(tiny.config(grading__outcomes={"wrong": wrong}))
  alone = task(grader, {"answer": "7"})
  of_a_mixture = task(BY_REFERENCE, {**WRAPPED, "grader": grader})
  for own in (alone, of_a_mixture):
    announce_partial_credit(policy, own, environment)
    printed = "".join(capsys.readouterr())
    assert said in printed and bool(said) == bool(printed)


def test_a_grader_that_crashes_on_the_first_problem_is_refused_unless_crashes_have_a_reward():
  broken = task("rewards.faulty_graders:faulty", {})
  with grader_pool(tiny.config().grading, broken) as pool:
    with pytest.raises(GraderStartError, match=r"crashed on the answer 'no answer'.*any text"):
      check_first_grade(policy_of(tiny.config()), pool, broken)
    rewarded = tiny.config(grading__outcomes=dict(crashed=0.0))
    check_first_grade(policy_of(rewarded), pool, broken)


def lines(grader, *references):
  """A task whose problems say their file and line."""
  source = lambda file, given: [
    dataclasses.replace(problem(f"{file} {n}", reference), where=f"{file}.jsonl, line {n}")
    for n, reference in enumerate(given, 1)
  ]
  train, rest = source("train", references), source("held_out", references)
  return Task("t", train=Chosen.of(train), warm_start=(), held_out=Chosen.of(rest), grader=grader)


SEVEN, TIME, SUITE = {"answer": 7}, {"answer": "10:30"}, {"style": "asserts", "tests": ["f()"]}


@pytest.mark.parametrize(
  ("task", "fields", "said"),
  [
    (lines(GSM8K, SEVEN, TIME), {}, ["2 of 4", "train.jsonl, line 2", "'10:30' is not one number"]),
    (
      lines(BY_REFERENCE, *({"grader": GSM8K, "reference": given} for given in (SEVEN, TIME))),
      dict(grading__extra=((THINK, 0.5),)),
      ["train.jsonl, line 2", "'10:30' is not one number"],
    ),
    (
      lines("mathematics", SEVEN, {"answer": r"7} and {8"}),
      dict(evaluation__grader=THINK),
      ["1 of 4 problems", "train.jsonl, line 2", r"'\\boxed{7} and {8}' is graded"],
    ),
    (
      lines("code", SUITE, {**SUITE, "tests": []}),
      {},
      ["2 of 4", "train.jsonl, line 2", "'' is graded crashed", "'tests' is empty"],
    ),
    (lines(GSM8K, SEVEN, {"answer": "so\n#### 7"}), {}, []),
  ],
)
def test_every_line_is_graded_before_a_run_begins(task, fields, said):
  config = tiny.config(**fields)
  graded = graded_task(config, task)
  with grader_pool(config.grading, graded) as pool:
    if not said:
      assert check_every_line(policy_of(config), pool, graded) == 2 * len(task.train)
      return
    with pytest.raises(GraderStartError) as error:
      check_every_line(policy_of(config), pool, graded)
  assert all(text in str(error.value) for text in said), error.value


def test_of_problems_that_are_generated_the_first_are_graded():
  read = []

  def generate(index):
    read.append(index)
    return problem(str(index), SEVEN)

  source = Generated(Candidates(generate, 10**9, "numbers"), ())
  listed = [problem("q", SEVEN)] * 3
  task = Task("t", Concatenated([source, Chosen.of(listed)]), (), Chosen.of(listed), GSM8K)
  with grader_pool(tiny.config().grading, task) as pool:
    read.clear()
    assert check_every_line(policy_of(tiny.config()), pool, task) == 100 + 3 + 3
  assert read == [*range(100)]


def test_of_slow_graders_of_one_s_own_some_lines_are_graded(monkeypatch, capsys):
  monkeypatch.setenv(SECONDS, "0.2")
  monkeypatch.setattr(every_line, "_OWN_S", 0.5)
  task = lines("rewards.user_graders:unhurried", *[SEVEN] * 500)
  config = tiny.config()
  with grader_pool(config.grading, task) as pool:
    count = check_every_line(policy_of(config), pool, task)
  assert 1 < count < 64 and f"only the first {count} problems" in capsys.readouterr().out


FAULTY = "environments.faulty_environments"


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    ("guess", "problem's environment replied '?' to 'no answer' within "),
    ("python", "problem's environment ended with the score None to 'no answer' within "),
    (f"{FAULTY}:says(text='late by a lot')", "environment: timeout on the text 'no answer': by a"),
    (f"{FAULTY}:says(text='raise a fault')", "environment: failed on the text 'no answer': Value"),
    (
      f"{FAULTY}:says(text='', question='hang')",
      "environment: failed at its reset: it took",
    ),
  ],
)
def test_an_environment_plays_a_turn_at_the_start(name, expected):
  first = task(GSM8K, {"answer": "7"})
  with EnvironmentPool(name, deadline_s=1.0) as pool:
    rewarded = tiny.config(grading__outcomes=dict(environment_failed="0"))
    assert expected in check_first_dialogue(policy_of(rewarded), pool, first)
    if " failed " in expected:
      with pytest.raises(EnvironmentStartError, match=re.escape(expected)):
        check_first_dialogue(policy_of(tiny.config()), pool, first)
  assert check_first_dialogue(policy_of(tiny.config()), None, first) == ""


@pytest.mark.parametrize(
  ("grader", "fields"),
  [
    (GSM8K, {}),
    (BY_REFERENCE, dict(grading__grader=THINK, grading__extra=((DIGITS, 0.5),))),
  ],
)
def test_an_environment_gets_the_line_whatever_graders_are_set(grader, fields):
  """And what it asks the graders about is graded as a rollout is."""
  given = {"grader": GSM8K, "reference": {"answer": "7"}}
  mine = task(grader, given if grader == BY_REFERENCE else given["reference"])
  config = tiny.config(**fields, environment__name=f"{FAULTY}:shows", environment__processes=1)
  tokenizer = make_tokenizer("bytes", config.prompts, "")
  with contextlib.ExitStack() as stack:
    changed = graded_task(config, mine)
    _, pool = start_pools(
      config.grading, config.environment, changed, tokenizer, stack.enter_context
    )
    told = check_first_dialogue(policy_of(config), pool, changed)
    outcomes = ("wrong", "wrong") if "grading__grader" in fields else ("unparseable", "correct")
    assert f"""replied '{{"answer": "7"}} {outcomes[0]}' to""" in told
    begun = pool.reset(as_mapping(changed.train[0]), 0, changed.train[0].reference).result(60)
    assert (
      pool.step(begun.dialogue, "#### 7").result(60).reply == f'{{"answer": "7"}} {outcomes[1]}'
    )


def test_a_template_without_the_role_of_replies_is_refused_at_the_start(tmp_path):
  save(train_byte_pairs(["one and two are three"] * 9, vocab_size=264), tmp_path)
  path = tmp_path / "tokenizer_config.json"
  template = "{{ messages[0].content }}"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
  tokenizer = make_tokenizer(str(tmp_path), tiny.config(prompts__format="chat").prompts, "")
  name = f"{FAULTY}:closing"  # its replies are a tool's
  config = tiny.config(environment__name=name, environment__processes=1)
  message = rf"config\.environment\.name = '{name}': .*'tool'"
  with contextlib.ExitStack() as stack, pytest.raises(EnvironmentStartError, match=message):
    start_pools(
      config.grading,
      config.environment,
      task(GSM8K, {"answer": "7"}),
      tokenizer,
      stack.enter_context,
    )
