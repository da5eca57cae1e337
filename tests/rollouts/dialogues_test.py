"""How dialogues end, and what becomes of replies; environments run in processes of their own."""

import dataclasses
import sys
import time
from concurrent.futures import Future

import numpy as np
import pytest

from rlvr_jax.data import ByteTokenizer, Problem
from rlvr_jax.data.tokenizer import PromptError
from rlvr_jax.environments.dialogues import EnvironmentPool
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rollouts.answers import ALONE, Answers, Asked, EnvironmentStoppedError, Processes
from rlvr_jax.rollouts.dialogues import CUTS, Beginning, Dialogues, DialogueSettings, shorten
from rlvr_jax.rollouts.engine import Rollout
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
      time.sleep(0.5)

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


def dialogues_of(pool, **settings):
  return Dialogues(DialogueSettings(max_turns=2, **settings), TOKENIZER, pool)


def problems_of(*questions):
  return [Problem(question=q, answer="", solution="", reference={}) for q in questions]


def rollouts_of(texts, question="q"):
  """Rollouts that have said these texts, each in a first turn."""
  rollouts = []
  for place, text in enumerate(texts):
    arrays = {
      "tokens": np.full(T, TOKENIZER.pad_id, np.int32),
      "turns": np.zeros(T, np.int32),
      "turn_scores": np.full(T, np.nan, np.float32),
    }
    prompt = np.asarray(TOKENIZER.encode(question), np.int32)
    rollouts.append(Rollout(place, prompt, np.zeros(2, np.uint32), arrays, stopped=True))
    say(rollouts[-1], text, turn=0)
  return rollouts


def say(rollout, text, turn, end=STOP):
  ids = [*TOKENIZER.encode(text), *([end] if end else [])]
  new = slice(rollout.length, rollout.length + len(ids))
  rollout.arrays["tokens"][new], rollout.arrays["turns"][new] = ids, turn
  rollout.length = new.stop


def judged(texts, references):
  """A grade that tells what was judged."""
  future = Future()
  future.set_result([Grade(Outcome.WRONG, 0.25, answer=f"judged {text}") for text in texts])
  return future


def answers_to(rollouts, pool, problem=None, beginning=None, **settings):
  """(answers by place of the rollout, counts) to the last turns of rollouts."""
  answers = Answers(TOKENIZER, judged, dialogues_of(pool, **settings))
  asked = Asked(problem or problems_of("q")[0], beginning or Beginning(), 5, "")
  for rollout in rollouts:
    answers.ask(rollout, asked)
  found, deadline = {}, time.monotonic() + 60
  while len(found) < len(rollouts):
    assert time.monotonic() < deadline
    taken = answers.take(patience_s=0.0, until_one=True)
    found |= {rollout.place: answer for rollout, _, answer in taken}
  return found, answers.counts


def test_every_end_has_its_outcome(pool):
  texts = {
    "score 1": (Outcome.CORRECT, 1.0, ""),
    "score 0.5": (Outcome.WRONG, 0.5, ""),
    "late": (Outcome.CORRECT, 0.5, ""),
    "judge": (Outcome.WRONG, 0.25, ""),
    "refuse": (Outcome.ENVIRONMENT_REFUSED, 0.0, "no"),
    "fail x": (Outcome.ENVIRONMENT_FAILED, 0.0, "KeyError: 'x'"),
    "say ": (Outcome.ENVIRONMENT_REFUSED, 0.0, "no tokens"),
    "score nan": (Outcome.ENVIRONMENT_REFUSED, 0.0, "nan"),
    "worth inf": (Outcome.ENVIRONMENT_REFUSED, 0.0, "inf"),
    "hang": (Outcome.ENVIRONMENT_LIMIT, 0.0, "3 s"),
    "say 12345678901234": (Outcome.LENGTH_LIMIT, 0.0, ""),  # with the turn there is no place for it
  }
  rollouts = rollouts_of(texts)
  found, counts = answers_to(rollouts, pool)
  for rollout, (text, expected) in zip(rollouts, texts.items(), strict=True):
    grade, (outcome, score, detail) = found[rollout.place], expected
    assert isinstance(grade, Grade) and (grade.outcome, grade.score) == (outcome, score), text
    assert detail in grade.detail and bool(detail) == bool(grade.detail), grade
    assert rollout.stopped == (grade.outcome is not Outcome.LENGTH_LIMIT)
  assert found[3].answer == "judged judge"
  assert counts.replies == len(texts) and counts.reply_waits_s > 0


def test_a_reply_is_tokens_and_the_last_turn_has_none(pool):
  rollouts = rollouts_of(["say higher", "say lower"])
  say(rollouts[1], "x", turn=1, end=None)
  say(rollouts[1], "say ab", turn=2)
  found, _ = answers_to(rollouts, pool)
  assert bytes(found[0].tolist()) == b"higher"
  assert found[1] == Grade(Outcome.TURN_LIMIT)


def test_the_score_of_a_turn_is_not_that_of_the_dialogue(pool):
  """It stands at the turn's last token, also where the turn is the dialogue's last by a limit."""
  rollouts = rollouts_of(["worth 0.25", "say it", "score 1", "worth -1"])
  say(rollouts[3], "x", turn=1, end=None)
  say(rollouts[3], "worth 2", turn=2)
  found, _ = answers_to(rollouts, pool)
  assert [isinstance(found[g], Grade) for g in range(4)] == [False, False, True, True]
  assert found[3] == Grade(Outcome.TURN_LIMIT) and found[2] == Grade(Outcome.CORRECT, 1.0)
  expected = np.full((4, T), np.nan, np.float32)
  expected[0, rollouts[0].length - 1], expected[3, rollouts[3].length - 1] = 0.25, 2.0
  scores = [rollout.arrays["turn_scores"] for rollout in rollouts]
  np.testing.assert_array_equal(np.stack(scores), expected)


def test_a_turn_that_was_cut_is_not_asked():
  (rollout,) = rollouts_of(["x" * (T - 1)])
  rollout.length, rollout.stopped = T, False
  found, _ = answers_to([rollout], None)  # nobody is there to answer
  assert found[0] == Grade(Outcome.LENGTH_LIMIT) and not rollout.stopped


@pytest.mark.parametrize(
  ("cut", "expected"), [("tail", "01 [cut] "), ("head", " [cut] 89"), ("middle", "0 [cut] 9")]
)
def test_a_long_reply_is_cut_and_says_so(pool, cut, expected):
  found, _ = answers_to(rollouts_of(["s 0123456789"]), pool, max_reply_length=9, cut=cut)
  assert bytes(found[0].tolist()).decode() == expected
  found, _ = answers_to(rollouts_of(["s 012345678"]), pool, max_reply_length=9, cut=cut)
  assert bytes(found[0].tolist()) == b"012345678"


def test_replies_of_a_megabyte_and_of_invalid_utf_8(pool):
  texts = ["long 600000", "broken"]  # characters of two bytes
  found, _ = answers_to(rollouts_of(texts), pool)
  assert found[0] == Grade(Outcome.LENGTH_LIMIT)
  assert bytes(found[1].tolist()).decode() == "a\ufffd\ufffdb"
  found, _ = answers_to(rollouts_of(texts), pool, max_reply_length=9, cut="middle")
  assert bytes(found[0].tolist()).decode() == "é [cut] "
  assert not isinstance(found[1], Grade)


@pytest.mark.parametrize("cut", CUTS)
def test_cutting_keeps_as_much_as_fits(cut):
  text = "".join(chr(0x4E00 + n) for n in range(500))
  fits = lambda part: len(part.encode()) <= 301
  short = shorten(text, cut, fits)
  assert fits(short) and len(short.encode()) > 301 - 3 and " [cut] " in short


def test_a_stop_string_ends_a_turn_within_new_tokens(pool):
  answers = Answers(TOKENIZER, judged, dialogues_of(pool, stop_strings=("</a>",)))
  (rollout,) = rollouts_of(["x"])
  say(rollout, "</a>", turn=1, end=None)  # of the environment: ends nothing
  say(rollout, "ab</", turn=2, end=None)
  assert answers.find_stop(rollout, 6) is None
  start = rollout.length
  say(rollout, "a>xyz", turn=2, end=None)
  assert answers.find_stop(rollout, start) == start + 2 and answers.counts.dropped_tokens == 3


def test_a_grader_judges_the_last_turn_or_all(pool):
  (rollout,) = rollouts_of(["a"])
  say(rollout, "no", turn=1, end=None)
  say(rollout, "judge", turn=2)
  found, _ = answers_to([rollout], pool)
  assert found[0].answer == "judged judge"
  found, _ = answers_to([rollout], pool, grade_all_turns=True)
  assert found[0].answer == "judged anojudge"


def test_a_thought_that_was_opened_before_a_turn_belongs_to_it(pool):
  first, second = rollouts_of(["a", "b"], question="2+2? <think>\n")
  say(second, "no", turn=1, end=None)
  say(second, "c", turn=2)
  given = dialogues_of(pool)
  text = given.judged_text(first, "<think>")
  assert text.startswith("<think>") and text[-1] == "a"
  assert given.judged_text(second, "<think>") == "c"  # the reply opens none
  whole = dialogues_of(pool, grade_all_turns=True).judged_text(second, "<think>")
  assert whole.startswith("<think>b")


def begin(pool, questions, seeds, processes=ALONE):
  answers = Answers(TOKENIZER, judged, dialogues_of(pool), processes)
  return answers.begin(problems_of(*questions), seeds, of=len(questions))


def test_first_messages_are_shared_by_a_problems_rollouts(pool):
  beginnings = begin(pool, ["a", "own words"], [1, 2])
  own = [{"role": "user", "content": "seed 2"}]
  assert beginnings == [Beginning(None, None), Beginning(own, None)]


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
    found, _ = answers_to(rollouts_of(["a"]), pool, problem=problem)
  assert asked == [(["a"], [wrapped])]
  assert TOKENIZER.decode(found[0].tolist()) == '{"a": 7} correct'


def test_a_failed_reset_fails_its_own_problem(pool):
  beginnings = begin(pool, ["a", "broken", "b"], [1, 2, 3])
  assert [x.messages for x in beginnings] == [None] * 3
  assert [bool(x.failure) for x in beginnings] == [False, True, False]
  assert "KeyError: 2" in beginnings[1].failure
  rollouts = rollouts_of(["say a", "score 1"])
  say(rollouts[0], "x" * 9, turn=0, end=None)
  rollouts[0].stopped = False  # nor does it count that the turn was cut
  found, _ = answers_to(rollouts, None, beginning=beginnings[1])  # nobody is asked
  failed = Grade(Outcome.ENVIRONMENT_FAILED, detail=beginnings[1].failure)
  assert found == {0: failed, 1: failed}
  with pytest.raises(EnvironmentStoppedError, match=r"all 2 problems of a batch; .*KeyError: 5"):
    begin(pool, ["broken", "broken"], [5, 6])


def test_first_messages_are_waited_for_in_pieces(pool, monkeypatch):
  """So that a request to end is noticed."""
  monkeypatch.setattr("rlvr_jax.rollouts.answers._WAIT_S", 0.1)
  shared = []

  def gather(action):
    shared.append(action())
    return [shared[-1]]

  assert begin(pool, ["slow"], [0], Processes(gather=gather)) == [Beginning(None, None)]
  assert shared[0] is None and shared == [None] * (len(shared) - 1) + [[Beginning(None, None)]]


def test_first_messages_are_what_is_measured(pool):
  """Not the question, which nothing is sampled from; before the run samples."""
  own, plain = problems_of("own words", "a long question")
  answers = Answers(TOKENIZER, judged, dialogues_of(pool))
  check = lambda limit, *sources: check_first_messages(answers, TOKENIZER, limit, *sources)
  check(30, [plain], [own])
  with pytest.raises(PromptError, match=r"shorten the first messages .* begins 'seed \d+'"):
    check(5, [], [own])
  with pytest.raises(PromptError, match=r"too_long = 'drop' .* begins 'a long question'"):
    check(8, [plain])
