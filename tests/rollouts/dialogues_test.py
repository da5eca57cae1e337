"""How dialogues end, and what becomes of replies; environments run in processes of their own."""

import dataclasses
import sys
import time
from concurrent.futures import Future

import numpy as np
import pytest

from rlvr_jax.data import ByteTokenizer, Problem
from rlvr_jax.data.batches import PromptError, encode_prompts
from rlvr_jax.environments.dialogues import EnvironmentPool
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rollouts.batch import Flight
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.rollouts.dialogues import (
  CUTS,
  DialogueSettings,
  DialogueUsage,
  End,
  EnvironmentDialogues,
  Environments,
  EnvironmentStoppedError,
  shorten,
)
from rlvr_jax.rollouts.serve import Group
from rlvr_jax.train.setup.grading import check_first_messages

T, TOKENIZER, STOP = 24, ByteTokenizer(), 257
ENVIRONMENT = '''
import time
from rlvr_jax.environments import Refused, Turn

class Says:
  """Does what the text says."""

  def reset(self, problem, seed):
    self.seed = seed
    if problem["question"] == "own words":
      return [{"role": "user", "content": f"seed {seed}"}]
    if problem["question"] == "broken":
      raise KeyError(seed)
    if problem["question"] == "slow":
      time.sleep(2.5)

  def step(self, text):
    kind, _, argument = text.partition(" ")
    if kind == "score":
      return Turn(done=True, score=float(argument))
    if kind == "late":
      return Turn(done=True, score=0.5, correct=True)
    if kind == "judge":
      return Turn(done=True)
    if kind == "refuse":
      raise Refused("no")
    if kind == "fail":
      raise KeyError(argument)
    if kind == "hang":
      time.sleep(60)
    if kind == "long":
      return Turn("é" * int(argument))
    if kind == "broken":
      return Turn(bytes([97, 255, 254, 98]))
    if kind == "worth":
      return Turn("a reply", score=float(argument))
    return Turn(argument)

def says():
  return Says()
'''


@pytest.fixture(scope="module", name="pool")
def _pool(tmp_path_factory):
  folder = tmp_path_factory.mktemp("own")
  (folder / "says_environment.py").write_text(ENVIRONMENT)
  sys.path.append(str(folder))
  with EnvironmentPool("says_environment:says", processes=2, deadline_s=3.0) as pool:
    yield pool
  sys.path.remove(str(folder))


def environments(pool, **settings):
  return Environments(pool, TOKENIZER, DialogueSettings(max_turns=2, **settings), lambda x: x)


def group_of(texts, question="q", seed=5):
  """A group whose rollouts have said these texts, each in a first turn."""
  problems = [Problem(question=question, answer="", solution="", reference={})]
  flight = Flight(problems, encode_prompts(problems, TOKENIZER, 16), [seed])
  group = Group(
    owner=flight,
    prompt_index=0,
    tokens=np.full((len(texts), T), TOKENIZER.pad_id, np.int32),
    lengths=np.zeros(len(texts), np.int32),
    stopped=np.ones(len(texts), bool),
    behavior_logprobs=np.zeros((len(texts), T), np.float32),
    turns=np.zeros((len(texts), T), np.int32),
    ends=np.zeros(len(texts), np.int32),
    scores=np.full(len(texts), np.nan, np.float32),
    details=[""] * len(texts),
    turn_scores=np.full((len(texts), T), np.nan, np.float32),
  )
  for g, text in enumerate(texts):
    say(group, g, text, turn=0)
  return group


def say(group, g, text, turn, end=STOP):
  ids = [*TOKENIZER.encode(text), *([end] if end else [])]
  new = slice(group.lengths[g], group.lengths[g] + len(ids))
  group.tokens[g, new], group.turns[g, new] = ids, turn
  group.lengths[g] = new.stop


def answers_to(group, pool, **settings):
  """(answers by rollout, usage) to the last turns of all rollouts."""
  usage = DialogueUsage()
  dialogues = EnvironmentDialogues(environments(pool, **settings), usage)
  for g in range(len(group.lengths)):
    dialogues.ask(group, g)
  found, deadline = {}, time.monotonic() + 60
  while len(found) < len(group.lengths):
    assert time.monotonic() < deadline
    found |= {a.rollout: a for a in dialogues.take(patience_s=0.0, until_one=True)}
  return found, usage


def test_every_end_has_its_outcome(pool):
  texts = {
    "score 1": (End.CORRECT, 1.0),
    "score 0.5": (End.WRONG, 0.5),
    "late": (End.CORRECT, 0.5),
    "judge": (End.TO_BE_GRADED, None),
    "refuse": (End.ENVIRONMENT_REFUSED, None),
    "fail x": (End.ENVIRONMENT_FAILED, None),
    "say ": (End.ENVIRONMENT_REFUSED, None),  # a reply without tokens
    "score nan": (End.ENVIRONMENT_REFUSED, None),
    "worth inf": (End.ENVIRONMENT_REFUSED, None),
    "hang": (End.ENVIRONMENT_LIMIT, None),
    "say 12345678901234": (End.LENGTH_LIMIT, None),  # with the turn there is no place for it
  }
  group = group_of(texts)
  found, usage = answers_to(group, pool)
  for g, (text, (end, score)) in enumerate(texts.items()):
    assert found[g].is_last and not len(found[g].tokens), text
    assert End(group.ends[g]) is end, text
    np.testing.assert_equal(group.scores[g], np.float32(np.nan if score is None else score))
    assert group.stopped[g] == (end is not End.LENGTH_LIMIT)
  assert usage.replies == len(texts) and usage.reply_waits_s > 0
  named = {end.outcome for end in End if end.outcome is not None}
  assert len(named) == len(End) - 1 and Outcome.ENVIRONMENT_FAILED in named


def test_a_reply_is_appended_and_the_last_turn_has_none(pool):
  group = group_of(["say higher", "say lower"])
  say(group, 1, "x", turn=1, end=None)
  say(group, 1, "say ab", turn=2)
  found, _ = answers_to(group, pool)
  assert not found[0].is_last and bytes(found[0].tokens.tolist()) == b"higher"
  assert found[1].is_last and End(group.ends[1]) is End.TURN_LIMIT


def test_the_score_of_a_turn_is_not_that_of_the_dialogue(pool):
  """It stands at the turn's last token, also where the turn is the dialogue's last by a limit."""
  group = group_of(["worth 0.25", "say it", "score 1", "worth -1"])
  say(group, 3, "x", turn=1, end=None)
  say(group, 3, "worth 2", turn=2)
  found, _ = answers_to(group, pool)
  assert [found[g].is_last for g in range(4)] == [False, False, True, True]
  assert End(group.ends[3]) is End.TURN_LIMIT
  expected = np.full((4, T), np.nan, np.float32)
  expected[0, group.lengths[0] - 1], expected[3, group.lengths[3] - 1] = 0.25, 2.0
  np.testing.assert_array_equal(group.turn_scores, expected)
  np.testing.assert_array_equal(group.scores, np.float32([np.nan, np.nan, 1.0, np.nan]))


def test_a_turn_that_was_cut_is_not_asked():
  group = group_of(["x" * (T - 1)])
  group.lengths[0], group.stopped[0] = T, False
  found, _ = answers_to(group, None)  # nobody is there to answer
  assert found[0].is_last and End(group.ends[0]) is End.LENGTH_LIMIT


@pytest.mark.parametrize(
  ("cut", "expected"), [("tail", "01 [cut] "), ("head", " [cut] 89"), ("middle", "0 [cut] 9")]
)
def test_a_long_reply_is_cut_and_says_so(pool, cut, expected):
  found, _ = answers_to(group_of(["s 0123456789"]), pool, max_reply_length=9, cut=cut)
  assert bytes(found[0].tokens.tolist()).decode() == expected
  found, _ = answers_to(group_of(["s 012345678"]), pool, max_reply_length=9, cut=cut)
  assert bytes(found[0].tokens.tolist()) == b"012345678"


def test_replies_of_a_megabyte_and_of_invalid_utf_8(pool):
  texts = ["long 600000", "broken"]  # characters of two bytes
  found, _ = answers_to(group := group_of(texts), pool)
  assert found[0].is_last and End(group.ends[0]) is End.LENGTH_LIMIT
  assert bytes(found[1].tokens.tolist()).decode() == "a\ufffd\ufffdb"
  found, _ = answers_to(group_of(texts), pool, max_reply_length=9, cut="middle")
  assert bytes(found[0].tokens.tolist()).decode() == "é [cut] "
  assert not found[0].is_last and not found[1].is_last


@pytest.mark.parametrize("cut", CUTS)
def test_cutting_keeps_as_much_as_fits(cut):
  text = "".join(chr(0x4E00 + n) for n in range(500))
  fits = lambda part: len(part.encode()) <= 301
  short = shorten(text, cut, fits)
  assert fits(short) and len(short.encode()) > 301 - 3 and " [cut] " in short


def test_a_stop_string_ends_a_turn_within_new_tokens(pool):
  usage = DialogueUsage()
  dialogues = EnvironmentDialogues(environments(pool, stop_strings=("</a>",)), usage)
  group = group_of(["x"])
  say(group, 0, "</a>", turn=1, end=None)  # of the environment: ends nothing
  say(group, 0, "ab</", turn=2, end=None)
  assert dialogues.find_stop(group, 0, 6) is None
  start = int(group.lengths[0])
  say(group, 0, "a>xyz", turn=2, end=None)
  assert dialogues.find_stop(group, 0, start) == start + 2 and usage.dropped_tokens == 3


def test_a_thought_that_was_opened_before_a_turn_belongs_to_it(pool):
  group = group_of(["a", "b"], question="2+2? <think>\n")
  say(group, 1, "no", turn=1, end=None)
  say(group, 1, "c", turn=2)
  given = environments(pool)
  assert given.last_turn(group, 0).startswith("<think>") and given.last_turn(group, 0)[-1] == "a"
  assert given.last_turn(group, 1) == "c"  # the reply opens none


def problems_of(*questions):
  return [Problem(question=q, answer="", solution="", reference={}) for q in questions]


def test_first_messages_are_shared_by_a_problems_rollouts(pool):
  messages, failures = environments(pool).begin(problems_of("a", "own words"), [1, 2])
  assert messages == [None, [{"role": "user", "content": "seed 2"}]] and not failures


def test_a_rollout_s_environment_has_the_line_and_its_grader_what_it_needs():
  """The names of graders around a reference are for those who grade."""
  asked = []

  def grade(texts, references):
    asked.append((texts, references))
    future = Future()
    future.set_result([Grade(Outcome.CORRECT, 1.0)])
    return future

  wrapped = {"grader": "gsm8k", "reference": {"a": 7}}
  (problem,) = problems_of("q")
  problem = dataclasses.replace(problem, reference=wrapped["reference"]).wrap(wrapped)
  name = "environments.faulty_environments:shows"
  with EnvironmentPool(name, deadline_s=20.0, grade=grade) as pool:
    group = group_of(["a"])
    group.owner.problems[0] = problem
    found, _ = answers_to(group, pool)
  assert asked == [(["a"], [wrapped])]
  assert TOKENIZER.decode(found[0].tokens.tolist()) == '{"a": 7} correct'


def test_a_failed_reset_fails_its_own_problem(pool):
  messages, failures = environments(pool).begin(problems_of("a", "broken", "b"), [1, 2, 3])
  assert messages == [None] * 3 and failures.keys() == {1} and "KeyError: 2" in failures[1]
  group = group_of(["say a", "score 1"])
  group.owner.failed_resets = {0: failures[1]}
  say(group, 0, "x" * 9, turn=0, end=None)
  group.stopped[0] = False  # nor does it count that the turn was cut
  found, _ = answers_to(group, None)  # nobody is asked
  assert all(found[g].is_last for g in range(2)) and group.details == [failures[1]] * 2
  assert {End(end) for end in group.ends} == {End.ENVIRONMENT_FAILED}
  with pytest.raises(EnvironmentStoppedError, match=r"all 2 problems of a batch; .*KeyError: 5"):
    environments(pool).begin(problems_of("broken", "broken"), [5, 6])


def test_first_messages_are_waited_for_in_pieces(pool):
  shared = []

  def share(value):  # where a request to end is noticed
    shared.append(value)
    return value

  slow = dataclasses.replace(environments(pool), share=share)
  assert slow.begin(problems_of("slow"), [0]) == ([None], {})
  assert shared == [None, [(None, None)]]


def test_why_an_environment_failed_is_told(pool):
  texts = {
    "score 1": "",
    "judge": "",
    "refuse": "no",
    "fail x": "KeyError: 'x'",
    "say ": "no tokens",
  }
  group = group_of(texts)
  answers_to(group, pool)
  for detail, part in zip(group.details, texts.values(), strict=True):
    assert part in detail and bool(part) == bool(detail)


def test_first_messages_are_what_is_measured(pool):
  """Not the question, which nothing is sampled from; before the run samples."""
  own = Problem(question="own words", answer="", solution="", reference={})
  plain = Problem(question="a long question", answer="", solution="", reference={})
  collector = lambda limit: Collector(
    TOKENIZER, limit, submit=None, results=None, outcome_policy={}, environments=environments(pool)
  )
  length = len(TOKENIZER.encode_messages([{"role": "user", "content": "seed 2"}]))
  flight = collector(length).begin([own], [2])
  assert flight.prompts.lengths.tolist() == [length]
  told = rf"^a prompt has {length} tokens .*shorten the first messages .* begins 'seed 2'"
  with pytest.raises(PromptError, match=told):
    collector(length - 1).begin([own], [2])
  with pytest.raises(PromptError, match=r"too_long = 'drop' .* begins 'a long question'"):
    collector(8).begin([plain], [2])
  check_first_messages(collector(30), [plain], [own])
  with pytest.raises(PromptError, match=r"shorten the first messages .* begins 'seed \d+'"):
    check_first_messages(collector(5), [], [own])
