"""Dialogues with an environment: who answers the policy's turns, and how dialogues end."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.data import Problem, Tokenizer
from rlvr_jax.data.stop_strings import find_stop
from rlvr_jax.environments.base import Message, Turn
from rlvr_jax.environments.dialogues import EnvironmentPool, Started
from rlvr_jax.rewards.graders import thought_prefix
from rlvr_jax.rewards.outcome import Outcome
from rlvr_jax.rollouts.batch import Flight
from rlvr_jax.rollouts.engine import SlotUsage
from rlvr_jax.rollouts.serve import Answer, Group
from rlvr_jax.workers.pool import Failure

CUTS = ("tail", "head", "middle")
_WAIT_S = 2.0  # of a process for its environments, before it exchanges with the others
CUT_NOTE = " [cut] "  # stands in a reply for what was cut


class End(enum.IntEnum):
  """How a dialogue ended; the numbers are in stores."""

  TO_BE_GRADED = 0  # by the task's grader: the environment gave no score
  CORRECT = 1  # by the environment, as `WRONG`
  WRONG = 2
  TURN_LIMIT = 3
  LENGTH_LIMIT = 4
  ENVIRONMENT_LIMIT = 5
  ENVIRONMENT_REFUSED = 6
  ENVIRONMENT_FAILED = 7

  @property
  def outcome(self) -> Outcome | None:
    """The outcome of the rollout; None if the grader decides."""
    return None if self is End.TO_BE_GRADED else Outcome[self.name]


_END_OF_FAILURE = {
  "failed": End.ENVIRONMENT_FAILED,
  "timeout": End.ENVIRONMENT_LIMIT,
  "memory": End.ENVIRONMENT_LIMIT,
  "refused": End.ENVIRONMENT_REFUSED,
}


@dataclasses.dataclass
class DialogueUsage(SlotUsage):
  """Counts of streams of dialogues.

  Attributes:
    replies: turns that an environment has answered.
    reply_waits_s: seconds from the end of a turn until its answer was taken, over all replies.
    environment_wait_seconds: in which the engine waited for replies.
    dropped_tokens: sampled behind a stop string.
  """

  replies: int = 0
  reply_waits_s: float = 0.0
  environment_wait_seconds: float = 0.0
  dropped_tokens: int = 0

  def add_replies(self, replies: int, waits_s: float, engine_s: float) -> None:
    """Counts replies, their waits, and the engine's wait for them."""
    self.replies += replies
    self.reply_waits_s += waits_s
    self.environment_wait_seconds += engine_s

  def drop(self, tokens: int) -> None:
    """Counts tokens behind a stop string."""
    self.dropped_tokens += tokens


@dataclasses.dataclass(frozen=True)
class DialogueSettings:
  """Limits of a run's dialogues.

  Attributes:
    max_turns: of the policy, ≥ 1.
    max_reply_length: tokens of a reply's text, without what the template puts around it; a longer
      one is cut. 0: no limit.
    cut: which part of a reply is cut off: "tail", "head" or "middle".
    stop_strings: each ends a turn of the policy, as a stop token does, and is part of it.
    grade_all_turns: whether the grader reads the whole dialogue, not just the policy's last turn.
  """

  max_turns: int
  max_reply_length: int = 0
  cut: str = "tail"
  stop_strings: tuple[str, ...] = ()
  grade_all_turns: bool = False


@dataclasses.dataclass(frozen=True)
class Environments:
  """What a run's dialogues need.

  Attributes:
    pool: the processes of environments; None except on the first process.
    tokenizer: of the run.
    settings: of the run.
    share: the first process's JSON value → the value, on all processes; all call it together.
  """

  pool: EnvironmentPool | None
  tokenizer: Tokenizer
  settings: DialogueSettings
  share: Callable[[Any], Any]

  def begin(
    self, problems: Sequence[Problem], seeds: Sequence[int]
  ) -> tuple[list[Sequence[Message] | None], dict[int, str]]:
    """Resets the environments of problems, to see with which messages their dialogues begin.

    Returns:
      The messages by problem, None for its own prompt; and by index of a problem whose environment
      failed, why. The rollouts of such a problem have failed.
    Raises:
      EnvironmentStoppedError: all of them failed.
    """
    resets: list[Future[Started | Failure]] = []
    if (pool := self.pool) is not None:
      pairs = zip(problems, seeds, strict=True)
      resets = [pool.reset(as_mapping(problem), seed) for problem, seed in pairs]
    results = None
    while results is None:  # in pieces, so that a request to end is noticed
      unfinished = concurrent.futures.wait(resets, timeout=_WAIT_S).not_done
      results = self.share(None if unfinished else [self._begun(reset) for reset in resets])
    failures = {index: detail for index, (_, detail) in enumerate(results) if detail is not None}
    if problems and len(failures) == len(problems):
      raise EnvironmentStoppedError(
        f"the environment failed at its reset for all {len(problems)} problems of a batch; the"
        f" first error is: {failures[0]}"
      )
    return [messages for messages, _ in results], failures

  def _begun(self, reset: Future[Started | Failure]) -> tuple[Sequence[Message] | None, str | None]:
    """The messages of a reset, or why it failed; JSON."""
    started = reset.result()
    if isinstance(started, Failure):
      return None, started.detail
    assert self.pool is not None  # it has reset the environment
    self.pool.close_dialogue(started.dialogue)
    return started.messages and [dict(message) for message in started.messages], None

  def last_turn(self, group: Group, rollout: int) -> str:
    """The text of the policy's last turn, which ends the response so far.

    It begins with "<think>" where what stands before it ends so, as in some chat templates.
    """
    length = int(group.lengths[rollout])
    first = _turn_start(group, rollout, length)
    prompts, index = group.owner.prompts, group.prompt_index
    before = prompts.tokens[index][-prompts.lengths[index] :]
    if first:
      before = group.tokens[rollout, _turn_start(group, rollout, first) : first]
    text = self.tokenizer.decode(group.tokens[rollout, first:length].tolist())
    return thought_prefix(self.tokenizer.decode(before.tolist())) + text


class EnvironmentStoppedError(RuntimeError):
  """The environments of all problems failed where no policy's text can be the cause."""


class _Ending(NamedTuple):
  """How a dialogue ends."""

  end: End
  detail: str = ""  # why the environment failed


class _Asked(NamedTuple):
  """A turn of the policy without an answer so far."""

  group: Group[Flight]
  rollout: int
  at: float  # seconds on the host's clock
  future: Future[Turn | Failure] | None  # on the first process


class EnvironmentDialogues:
  """Answers the turns of one stream of dialogues; see `serve.Dialogues`.

  The first process has the environments. All processes get its replies after the same burst.
  """

  def __init__(self, environments: Environments, usage: DialogueUsage):
    """`usage` counts what happens."""
    self._environments, self._usage = environments, usage
    self._num_asked = 0
    self._asked: dict[int, _Asked] = {}  # by number, on all processes the same
    self._ended: dict[int, _Ending] = {}  # by number, of turns that no environment gets
    # Of the first process, by id of the group and rollout: the dialogue in the pool.
    self._started: dict[tuple[int, int], Future[Started | Failure]] = {}

  def find_stop(self, group: Group[Flight], rollout: int, start: int) -> int | None:
    """See `serve.Dialogues`."""
    settings = self._environments.settings
    if not settings.stop_strings:
      return None
    length = int(group.lengths[rollout])
    first = _turn_start(group, rollout, length)
    ids = group.tokens[rollout, first:length].tolist()
    kept = find_stop(
      self._environments.tokenizer, ids, settings.stop_strings, searched=start - first
    )
    if kept is None:
      return None
    self._usage.drop(len(ids) - kept)
    return first + kept

  def ask(self, group: Group[Flight], rollout: int) -> None:
    """See `serve.Dialogues`."""
    number, self._num_asked = self._num_asked, self._num_asked + 1
    future = None
    failure = group.owner.failed_resets.get(group.prompt_index)
    if failure is not None:
      self._ended[number] = _Ending(End.ENVIRONMENT_FAILED, failure)
    elif not group.stopped[rollout]:
      self._ended[number] = _Ending(End.LENGTH_LIMIT)
    elif (pool := self._environments.pool) is not None:
      text = self._environments.last_turn(group, rollout)
      future = self._step(pool, group, rollout, text)
    self._asked[number] = _Asked(group, rollout, time.monotonic(), future)

  def take(self, *, patience_s: float, until_one: bool) -> list[Answer]:
    """See `serve.Dialogues`; waits some seconds at most, so that signals are noticed."""
    ended, self._ended = self._ended, {}
    began = time.monotonic()
    replies = self._environments.share(self._replies(patience_s, until_one and not ended))
    now = time.monotonic()
    waits_s = sum(now - self._asked[number].at for number, *_ in replies)
    self._usage.add_replies(len(replies), waits_s, now - began)
    answers = [self._end(number, *ending) for number, ending in ended.items()]
    return answers + [self._answer(*reply) for reply in replies]

  def add_costs(self, *, idle_slot_steps: int = 0, rebuilt_tokens: int = 0) -> None:
    """See `serve.Dialogues`."""
    self._usage.add_costs(idle_slot_steps=idle_slot_steps, rebuilt_tokens=rebuilt_tokens)

  def _replies(self, patience_s: float, until_one: bool) -> list[Any]:
    """On the first process, the replies that have come, as JSON: [number, kind, reply]."""
    futures = {asked.future: number for number, asked in self._asked.items() if asked.future}
    if until_one:
      first = concurrent.futures.FIRST_COMPLETED
      concurrent.futures.wait(futures, timeout=_WAIT_S, return_when=first)
    concurrent.futures.wait(futures, timeout=patience_s)  # for all of them
    done = [(number, future.result()) for future, number in futures.items() if future.done()]
    return [
      [number, "failure" if isinstance(result, Failure) else "turn", list(result)]
      for number, result in sorted(done)
    ]

  def _answer(self, number: int, kind: str, fields: list[Any]) -> Answer:
    """What follows a turn that the environment has answered."""
    if kind == "failure":
      failure = Failure(*fields)
      return self._end(number, _END_OF_FAILURE[failure.kind], failure.detail)
    turn = Turn(*fields)
    group, rollout, *_ = self._asked[number]
    if turn.done:
      if turn.score is None:
        return self._end(number, End.TO_BE_GRADED)
      _array(group.scores)[rollout] = turn.score
      return self._end(number, End.CORRECT if turn.is_correct else End.WRONG)
    length = int(group.lengths[rollout])
    if turn.score is not None:
      _array(group.turn_scores)[rollout, length - 1] = turn.score
    turns = int(_array(group.turns)[rollout, length - 1]) // 2 + 1
    if turns >= self._environments.settings.max_turns:
      return self._end(number, End.TURN_LIMIT)
    tokens = self._encode(turn, last=int(group.tokens[rollout, length - 1]))
    if not len(tokens):
      return self._end(
        number, End.ENVIRONMENT_REFUSED, f"the reply {turn.reply!r:.100} has no tokens"
      )
    # One place at least is left for the policy.
    if length + len(tokens) >= group.tokens.shape[1]:
      return self._end(number, End.LENGTH_LIMIT)
    del self._asked[number]
    return Answer(group, rollout, tokens, is_last=False)

  def _end(self, number: int, end: End, detail: str = "") -> Answer:
    """Ends the dialogue of a turn."""
    group, rollout, *_ = self._asked.pop(number)
    _array(group.ends)[rollout] = end
    if group.details is not None:
      group.details[rollout] = detail
    group.stopped[rollout] = end is not End.LENGTH_LIMIT  # of the dialogue, not of its last turn
    started = self._started.pop((id(group), rollout), None)
    if started is not None and self._environments.pool is not None:
      began = started.result()  # an answer has come
      if isinstance(began, Started):
        self._environments.pool.close_dialogue(began.dialogue)
    return Answer(group, rollout, np.zeros(0, np.int32), is_last=True)

  def _step(
    self, pool: EnvironmentPool, group: Group[Flight], rollout: int, text: str
  ) -> Future[Turn | Failure]:
    """The environment's answer to a turn; the first turn begins the dialogue."""
    key, flight, index = (id(group), rollout), group.owner, group.prompt_index
    if key in self._started:
      started = self._started[key].result()
      assert isinstance(started, Started)  # otherwise the dialogue has ended
      return pool.step(started.dialogue, text)
    problem = flight.problems[index]
    self._started[key] = pool.reset(as_mapping(problem), flight.seeds[index], problem.reference)
    answer: Future[Turn | Failure] = Future()

    def step(reset: Future[Started | Failure]) -> None:
      if (error := reset.exception()) is not None:
        answer.set_exception(error)
      elif isinstance(started := reset.result(), Failure):
        # The policy's text has not been read: the fault is the environment's, whatever it was.
        answer.set_result(started._replace(kind="failed"))
      else:
        try:
          pool.step(started.dialogue, text).add_done_callback(copy)
        except Exception as closed:  # of a pool that was closed meanwhile
          answer.set_exception(closed)

    def copy(done: Future[Turn | Failure]) -> None:
      if (error := done.exception()) is not None:
        answer.set_exception(error)
      else:
        answer.set_result(done.result())

    self._started[key].add_done_callback(step)
    return answer

  def _encode(self, turn: Turn, *, last: int) -> np.ndarray:
    """The tokens of a reply, cut if it is too long; `last` is the token before them."""
    settings, tokenizer = self._environments.settings, self._environments.tokenizer
    text, most = turn.reply, settings.max_reply_length
    if most and len(tokenizer.encode(text)) > most:
      text = shorten(text, settings.cut, lambda part: len(tokenizer.encode(part)) <= most)
    return np.asarray(tokenizer.encode_reply(text, turn.role, last), np.int32)


def shorten(text: str, cut: str, fits: Callable[[str], bool]) -> str:
  """The text without its tail, its head or its middle, and a note where that was.

  Args:
    text: too long.
    cut: one of `CUTS`.
    fits: whether a text is short enough. About the longest that fits is found by bisection.
  """
  kept, too_many = 0, len(text)  # characters
  while too_many - kept > 1:
    middle = (kept + too_many) // 2
    if fits(_without(text, cut, middle)):
      kept = middle
    else:
      too_many = middle
  return _without(text, cut, kept)


def _without(text: str, cut: str, kept: int) -> str:
  """`kept` characters of the text, and the note."""
  if cut == "tail":
    return text[:kept] + CUT_NOTE
  if cut == "head":
    return CUT_NOTE + text[len(text) - kept :]
  first = (kept + 1) // 2
  return text[:first] + CUT_NOTE + text[len(text) - (kept - first) :]


def _turn_start(group: Group, rollout: int, length: int) -> int:
  """The place where the last turn of a response of this length begins."""
  turns = _array(group.turns)[rollout, :length]
  return int(np.argmax(turns == turns[-1]))


def _array(of_dialogues: np.ndarray | None) -> np.ndarray:
  """An array that the groups of dialogues have."""
  assert of_dialogues is not None
  return of_dialogues


def as_mapping(problem: Problem) -> dict[str, Any]:
  """A problem, as environments get it: with the reference of its line, whatever graders are set."""
  return {
    "question": problem.question,
    "answer": problem.answer,
    "reference": dict(problem.own_reference),
  }
